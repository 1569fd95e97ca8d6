"""On a CUDA device: tokens a second with and without the exchange, and the outer step against a copy on the device.

    python -m benchmarks.device [--steps N] [--json FILE] [--strict]

The 134m recipe as it is shipped, on random bytes. One peer trains on the device; its partner, a second process on
127.0.0.1 with its own p2pd, takes no local steps and answers every exchange, so that the device is the trainer's alone.
Both rates are of whole rounds of `--steps` local steps. The anchor and the outer step live in CPU memory, so the outer
step is told with the way to the CPU and back, against one copy of the parameters on the device. Where there is no CUDA
device this says so and ends with 0.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks import bars
from gasloc import inner, model, recipe
from gasloc.optimizer import GaslocOptimizer, RoundResult
from gasloc.outer import make_outer
from gasloc.recipe import Recipe
from gasloc.swarm import Swarm
from peers.node import PeerOptions

_GRACE_S = 120.0
_END_S = 30.0
_REPEATS = 5


def main() -> int:
    """Prints the figures; 0, also where there is no device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=100, help="local steps a round")
    parser.add_argument("--rounds", type=int, default=2, help="that count; one before them does not")
    parser.add_argument("--partner", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    bars.add_options(parser)
    options = parser.parse_args()
    if options.partner:
        _answer_exchanges(options.partner, options.folder, options.rounds + 1)
        return 0
    if not torch.cuda.is_available():
        sys.stdout.write("no CUDA device here: nothing was measured\n")
        return 0
    device = torch.device("cuda")
    changes = {"local_steps": options.steps, "rounds": options.rounds + 1, "pacing": False}
    loaded = recipe.load("134m")
    chosen = recipe.override(loaded, {**changes, "exchange": loaded.exchange.model_dump() | {"grace_s": _GRACE_S}})
    alone = _tokens_per_s(chosen, device, None, options.rounds)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        where = PeerOptions(folder / "first.key", host="127.0.0.1")
        with Swarm.start(chosen, where) as swarm:
            mixed = _tokens_per_s(chosen, device, swarm, options.rounds, folder)
    outer_s, copy_s = _outer_step(chosen, device)
    name = torch.cuda.get_device_name(device)
    sys.stdout.write(
        f"{name}, recipe 134m, {options.steps} local steps a round\n"
        f"training alone         {alone:12,.0f} tokens/s\n"
        f"with the exchange      {mixed:12,.0f} tokens/s, {mixed / alone:.3f} of it\n"
        f"outer step, both ways  {1e3 * outer_s:12.1f} ms\n"
        f"copy on the device     {1e3 * copy_s:12.2f} ms, {outer_s / copy_s:.0f} times\n"
    )
    figures = {"device": name, "alone": alone, "with_exchange": mixed, "outer_s": outer_s, "copy_s": copy_s}
    return bars.finish([], figures, json_path=options.json, strict=options.strict)


def _tokens_per_s(
    chosen: Recipe, device: torch.device, swarm: Swarm | None, rounds: int, folder: Path | None = None
) -> float:
    """The rate over whole rounds, after one that does not count."""
    decoder = model.build(chosen.model, chosen.seed).to(device)
    results: list[RoundResult] = []
    optimizer = _optimizer(chosen, decoder, swarm, results)
    partner = None
    if swarm is not None and folder is not None:
        swarm.enter(optimizer)
        command = [sys.executable, "-m", "benchmarks.device", "--partner", swarm.addresses[0], "--folder", str(folder)]
        partner = subprocess.Popen([*command, "--rounds", str(rounds)])
        swarm.wait_for(2)
        swarm.train()
    try:
        _train_round(chosen, decoder, optimizer, device)
        began = time.perf_counter()
        for _ in range(rounds):
            _train_round(chosen, decoder, optimizer, device)
        seconds = time.perf_counter() - began
    finally:
        if partner is not None:
            _end(partner)
    lonely = [result.reason for result in results if swarm is not None and not result.mixed]
    if lonely:
        raise SystemExit(f"a round went by without an exchange: {lonely[0]}")
    return rounds * chosen.local_steps * chosen.inner.batch_size * chosen.model.context_length / seconds


def _optimizer(
    chosen: Recipe, decoder: model.Decoder, swarm: Swarm | None, results: list[RoundResult]
) -> GaslocOptimizer:
    def ended(result: RoundResult) -> None:
        results.append(result)
        if swarm is not None:
            swarm.publish(result)

    return GaslocOptimizer(
        inner.make_inner(decoder, chosen.inner),
        decoder,
        network=swarm,
        topology=chosen.topology,
        local_steps=chosen.local_steps,
        fragments=chosen.fragments,
        seed=chosen.seed,
        outer=make_outer(chosen.outer),
        grace_s=chosen.exchange.grace_s,
        on_round=ended,
    )


def _train_round(chosen: Recipe, decoder: model.Decoder, optimizer: GaslocOptimizer, device: torch.device) -> None:
    shape = (chosen.inner.batch_size, chosen.model.context_length + 1)
    for _ in range(chosen.local_steps):
        tokens = torch.randint(0, chosen.model.vocabulary_size, shape, device=device)
        with inner.autocast(device):
            loss = decoder.loss(tokens[:, :-1], tokens[:, 1:])
        torch.autograd.backward([loss])
        inner.clip(decoder, chosen.inner)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize(device)


def _answer_exchanges(address: str, folder: Path, rounds: int) -> None:
    """The partner: local steps without gradients, so it waits at every exchange."""
    with Swarm.join(PeerOptions(folder / "partner.key", host="127.0.0.1", initial_peers=(address,))) as swarm:
        chosen = swarm.recipe
        decoder = model.build(chosen.model, chosen.seed)
        optimizer = _optimizer(chosen, decoder, swarm, [])
        swarm.enter(optimizer)
        swarm.train()
        for _ in range(rounds * chosen.local_steps):
            optimizer.step()


def _outer_step(chosen: Recipe, device: torch.device) -> tuple[float, float]:
    """Seconds of the outer step with the parameters' way to the CPU and back, and of a copy on the device; medians."""
    decoder = model.build(chosen.model, chosen.seed).to(device)
    alone = GaslocOptimizer(
        inner.make_inner(decoder, chosen.inner), decoder, local_steps=1, outer=make_outer(chosen.outer)
    )
    parameters = [parameter.detach() for parameter in decoder.parameters()]
    copies = [torch.empty_like(parameter) for parameter in parameters]
    outer_s, copy_s = [], []
    for _ in range(_REPEATS):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        alone.step()  # no gradient: the step is a round's end, and nothing else
        torch.cuda.synchronize(device)
        middle = time.perf_counter()
        for copy, parameter in zip(copies, parameters, strict=True):
            copy.copy_(parameter)
        torch.cuda.synchronize(device)
        outer_s.append(middle - began)
        copy_s.append(time.perf_counter() - middle)
    return sorted(outer_s)[_REPEATS // 2], sorted(copy_s)[_REPEATS // 2]


def _end(child: "subprocess.Popen[bytes]") -> None:
    try:
        child.wait(_END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


if __name__ == "__main__":
    sys.exit(main())
