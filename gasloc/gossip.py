"""One exchange: partners from the topology, a trade with them, and the mix that comes of it."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from torch import Tensor

from gasloc import mixing, rounds, topology
from gasloc.all_reduce import Trades, WithAll, WithAny, all_reduce
from gasloc.clipping import Clipped, clip
from peers.exchange import Answer, Offer, PeerId, Slot, Swap, Tensors

_WITH_NEXT_CHOICES = ("1-peer", "2-peer")
_MOST_CANDIDATES = 16
"""Next choices that are asked at most, however large the swarm."""
_REST_SHARE = 0.1
"""One that rests in its own view has lost nobody: it looks for others for this part of the grace only."""
_NOT_BEGUN = frozenset(
    {Answer.BEHIND, Answer.AHEAD, Answer.PAIRED_ELSEWHERE, Answer.BUSY, Answer.UNREACHABLE, Answer.TIMEOUT}
)
"""Answers after which no tensor was sent, so that the slot can still be traded in."""
_BEGAN = frozenset({Answer.ACCEPT, Answer.BROKEN})
_FAR_BEHIND = 4
"""Rounds behind from which on one of the others' rounds is at most a quarter of ours."""
_MOST_ROUNDS_TRIED = 3
_WEIGHT = "weight"
"""Name in an offer's note."""
_LONGEST_GRACES = 10.0


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

    def swap_any(
        self, slot: Slot, candidates: Sequence[PeerId], offer: Offer, *, timeout_s: float
    ) -> dict[PeerId, Swap]:
        """Trades with one that is left over in `slot` and blocks until done; see `peers.exchange.Exchange.swap_any`."""
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
    stale_rounds: int = 5
    """More rounds behind than this, a peer does not mix with what it has."""


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
    round: int = 0
    """The round it was made in: later than the slot's where this peer was behind and took its partners' round.

    What follows must be in this round or a later one: slots are not used twice, and not in another order.
    """
    remarks: tuple[str, ...] = ()
    """In words, what else there is to say: why another round, and what came of next choices."""


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
        request = next(trades)
        while True:
            request = trades.send(_traded(network, request, plan.grace_s))
    except StopIteration as end:
        result: Exchanged = end.value
        return result


def _traded(network: Network, request: WithAll | WithAny, grace_s: float) -> Mapping[PeerId, Swap]:
    if isinstance(request, WithAny):
        return network.swap_any(request.slot, request.candidates, request.offer, timeout_s=request.timeout_s)
    timeout_s = grace_s if request.timeout_s is None else request.timeout_s
    return network.swap(request.slot, request.offers, timeout_s=timeout_s)


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

    Yields each request and is sent its outcome. A mix waits for `grace_s` in all, transfers apart: for the partners
    of its row, and with what is left of it, where none of them came to trade, for a next choice that is left over
    too; their weights are then 1/2 each. One that rests asks for next choices, too, but waits for a tenth of the
    grace at most. A peer whose partners are all ahead, by no more than `stale_rounds`, mixes in their round:
    `Exchanged.round`.

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
    remarks: dict[str, None] = {}
    tried = done = 0
    round = slot.round
    everybody = frozenset({*members, me})
    for index in range(slot.mix * plan.mixes, (slot.mix + 1) * plan.mixes):
        once = yield from _mix_once(
            me, plan, mix, everybody, Slot(round, index, slot.phase), note, radius=radius, start=start
        )
        mix, round = once.mix, once.round
        clips += once.clips
        remarks |= dict.fromkeys(once.remarks)
        came = [peer for peer, swap in once.swaps.items() if swap.tensors is not None]
        tried += bool(once.swaps)
        done += bool(came)
        partners += [peer for peer in came if peer not in partners]
        for peer, swap in once.swaps.items():
            swaps[peer] = joined(swaps[peer], swap) if peer in swaps else replace(swap, tensors=None)
    return Exchanged(mix, swaps, tuple(partners), tried, done, tuple(clips), round, tuple(remarks))


@dataclass(frozen=True, slots=True)
class _Once:
    """What came of one mix."""

    mix: Mapping[str, Tensor]
    round: int
    """The round it was made in."""
    swaps: Mapping[PeerId, Swap]
    clips: list[tuple[PeerId, Clipped]]
    remarks: tuple[str, ...] = ()


