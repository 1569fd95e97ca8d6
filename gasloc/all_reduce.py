"""All-to-all without a server: reduce-scatter, then all-gather (Rabenseifner's all-reduce over a full mesh).

The model is cut into as many pieces as there are members; each member owns one. A peer sends every other the piece
that it owns (scatter), owners average, and send the average back to all (gather): about `2 (n-1)/n` of the model
out of each peer and as much in, where swapping whole models takes `n-1` of it.

A member that is missing is left out and the weights are renormalised: owners average what came, and the pieces
whose owner is missing are traded among those who are left (repair).
"""

import math
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from gasloc.clipping import Clipped, clip
from gasloc.mixing import mix_received
from peers.exchange import Offer, PeerId, Slot, Swap, Tensors, layout_of

T = TypeVar("T")

SCATTER, GATHER, REPAIR = "1-scatter", "2-gather", "3-repair"
"""Phases of one all-reduce, in the order in which slots count them."""


@dataclass(frozen=True, slots=True)
class WithAll:
    """A request for `peers.exchange.Exchange.swap`: a trade with each of these partners."""

    slot: Slot
    offers: Mapping[PeerId, Offer]
    timeout_s: float | None = None
    """None: the usual grace."""


@dataclass(frozen=True, slots=True)
class WithAny:
    """A request for `peers.exchange.Exchange.swap_any`: a trade with one that is left over in the slot, too."""

    slot: Slot
    candidates: tuple[PeerId, ...]
    offer: Offer
    timeout_s: float


Trades = Generator[WithAll | WithAny, Mapping[PeerId, Swap], T]
"""Yields what is to be traded in a slot, is sent what came of it, and returns a `T` in the end.

So whoever drives it may block, as the trainer does, or await, as the simulator does.
"""


@dataclass(frozen=True, slots=True)
class Reduced:
    """The outcome at one peer."""

    mix: dict[str, Tensor]
    """The average; like `phi` in names, shapes and dtypes. Where a piece could not be had, `phi` itself."""
    swaps: dict[PeerId, Swap]
    """One a partner, bytes of all phases summed. Its tensors are empty: they went into `mix`."""
    clips: list[tuple[PeerId, Clipped]] = field(default_factory=list)
    """How far each partner's piece was, as lengths over the whole; of averages those that were clipped."""


