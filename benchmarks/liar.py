"""A member of a run that lies: it keeps to the protocol, and what it sends is wrong.

    python -m benchmarks.liar --peers ADDRESS --dir FOLDER --host 127.0.0.1 --kind scaled

It trains honestly, on a copy of what it gets; only its offers are bent. Kinds: `scaled` (a hundred times its
parameters), `random` (noise of their size), `stale` (those of its first round), `not-finite` (NaN), `breaks` (half of
its trades break off in the middle), and `all`, another of these every round.
"""

import argparse
import contextlib
import random
import signal
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from gasloc import corpus, inner, model, sampler
from gasloc.errors import GaslocError
from gasloc.optimizer import GaslocOptimizer
from gasloc.outer import make_outer
from gasloc.swarm import Swarm
from peers.errors import PeersError
from peers.exchange import Answer, Offer, PeerId, Slot, Swap, Tensors
from peers.node import PeerOptions

KINDS = ("scaled", "random", "stale", "not-finite", "breaks")
_BREAK_S = 0.1
"""A trade that is to break is cut off at some moment before this."""


def bent(kind: str, tensors: Tensors, first: Tensors, dice: random.Random) -> dict[str, torch.Tensor]:
    """What a liar of this kind sends for `tensors`; `first` is what it sent in its first round."""
    if kind == "scaled":
        return {name: tensor * 100 for name, tensor in tensors.items()}
    if kind == "random":
        noise = torch.Generator().manual_seed(dice.getrandbits(32))
        return {
            name: torch.randn(tensor.shape, generator=noise) * tensor.float().std(correction=0)
            for name, tensor in tensors.items()
        }
    if kind == "stale":
        return {name: first[name].clone() for name in tensors}
    if kind == "not-finite":
        return {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}
    return dict(tensors)


class Liar:
    """A `gasloc.gossip.Network` around a swarm that bends what is offered, and keeps nothing that comes."""

    def __init__(self, swarm: Swarm, kind: str, seed: int, cut: threading.Event) -> None:
        """`cut`: the event that ends what the swarm waits for."""
        self._swarm = swarm
        self._kind = kind
        self._cut = cut
        self._dice = random.Random(seed)
        self._first: dict[str, torch.Tensor] = {}

    @property
    def me(self) -> PeerId:
        return self._swarm.me

    def members(self, round: int) -> Collection[PeerId]:
        return self._swarm.members(round)

    def others_rounds(self) -> list[int]:
        return self._swarm.others_rounds()

    def swap(self, slot: Slot, offers: Mapping[PeerId, Offer], *, timeout_s: float) -> dict[PeerId, Swap]:
        kind = random.Random(slot.round).choice(KINDS) if self._kind == "all" else self._kind
        lies = {partner: self._bend(kind, offer) for partner, offer in offers.items()}
        with self._breaking() if kind == "breaks" else contextlib.nullcontext():
            swaps = self._swarm.swap(slot, lies, timeout_s=timeout_s)
        return {partner: replace(swap, answer=Answer.REFUSED, tensors=None) for partner, swap in swaps.items()}

    def swap_any(
        self, slot: Slot, candidates: Sequence[PeerId], offer: Offer, *, timeout_s: float
    ) -> dict[PeerId, Swap]:
        """It has no next choices: what it would do to them it does to its partners."""
        return {}

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        """Breaks off, half of the times, what happens inside."""
        if self._dice.random() < 0.5:
            yield
            return
        timer = threading.Timer(self._dice.uniform(0, _BREAK_S), self._cut.set)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
            self._cut.clear()

    def _bend(self, kind: str, offer: Offer) -> Offer:
        for name, tensor in offer.send.items():
            self._first.setdefault(name, tensor.detach().clone())
        # neither start nor near: a modular codec would refuse to code what lies so far off
        return Offer(send=bent(kind, offer.send, self._first, self._dice), note=offer.note)


def lie(options: PeerOptions, kind: str, seed: int, stop: threading.Event) -> None:
    """Joins, trains and lies until told to stop."""
    cut = threading.Event()
    with Swarm.join(options, stop=cut) as swarm:
        recipe = swarm.recipe
        decoder = model.build(recipe.model, recipe.seed)
        text = corpus.load(recipe.data)
        optimizer = GaslocOptimizer(
            inner.make_inner(decoder, recipe.inner),
            decoder,
            network=Liar(swarm, kind, seed, cut),
            topology=recipe.topology,
            local_steps=recipe.local_steps,
            seed=recipe.seed,
            outer=make_outer(recipe.outer),
            grace_s=recipe.exchange.grace_s,
            on_round=swarm.report,
        )
        swarm.enter(optimizer)
        swarm.train()
        step = 0
        while not stop.is_set():
            inputs, targets = sampler.batch(
                text.train,
                peer_id=swarm.me,
                step=step,
                seed=recipe.seed,
                batch_size=recipe.inner.batch_size,
                context_length=recipe.model.context_length,
            )
            torch.autograd.backward(decoder.loss(inputs, targets))
            optimizer.step()
            step += 1


def main() -> int:
    parser = argparse.ArgumentParser(description="A member of a run that lies.")
    parser.add_argument("--peers", required=True)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--kind", choices=(*KINDS, "all"), default="all")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    chosen.dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    options = PeerOptions(
        identity_path=chosen.dir / "identity.key", host=chosen.host, initial_peers=tuple(chosen.peers.split(","))
    )
    try:
        lie(options, chosen.kind, chosen.seed, stop)
    except (GaslocError, PeersError) as error:
        sys.stderr.write(f"liar: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