def _mix_once(
    me: PeerId,
    plan: Plan,
    phi: Mapping[str, Tensor],
    members: Collection[PeerId],
    slot: Slot,
    note: Mapping[str, float],
    *,
    radius: float,
    start: Tensors | None,
) -> Trades[_Once]:
    weights = _row(plan, slot, members, me)
    if plan.topology == "all-to-all" and len(weights) > 2:
        reduced = yield from all_reduce(phi, weights, me, slot, note=note, radius=radius, start=start)
        return _Once(reduced.mix, slot.round, reduced.swaps, reduced.clips)
    offer = Offer(send=phi, note=note, start=start)
    offers = _offers(weights, me, offer)
    # with no offers this returns at once, and lets others be told which round we are at
    swaps = yield WithAll(slot, offers)
    spent_s = _waited_s(swaps)
    remarks: tuple[str, ...] = ()
    heard: Mapping[PeerId, Swap] = {}
    choosing = plan.topology in _WITH_NEXT_CHOICES
    if choosing and not swaps:
        heard = yield _next_choice(me, plan, members, slot, offer, swaps, spent_s)
    answers = swaps or heard
    if answers and all(swap.answer is Answer.AHEAD for swap in answers.values()):
        later, theirs, waited_s, reason = yield from _fall_in(me, plan, members, slot, offer, answers)
        remarks = (reason,)
        if later != slot:
            slot, swaps, spent_s, heard = later, theirs, waited_s, {}
            weights = _row(plan, slot, members, me)
    if choosing and swaps and not _received(swaps):
        heard = yield _next_choice(me, plan, members, slot, offer, swaps, spent_s)
    chosen = {peer: swap for peer, swap in heard.items() if swap.answer in _BEGAN}
    if chosen:
        weights = {me: 0.5} | dict.fromkeys(chosen, 0.5)
    if heard:
        remarks += (_next_choice_words(heard),)
    received = _received(chosen or swaps)
    weights = _agreed(weights, chosen or swaps, me)
    clips = [(peer, clip(phi, tensors, radius)) for peer, tensors in received.items() if radius < math.inf]
    mix = mixing.mix(phi, received, weights, me) if received else phi  # what a network gave stays as it is
    return _Once(mix, slot.round, {**swaps, **chosen}, clips, remarks)


def _fall_in(
    me: PeerId, plan: Plan, members: Collection[PeerId], slot: Slot, offer: Offer, answers: Mapping[PeerId, Swap]
) -> Trades[tuple[Slot, Mapping[PeerId, Swap], float, str]]:
    """A peer whose partners are all in later rounds goes to theirs; see `gasloc.rounds.fall_in`.

    First to the round that they answered, where one may wait for us; then, as most will have begun the next one's
    local steps, to that. Where they take `_FAR_BEHIND` rounds or more while we take one, their next round is soon,
    seen from ours: it is waited for even where that takes longer than the grace.
    """
    began, swaps, spent_s, reason = slot.round, answers, _waited_s(answers), ""
    for _ in range(_MOST_ROUNDS_TRIED):
        missed = [swap for swap in swaps.values() if swap.answer in (Answer.AHEAD, Answer.PAIRED_ELSEWHERE)]
        if not missed or len(missed) < len(swaps):
            break
        # those that answer from the very slot that was asked for will be seen in the next round
        ahead = [max(swap.their_round or 0, slot.round + (slot.round > began)) for swap in missed]
        round, reason = rounds.fall_in(began, ahead, plan.stale_rounds)
        if round <= slot.round:
            break
        slot = _with_partners(plan, members, replace(slot, round=round), me)
        patience_s = max(plan.grace_s - spent_s, 0.0)
        if slot.round - began >= _FAR_BEHIND:
            until_s = max((swap.next_slot_s for swap in missed if swap.next_slot_s is not None), default=0.0)
            patience_s += min(max(until_s, 0.0), _LONGEST_GRACES * plan.grace_s)
        weights = _row(plan, slot, members, me)
        swaps = yield WithAll(slot, _offers(weights, me, offer), timeout_s=patience_s)
        spent_s += _waited_s(swaps)
    return slot, swaps, spent_s, reason