def cut(sizes: Mapping[str, int], count: int) -> list[list[tuple[str, int, int]]]:
    """Cuts named flat tensors, end to end in order of names, into `count` pieces of equal length to one element.

    `sizes` are numbers of elements. A piece is a list of (name, start, stop) and may be empty.
    """
    total = sum(sizes.values())
    bounds = [total * index // count for index in range(count + 1)]
    pieces: list[list[tuple[str, int, int]]] = [[] for _ in range(count)]
    begin = 0
    for name in sorted(sizes):
        end = begin + sizes[name]
        for index in range(count):
            start, stop = max(begin, bounds[index]), min(end, bounds[index + 1])
            if start < stop:
                pieces[index].append((name, start - begin, stop - begin))
        begin = end
    return pieces


def all_reduce(
    phi: Tensors,
    members: Collection[PeerId],
    me: PeerId,
    slot: Slot,
    *,
    note: Mapping[str, float],
    radius: float = math.inf,
    start: Tensors | None = None,
) -> Trades[Reduced]:
    """The plain mean of all members' `phi`, over those that answer. Changes nothing but by its return.

    All members must call it in the same slot with the same `members`; a member with another view of who takes
    part expects other pieces and is refused by name, so it counts as missing. Where both sides of every failed
    pair saw it fail, all who are left end with equal values, bit for bit, as long as nothing is clipped and the codec
    is exact.

    A finite `radius` is for whole states (`gasloc.clipping`). A piece with a share s of all elements is clipped to
    `radius * sqrt(s)`, as a movement that is spread evenly has it: by its owner against the owner's own piece, and
    averages, which an owner may have made up, by each receiver against its own.

    `start` is what `phi` moved from, for modular codecs. They restore each piece, and each average, from our own
    values of it: `peers.exchange.Offer.near`.
    """
    order = sorted(members)
    flat = {name: tensor.reshape(-1) for name, tensor in phi.items()}
    pieces = cut({name: tensor.numel() for name, tensor in flat.items()}, len(order))
    matrices = {name for name, tensor in phi.items() if tensor.dim() >= 2}
    views = {peer: _views(flat, piece, matrices) for peer, piece in zip(order, pieces, strict=True)}
    starts = _start_views(start, [span for piece in pieces for span in piece], matrices)
    others = [peer for peer in order if peer != me]

    own_layout = layout_of(views[me])
    scattered = yield WithAll(
        _phase(slot, SCATTER),
        {peer: Offer(views[peer], own_layout, note, start=starts, near=views[me]) for peer in others},
    )
    guard = _Guard(radius, sum(tensor.numel() for tensor in flat.values()))
    own_piece = _mean(views[me], guard.clipped(views[me], _tensors(scattered)), me)
    gathered = yield WithAll(
        _phase(slot, GATHER),
        {peer: Offer(own_piece, layout_of(views[peer]), note, start=starts, near=views[peer]) for peer in others},
    )
    averages: dict[PeerId, Tensors] = {me: own_piece}
    for peer, average in _tensors(gathered).items():
        averages[peer] = guard.checked(views[peer], average, of=peer)
    missing = [peer for peer in others if peer not in averages]
    left = [peer for peer in others if peer in averages]
    repaired: Mapping[PeerId, Swap] = {}
    if missing and left:
        orphaned = {name: view for peer in missing for name, view in views[peer].items()}
        offer = Offer(orphaned, note=note, start=starts)
        repaired = yield WithAll(_phase(slot, REPAIR), dict.fromkeys(left, offer))
        averages[REPAIR] = _mean(orphaned, guard.clipped(orphaned, _tensors(repaired)), me)
    swaps = _summed(others, (scattered, gathered, repaired))
    return Reduced(_assemble(phi, flat, averages.values()), swaps, guard.clips)


class _Guard:
    """Clips pieces to their part of the radius, and keeps what it measured as lengths over the whole."""

    def __init__(self, radius: float, elements: int) -> None:
        self._radius = radius
        self._elements = elements
        self.clips: list[tuple[PeerId, Clipped]] = []

    def clipped(self, own: Tensors, received: dict[PeerId, Tensors]) -> dict[PeerId, Tensors]:
        """Members' values of one piece, each clipped in place."""
        for peer, theirs in received.items():
            measured = self._clip(own, theirs)
            self.clips += [(peer, measured)] if measured is not None else []
        return received

    def checked(self, own: Tensors, average: Tensors, *, of: PeerId) -> Tensors:
        """An average, clipped in place. Averages lie nearer than values, so only what exceeds counts."""
        measured = self._clip(own, average)
        if measured is not None and measured.shortened:
            self.clips.append((of, measured))
        return average

    def _clip(self, own: Tensors, theirs: Tensors) -> Clipped | None:
        elements = sum(tensor.numel() for tensor in own.values())
        if not elements or self._radius == math.inf:
            return None
        scale = math.sqrt(elements / self._elements)
        return Clipped(clip(own, theirs, self._radius * scale).distance / scale, self._radius)


def _phase(slot: Slot, phase: str) -> Slot:
    return replace(slot, phase=slot.phase + phase)


def _views(flat: Tensors, piece: Sequence[tuple[str, int, int]], matrices: Collection[str]) -> dict[str, Tensor]:
    """A piece's parts by label. Those of matrices have two dimensions, by which codecs tell them from gains."""
    return {
        f"{name}[{start}:{stop}]": flat[name][start:stop].reshape((1, -1) if name in matrices else (-1,))
        for name, start, stop in piece
    }


def _start_views(
    start: Tensors | None, spans: Sequence[tuple[str, int, int]], matrices: Collection[str]
) -> dict[str, Tensor] | None:
    if start is None:
        return None
    flat = {name: tensor.reshape(-1) for name, tensor in start.items()}
    return _views(flat, [span for span in spans if span[0] in flat], matrices)


def _tensors(swaps: Mapping[PeerId, Swap]) -> dict[PeerId, Tensors]:
    return {peer: swap.tensors for peer, swap in swaps.items() if swap.tensors is not None}


def _mean(own: Tensors, received: Mapping[PeerId, Tensors], me: PeerId) -> dict[str, Tensor]:
    weight = 1.0 / (len(received) + 1)
    return mix_received(own, received, dict.fromkeys((*received, me), weight), me)


def _assemble(phi: Tensors, flat: Tensors, averages: Collection[Tensors]) -> dict[str, Tensor]:
    """Puts pieces back into tensors of the model's shapes; where there is no piece, `phi` stays."""
    whole = {name: tensor.clone() for name, tensor in flat.items()}
    for piece in averages:
        for label, values in piece.items():
            name, _, span = label.rpartition("[")
            start, stop = (int(bound) for bound in span.removesuffix("]").split(":"))
            whole[name][start:stop].copy_(values.reshape(-1))
    return {name: tensor.reshape(phi[name].shape) for name, tensor in whole.items()}


def _summed(others: Collection[PeerId], phases: Sequence[Mapping[PeerId, Swap]]) -> dict[PeerId, Swap]:
    """One swap a partner: it mixed if its values came in, by the scatter or by the repair."""
    result: dict[PeerId, Swap] = {}
    no_tensors: dict[str, torch.Tensor] = {}
    for peer in others:
        parts = [phase[peer] for phase in phases if peer in phase]
        failed = next((part for part in parts if part.tensors is None), None)
        base = failed if failed is not None else parts[-1]
        result[peer] = replace(
            base,
            tensors=None if failed is not None else no_tensors,
            bytes_sent=sum(part.bytes_sent for part in parts),
            bytes_received=sum(part.bytes_received for part in parts),
            seconds=sum(part.seconds for part in parts),
            ended_s=math.nan,
        )
    return result
