"""One exchange: partners from the topology, a trade with them, and the mix that comes of it."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from torch import Tensor

from gasloc import mixing, topology
from gasloc.all_reduce import Trades, all_reduce
from gasloc.clipping import Clipped, clip
from peers.exchange import Answer, Offer, PeerId, Slot, Swap, Tensors


@runtime_checkable
class Network(Protocol):
    """What the algorithm sees of the swarm. `gasloc.swarm.Swarm` is one."""

    @property
    def me(self) -> PeerId: ...

    def members(self, round: int) -> Collection[PeerId]:
        """Those ready to mix near `round`, me included."""
        ...

    def swap(self, slot: Slot, offers: Mapping[PeerId, Offer], *, timeout_s: float) -> dict[PeerId, Swap]:
        """Trades with every partner at once and blocks until done; see `peers.exchange.Exchange.swap`."""
        ...

    def others_rounds(self) -> list[int]:
        """The rounds that the other members publish."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What of the recipe an exchange goes by."""

    topology: str
    seed: int
    mixes: int = 1
    """Mixes one after another, each with partners of its own."""
    grace_s: float = 10.0
    """How long a partner that is not yet there is waited for, seconds; for each mix."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The outcome of one exchange at one peer."""

    mix: Mapping[str, Tensor]
    """Like `phi` in names, shapes and dtypes; `phi` itself where nobody answered."""
    swaps: Mapping[PeerId, Swap]
    """One a partner over all mixes, without tensors; accepted if one of its trades was."""
    partners: tuple[PeerId, ...]
    """Those whose parameters went into the mix."""
    mixes_tried: int
    """Mixes for which there was somebody to trade with."""
    mixes_done: int
    """Mixes into which at least one partner's parameters went."""
    clips: tuple[tuple[PeerId, Clipped], ...] = ()
    """How far each partner was in each trade, in the order of trades; empty where the radius is infinite."""


def exchange(
    network: Network,
    plan: Plan,
    phi: Tensors,
    slot: Slot,
    *,
    members: Collection[PeerId],
    note: Mapping[str, float],
    radius: float = math.inf,
    start: Tensors | None = None,
) -> Exchanged:
    """`exchanging`, with its trades made over `network`; blocks."""
    trades = exchanging(network.me, plan, phi, slot, members=members, note=note, radius=radius, start=start)
    try:
        part, offers = next(trades)
        while True:
            part, offers = trades.send(network.swap(part, offers, timeout_s=plan.grace_s))
    except StopIteration as end:
        result: Exchanged = end.value
        return result


def exchanging(
    me: PeerId,
    plan: Plan,
    phi: Tensors,
    slot: Slot,
    *,
    members: Collection[PeerId],
    note: Mapping[str, float],
    radius: float = math.inf,
    start: Tensors | None = None,
) -> Trades[Exchanged]:
    """Mixes `phi` (named tensors, only read) with the partners that `plan` draws among `members`.

    Yields each trade and is sent its outcome; the timeout of each is the plan's `grace_s`.

    `slot.mix` counts exchanges within the round; mix k of this one travels in slot `slot.mix * mixes + k`, which
    also draws its partners. A mix whose partners all fail is skipped, the others stand: the round's matrix is the
    product of those that came about. With nobody to trade with this returns at once.

    Each partner's difference to oneself is clipped to `radius` first, in place in what was received; see
    `gasloc.clipping`. Infinity is the plain average, and so is any radius that nobody exceeds, bit for bit.

    `start` is what `phi` moved from this round, by name: modular codecs need it (`peers.exchange.Offer.start`).
    """
    mix: Mapping[str, Tensor] = phi
    swaps: dict[PeerId, Swap] = {}
    partners: list[PeerId] = []
    clips: list[tuple[PeerId, Clipped]] = []
    tried = done = 0
    for index in range(slot.mix * plan.mixes, (slot.mix + 1) * plan.mixes):
        weights = topology.row(
            plan.topology, round=slot.round, members={*members, me}, me=me, seed=plan.seed, mix=index
        )
        mix, answers, clipped = yield from _mix_once(
            me, plan, mix, weights, replace(slot, mix=index), note, radius, start
        )
        clips += clipped
        came = [peer for peer, swap in answers.items() if swap.tensors is not None]
        tried += bool(answers)
        done += bool(came)
        partners += [peer for peer in came if peer not in partners]
        for peer, swap in answers.items():
            swaps[peer] = joined(swaps[peer], swap) if peer in swaps else replace(swap, tensors=None)
    return Exchanged(mix, swaps, tuple(partners), tried, done, tuple(clips))


def _mix_once(
    me: PeerId,
    plan: Plan,
    phi: Mapping[str, Tensor],
    weights: Mapping[PeerId, float],
    slot: Slot,
    note: Mapping[str, float],
    radius: float,
    start: Tensors | None,
) -> Trades[tuple[Mapping[str, Tensor], Mapping[PeerId, Swap], list[tuple[PeerId, Clipped]]]]:
    if plan.topology == "all-to-all" and len(weights) > 2:
        reduced = yield from all_reduce(phi, weights, me, slot, note=note, radius=radius, start=start)
        return reduced.mix, reduced.swaps, reduced.clips
    offer = Offer(send=phi, note=note, start=start)
    offers = {peer: offer for peer, weight in weights.items() if peer != me and weight > 0}
    # with no offers this returns at once, and lets others be told which round we are at
    swaps = yield slot, offers
    received = {peer: swap.tensors for peer, swap in swaps.items() if swap.tensors is not None}
    clips = [(peer, clip(phi, tensors, radius)) for peer, tensors in received.items() if radius < math.inf]
    return (mixing.mix(phi, received, weights, me) if received else phi), swaps, clips


def joined(first: Swap, second: Swap) -> Swap:
    """Two trades with one partner as one, without tensors: accepted if either was, costs summed."""
    base = first if first.answer is Answer.ACCEPT or second.answer is not Answer.ACCEPT else second
    return replace(
        base,
        tensors=None,
        bytes_sent=first.bytes_sent + second.bytes_sent,
        bytes_received=first.bytes_received + second.bytes_received,
        seconds=first.seconds + second.seconds,
    )