def _next_choice(
    me: PeerId,
    plan: Plan,
    members: Collection[PeerId],
    slot: Slot,
    offer: Offer,
    swaps: Mapping[PeerId, Swap],
    spent_s: float,
) -> WithAny:
    """Whom a peer asks with which nobody of its row mixed, and for how long; nobody, where a trade began."""
    left_s = plan.grace_s - spent_s
    if not swaps:
        left_s *= _REST_SHARE
    if left_s <= 0 or any(swap.answer not in _NOT_BEGUN for swap in swaps.values()):
        return WithAny(slot, (), offer, 0.0)
    engaged = [peer for peer, swap in swaps.items() if swap.answer in (Answer.PAIRED_ELSEWHERE, Answer.BUSY)]
    ranked = topology.candidates(plan.topology, round=slot.round, members=members, me=me, seed=plan.seed, mix=slot.mix)
    return WithAny(slot, (*engaged, *ranked)[:_MOST_CANDIDATES], offer, left_s)


def _next_choice_words(heard: Mapping[PeerId, Swap]) -> str:
    counts = Counter(swap.answer for swap in heard.values())
    if any(answer in _BEGAN for answer in counts):
        return "its own partners were not to be had, so it asked its next choices"
    told = ", ".join(f"{count} {answer.value}" for answer, count in sorted(counts.items()))
    return f"no next choice was left over either: {told}"


def _row(plan: Plan, slot: Slot, members: Collection[PeerId], me: PeerId) -> dict[PeerId, float]:
    return topology.row(plan.topology, round=slot.round, members=members, me=me, seed=plan.seed, mix=slot.mix)


def _with_partners(plan: Plan, members: Collection[PeerId], slot: Slot, me: PeerId) -> Slot:
    """This slot, or where we would rest in it the next round's or the one after it."""
    later = [replace(slot, round=slot.round + more) for more in range(3)]
    return next((one for one in later if len(_row(plan, one, members, me)) > 1), slot)


def _offers(weights: Mapping[PeerId, float], me: PeerId, offer: Offer) -> dict[PeerId, Offer]:
    """Each partner's offer. It is told the weight that it has in our row."""
    return {
        peer: replace(offer, note={**offer.note, _WEIGHT: weight})
        for peer, weight in weights.items()
        if peer != me and weight > 0
    }


def _agreed(weights: Mapping[PeerId, float], swaps: Mapping[PeerId, Swap], me: PeerId) -> dict[PeerId, float]:
    """The row with each partner's weight no larger than the one that we have in its row.

    From differing views the two may differ, as where one sees a ring of two and the other a ring of three. Both take
    the smaller one, so the matrix stays symmetric, and keeps the mean. A weight can only be talked down.
    """
    agreed = {
        peer: min(weight, max(swaps[peer].note.get(_WEIGHT, weight), 0.0)) if peer in swaps else weight
        for peer, weight in weights.items()
        if peer != me
    }
    kept = sum(weight - agreed[peer] for peer, weight in weights.items() if peer != me)
    return {me: weights[me] + kept} | agreed  # to the bit the row itself, where nothing differs


def _received(swaps: Mapping[PeerId, Swap]) -> dict[PeerId, Tensors]:
    return {peer: swap.tensors for peer, swap in swaps.items() if swap.tensors is not None}


def _waited_s(swaps: Mapping[PeerId, Swap]) -> float:
    return max((swap.seconds for swap in swaps.values() if swap.answer is not Answer.ACCEPT), default=0.0)


def joined(first: Swap, second: Swap) -> Swap:
    """Two trades with one partner as one, without tensors: accepted if either was, costs summed."""
    base = first if first.answer is Answer.ACCEPT or second.answer is not Answer.ACCEPT else second
    seconds = [swap.seconds for swap in (first, second) if swap.answer is base.answer]
    return replace(
        base,
        tensors=None,
        bytes_sent=first.bytes_sent + second.bytes_sent,
        bytes_received=first.bytes_received + second.bytes_received,
        seconds=sum(seconds),
        ended_s=math.nan,
    )
