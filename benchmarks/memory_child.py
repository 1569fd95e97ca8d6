"""One process of `benchmarks.memory`: trains alone, or as a peer, and tells its peak memory phase by phase.

A phase's peak is the kernel's high-water mark of the resident set, which is set back where the phase begins.
"""

import argparse
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from gasloc import inner, model, recipe
from gasloc.recipe import Recipe

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_GRACE_S = 300.0
_WAITS = 5
_GOODBYE_S = 300.0


class Peaks:
    """The highest resident set in each phase, bytes."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}
        self.training = False
        """Whether outer steps are of a round, and not trials as a state is loaded."""
        self._phase = "start"
        self._lock = threading.Lock()
        """Under overlap an exchange begins on a thread of its own."""

    def begin(self, phase: str) -> None:
        """Ends the phase before."""
        with self._lock:
            self._end()
            self._phase = phase
            _CLEAR.write_text("5")

    def _end(self) -> None:
        """Counts what the phase reached so far."""
        self.of[self._phase] = max(self.of.get(self._phase, 0), _resident_bytes("VmHWM"))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One phase; outside of any, nothing counts as of it."""
        self.begin(name)
        try:
            yield
        finally:
            self.begin("between")


def _resident_bytes(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return 1024 * int(line.split()[1])


def chosen_recipe(options: argparse.Namespace) -> Recipe:
    """The recipe, with as many local steps a round as the benchmark has time for."""
    loaded = recipe.load(options.recipe)
    fragments = options.fragments or loaded.fragments
    changes = {"local_steps": max(options.local_steps, fragments), "fragments": fragments, "pacing": False}
    overlap = options.overlap or "off"
    changes["exchange"] = loaded.exchange.model_dump() | {"grace_s": _GRACE_S, "overlap": overlap}
    return recipe.override(loaded, {**changes, "rounds": options.rounds, "topology": "2-peer"})


def train_alone(options: argparse.Namespace) -> None:
    """Local AdamW steps as anybody's loop takes them, and nothing else."""
    peaks = Peaks()
    chosen = chosen_recipe(options)
    decoder = model.build(chosen.model, chosen.seed)
    optimizer = inner.make_inner(decoder, chosen.inner)
    for step in range(options.alone_steps):
        with peaks.phase("local step"):
            _backward(options, decoder, chosen, step)
            optimizer.step()
            optimizer.zero_grad()
    _tell({"peaks": peaks.of, "parameters": sum(parameter.numel() for parameter in decoder.parameters())})


def train_as_peer(options: argparse.Namespace) -> None:
    """A peer of two: rounds of local steps, exchanges over p2pd and outer steps; then a state for a newcomer."""
    from gasloc.optimizer import GaslocOptimizer, RoundResult
    from gasloc.outer import make_outer
    from gasloc.swarm import Swarm
    from peers.node import PeerOptions

    peaks = Peaks()
    torch.zeros(1)
    loaded_bytes = _resident_bytes("VmRSS")
    where = PeerOptions(options.folder / "identity.key", host="127.0.0.1", initial_peers=tuple(options.peers))
    swarm = Swarm.join(where) if options.peers else Swarm.start(chosen_recipe(options), where)
    with swarm:
        chosen = swarm.recipe
        decoder = model.build(chosen.model, chosen.seed)
        results: list[RoundResult] = []
        make = make_outer(chosen.outer)

        def watched(anchor: list[torch.Tensor]) -> torch.optim.Optimizer:
            outer = make(anchor)
            outer.register_step_pre_hook(lambda *_: peaks.begin("outer step") if peaks.training else None)
            return outer

        optimizer = GaslocOptimizer(
            inner.make_inner(decoder, chosen.inner),
            decoder,
            network=swarm,
            topology=chosen.topology,
            local_steps=chosen.local_steps,
            fragments=chosen.fragments,
            seed=chosen.seed,
            outer=watched,
            grace_s=chosen.exchange.grace_s,
            overlap=chosen.exchange.overlap,
            on_round=results.append,
        )
        with peaks.phase("entering the run"):
            swarm.enter(optimizer)
        _tell({"address": swarm.addresses[0]})
        if not any(swarm.wait_for(2) >= 2 for _ in range(_WAITS)):
            raise SystemExit("the other peer was not seen")
        swarm.train()
        peaks.training = True
        swarm.on_exchange = lambda slot, partners: peaks.begin("exchange and mix")
        for step in range(options.rounds * chosen.local_steps + 1):  # one with all outer state there
            with peaks.phase("local step"):
                _backward(options, decoder, chosen, step)
                optimizer.step()
                optimizer.zero_grad()
            if results and results[-1].next_round == optimizer.round and optimizer.local_step == 0:
                swarm.publish(results[-1])
        optimizer.take_outcomes()
        with peaks.phase("a copy of the state for a newcomer"):
            optimizer.snapshot()
        daemons = psutil.Process().children(recursive=True)
        _tell(
            {
                "peaks": peaks.of,
                "code_bytes": loaded_bytes,
                "daemon_bytes": sum(child.memory_info().rss for child in daemons),
                "mixed": [len(result.partners) for result in results],
                "overlap_steps": max(result.overlap_steps for result in results),
                "reasons": [result.reason for result in results],
                "bytes_received": [result.bytes_received for result in results],
            }
        )
        _wait_for_goodbye()


def _backward(options: argparse.Namespace, decoder: model.Decoder, chosen: Recipe, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, chosen.model.vocabulary_size, (1, options.tokens + 1), generator=generator)
    torch.autograd.backward([decoder.loss(tokens[:, :-1], tokens[:, 1:])])
    inner.clip(decoder, chosen.inner)


def _wait_for_goodbye() -> None:
    """Stays until the other has ended as well, so that neither trades with a peer that is gone."""
    waiting = threading.Thread(target=sys.stdin.readline, daemon=True)
    waiting.start()
    waiting.join(_GOODBYE_S)


def _tell(figures: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the benchmark and its processes have in common."""
    parser.add_argument("--recipe", default="134m")
    parser.add_argument("--fragments", type=int, default=0, help="instead of the recipe's")
    parser.add_argument("--tokens", type=int, default=16, help="of one batch")
    parser.add_argument("--local-steps", type=int, default=8, help="a round; as many as fragments at least")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--overlap", type=int, default=0, help="steps for which an exchange may be under way")
    parser.add_argument("--alone-steps", type=int, default=3)


def main() -> None:
    """Reads what is measured from the command line; figures go to stdout, one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("role", choices=("alone", "peer"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--peers", nargs="*", default=[])
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.role == "alone":
        train_alone(options)
    else:
        train_as_peer(options)


if __name__ == "__main__":
    main()
