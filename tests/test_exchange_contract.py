"""What every `Exchange` promises, tried on each implementation and each transport."""

import asyncio
import math
from collections.abc import Sequence

import pytest
import torch

from peers.errors import LayoutError, ProtocolError
from peers.exchange import Answer, Exchange, Offer, PeerId, Slot, Swap, Tensors, TensorSpec
from tests.worlds import Closable, World, in_every_world

Swaps = dict[PeerId, Swap]

GRACE_S = 20.0
SHORT_S = 2.0
"""For a wait that ends in vain; long enough for p2pd to bring an answer on a busy machine."""


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of every kind that may be exchanged."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embedding": torch.randn(700, 500, generator=generator),  # more than one block
        "scale": torch.randn((), generator=generator),
        "one": torch.randn(1, generator=generator),
        "empty": torch.empty(0, 3),
        "strided": torch.randn(6, 4, generator=generator).t()[1:],
        "half": torch.randn(5, generator=generator).to(torch.bfloat16),
        "double": torch.randn(5, generator=generator, dtype=torch.float64),
        "parameter": torch.nn.Parameter(torch.randn(3, generator=generator)),
    }


def small(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((4,), float(value))}


def equal(left: Tensors, right: Tensors) -> bool:
    """Equal names, dtypes, shapes and bits."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def got(swap: Swap) -> Tensors:
    assert swap.answer is Answer.ACCEPT, swap.reason
    assert swap.tensors is not None
    return swap.tensors


async def swap_one(
    exchange: Exchange, partner: PeerId, offer: Offer, round: int = 1, timeout_s: float = GRACE_S
) -> Swap:
    swaps = await exchange.swap(Slot(round), {partner: offer}, timeout_s=timeout_s)
    assert swaps.keys() == {partner}
    return swaps[partner]


async def pair(world: World) -> tuple[Closable, Closable]:
    """Two peers, in the order of their ids: the first one dials."""
    one, other = sorted([await world.join(), await world.join()], key=lambda exchange: exchange.me)
    return one, other


@in_every_world
async def test_both_get_what_the_other_sent_bit_for_bit(world: World) -> None:
    a, b = await pair(world)
    ours, theirs = weights(1), weights(2)
    from_b, from_a = await asyncio.gather(
        swap_one(a, b.me, Offer(ours, note={"steps": 15.0})),
        swap_one(b, a.me, Offer(theirs, note={"tokens": 2.5e9, "steps": 7})),
    )
    assert equal(got(from_b), theirs)
    assert equal(got(from_a), ours)
    assert from_b.note == {"tokens": 2.5e9, "steps": 7.0}
    assert from_a.note == {"steps": 15.0}
    assert from_a.their_round == from_b.their_round == 1


@in_every_world
async def test_sent_tensors_stay_as_they_are_and_received_ones_are_ours(world: World) -> None:
    a, b = await pair(world)
    ours, theirs = weights(1), weights(2)
    from_b, from_a = await asyncio.gather(swap_one(a, b.me, Offer(ours)), swap_one(b, a.me, Offer(theirs)))
    assert equal(ours, weights(1))
    for tensor in got(from_b).values():
        tensor.zero_()
    for tensor in got(from_a).values():
        tensor.fill_(1.0)
    assert equal(ours, weights(1))
    assert equal(theirs, weights(2))


@in_every_world
async def test_different_layouts_by_expectation(world: World) -> None:
    a, b = await pair(world)
    many, few = {"x": torch.ones(3, 2), "y": torch.zeros(2)}, {"x": torch.ones(1)}
    expect_few = {"x": TensorSpec((1,), torch.float32)}
    expect_many = {"x": TensorSpec((3, 2), torch.float32), "y": TensorSpec((2,), torch.float32)}
    from_b, from_a = await asyncio.gather(
        swap_one(a, b.me, Offer(many, expect_few)), swap_one(b, a.me, Offer(few, expect_many))
    )
    assert equal(got(from_b), few)
    assert equal(got(from_a), many)


@in_every_world
async def test_an_offer_without_tensors(world: World) -> None:
    a, b = await pair(world)
    nothing: Tensors = {}
    from_b, from_a = await asyncio.gather(
        swap_one(a, b.me, Offer(nothing, {"w": TensorSpec((4,), torch.float32)}, {"x": 1.0})),
        swap_one(b, a.me, Offer(small(3.0), {})),
    )
    assert equal(got(from_b), small(3.0))
    assert got(from_a) == {}
    assert from_a.note == {"x": 1.0}


@in_every_world
async def test_no_partner(world: World) -> None:
    a = await world.join()
    assert await a.swap(Slot(1), {}, timeout_s=GRACE_S) == {}


@in_every_world
async def test_three_peers_all_at_once(world: World) -> None:
    peers = [await world.join() for _ in range(3)]
    sent = {peer.me: weights(number) for number, peer in enumerate(peers)}

    async def meet_both(peer: Exchange) -> dict[PeerId, Swap]:
        offers = {other.me: Offer(sent[peer.me]) for other in peers if other is not peer}
        return await peer.swap(Slot(4, 1, "scatter"), offers, timeout_s=GRACE_S)

    for peer, swaps in zip(peers, await asyncio.gather(*map(meet_both, peers)), strict=True):
        assert swaps.keys() == sent.keys() - {peer.me}
        for partner, swap in swaps.items():
            assert equal(got(swap), sent[partner])


@in_every_world
async def test_a_partner_that_is_late_is_waited_for(world: World) -> None:
    """Whichever of the two is late: the one that dials, or the one that is dialled."""
    a, b = await pair(world)
    for round, (early, late) in enumerate([(a, b), (b, a)]):
        waiting = asyncio.create_task(swap_one(early, late.me, Offer(small(1.0)), round))
        await world.pause()
        assert not waiting.done()
        clock = asyncio.get_running_loop().time
        came_s = clock()
        from_early = await swap_one(late, early.me, Offer(small(2.0)), round)
        from_late = await waiting
        assert equal(got(from_early), small(1.0))
        assert equal(got(from_late), small(2.0))
        for swap in (from_early, from_late):  # the wait is no part of the transfer
            assert came_s <= swap.ended_s - swap.seconds <= swap.ended_s <= clock()


@in_every_world
async def test_slots_go_on_round_after_round_and_phase_after_phase(world: World) -> None:
    a, b = await pair(world)
    slots = [Slot(3), Slot(4, 0, "scatter"), Slot(4, 0, "gather"), Slot(4, 1), Slot(9)]
    for number, slot in enumerate(slots):
        from_b, from_a = await asyncio.gather(
            a.swap(slot, {b.me: Offer(small(number))}, timeout_s=GRACE_S),
            b.swap(slot, {a.me: Offer(small(-number))}, timeout_s=GRACE_S),
        )
        assert equal(got(from_b[b.me]), small(-number))
        assert equal(got(from_a[a.me]), small(number))


@in_every_world
async def test_two_slots_at_once(world: World) -> None:
    """Fragments: the next slot begins while the last one still waits for its partner."""
    a, b = await pair(world)
    first = asyncio.create_task(a.swap(Slot(1, 0, "f1"), {b.me: Offer(small(1.0))}, timeout_s=GRACE_S))
    second = asyncio.create_task(a.swap(Slot(1, 0, "f2"), {b.me: Offer(small(2.0))}, timeout_s=GRACE_S))
    await world.pause()
    two = await b.swap(Slot(1, 0, "f2"), {a.me: Offer(small(3.0))}, timeout_s=GRACE_S)
    one = await b.swap(Slot(1, 0, "f1"), {a.me: Offer(small(4.0))}, timeout_s=GRACE_S)
    assert equal(got(two[a.me]), small(2.0))
    assert equal(got(one[a.me]), small(1.0))
    assert equal(got((await first)[b.me]), small(4.0))
    assert equal(got((await second)[b.me]), small(3.0))


@in_every_world
async def test_a_partner_that_does_not_come_is_behind(world: World) -> None:
    a, b = await pair(world)
    swap = await swap_one(a, b.me, Offer(small(1.0)), 1, SHORT_S)
    assert swap.answer is Answer.BEHIND, swap.reason
    assert math.isnan(swap.ended_s), "no transfer began"
    assert swap.their_round is None
    assert swap.tensors is None
    await b.swap(Slot(2), {}, timeout_s=SHORT_S)
    swap = await swap_one(a, b.me, Offer(small(1.0)), 7, SHORT_S)
    assert swap.answer is Answer.BEHIND
    assert swap.their_round == 2


@in_every_world
async def test_the_one_that_is_dialled_learns_that_its_partner_is_behind(world: World) -> None:
    a, b = await pair(world)
    await a.swap(Slot(2), {}, timeout_s=SHORT_S)
    swap = await swap_one(b, a.me, Offer(small(1.0)), 7, SHORT_S)
    assert swap.answer is Answer.BEHIND
    assert swap.their_round == 2


@in_every_world
async def test_a_partner_that_is_past_our_slot_is_ahead(world: World) -> None:
    """Both ways: the dialler is told in its answer, the other one by its probe, long before the grace ends."""
    a, b = await pair(world)
    await b.swap(Slot(5), {}, timeout_s=SHORT_S)
    swap = await swap_one(a, b.me, Offer(small(1.0)), 4)
    assert swap.answer is Answer.AHEAD, swap.reason
    assert swap.their_round == 5
    await a.swap(Slot(9), {}, timeout_s=SHORT_S)
    swap = await swap_one(b, a.me, Offer(small(1.0)), 6)
    assert swap.answer is Answer.AHEAD, swap.reason
    assert swap.their_round == 9
    assert swap.tensors is None


@in_every_world
async def test_a_partner_in_our_slot_that_wants_another(world: World) -> None:
    a, b = await pair(world)
    await asyncio.gather(a.swap(Slot(1), {}, timeout_s=SHORT_S), b.swap(Slot(2), {}, timeout_s=SHORT_S))
    swap = await swap_one(a, b.me, Offer(small(1.0)), 2)
    assert swap.answer is Answer.PAIRED_ELSEWHERE, swap.reason
    await a.swap(Slot(3), {}, timeout_s=SHORT_S)
    swap = await swap_one(b, a.me, Offer(small(1.0)), 3)
    assert swap.answer is Answer.PAIRED_ELSEWHERE, swap.reason


@in_every_world
async def test_a_partner_that_moves_past_us_while_we_wait(world: World) -> None:
    a, b = await pair(world)
    for round, (early, late) in enumerate([(a, b), (b, a)]):
        waiting = asyncio.create_task(swap_one(early, late.me, Offer(small(1.0)), 10 * round))
        await world.pause()
        await late.swap(Slot(10 * round + 5), {}, timeout_s=SHORT_S)
        swap = await waiting
        assert swap.answer is Answer.AHEAD, swap.reason
        assert swap.their_round == 10 * round + 5


@in_every_world
async def test_one_bad_partner_does_not_harm_the_others(world: World) -> None:
    peers = [await world.join() for _ in range(3)]
    a, b, gone = peers
    await world.kill(gone)
    offers = {b.me: Offer(small(1.0)), gone.me: Offer(small(1.0))}
    of_a, of_b = await asyncio.gather(a.swap(Slot(1), offers, timeout_s=GRACE_S), swap_one(b, a.me, Offer(small(2.0))))
    assert equal(got(of_a[b.me]), small(2.0))
    assert equal(got(of_b), small(1.0))
    assert of_a[gone.me].answer is Answer.UNREACHABLE, of_a[gone.me].reason


@in_every_world
async def test_a_partner_that_is_gone_is_unreachable_at_once(world: World) -> None:
    """For the one that dials and for the one that would be dialled."""
    a, b, c = sorted([await world.join() for _ in range(3)], key=lambda exchange: exchange.me)
    await world.kill(b)
    loop = asyncio.get_running_loop()
    started = loop.time()
    for exchange in (a, c):
        swap = await swap_one(exchange, b.me, Offer(small(1.0)), timeout_s=60.0)
        assert swap.answer is Answer.UNREACHABLE, swap.reason
    assert loop.time() - started < 15.0


@in_every_world
async def test_another_layout_is_refused_with_the_first_difference_on_both_sides(world: World) -> None:
    a, b = await pair(world)
    ours = {"a": torch.ones(2), "b": torch.ones(3, 2), "c": torch.ones(1)}
    theirs = {"a": torch.ones(2), "b": torch.ones(2, 3), "d": torch.ones(1)}
    for swap in await asyncio.gather(swap_one(a, b.me, Offer(ours)), swap_one(b, a.me, Offer(theirs))):
        assert swap.answer is Answer.REFUSED
        assert "'b' is float32" in swap.reason
        assert swap.tensors is None


@in_every_world
async def test_own_tensors_that_are_not_finite_are_sent_to_nobody(world: World) -> None:
    a, b = await pair(world)
    sick = {"fine": torch.ones(2), "sick": torch.tensor([1.0, float("nan")])}
    swap = await swap_one(a, b.me, Offer(sick))
    assert swap.answer is Answer.REFUSED
    assert "'sick'" in swap.reason
    assert swap.tensors is None
    swap = await swap_one(b, a.me, Offer({"fine": torch.ones(2), "sick": torch.ones(2)}))
    assert swap.answer is Answer.PAIRED_ELSEWHERE, swap.reason


@in_every_world
async def test_a_swap_that_is_cancelled_leaves_nothing_behind(world: World) -> None:
    a, b = await pair(world)
    before = len(asyncio.all_tasks())
    for round, (exchange, partner) in enumerate([(a, b), (b, a)]):
        waiting = asyncio.create_task(swap_one(exchange, partner.me, Offer(small(1.0)), round))
        await world.pause()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    from_b, from_a = await asyncio.gather(
        swap_one(a, b.me, Offer(small(1.0)), 2), swap_one(b, a.me, Offer(small(2.0)), 2)
    )
    assert equal(got(from_b), small(2.0))
    assert equal(got(from_a), small(1.0))
    await world.pause()
    assert len(asyncio.all_tasks()) <= before


@in_every_world
async def test_closing_stops_our_own_swaps(world: World) -> None:
    a, b = await pair(world)
    waiting = asyncio.create_task(swap_one(a, b.me, Offer(small(1.0))))
    await world.pause()
    await a.close()
    assert (await waiting).answer is Answer.STOPPED


@in_every_world
async def test_what_a_caller_must_not_offer(world: World) -> None:
    a, b = await pair(world)
    with pytest.raises(LayoutError, match="'count' is torch"):
        await swap_one(a, b.me, Offer({"count": torch.tensor(3)}))
    with pytest.raises(ProtocolError, match="17 entries"):
        await swap_one(a, b.me, Offer(small(1.0), note={str(number): 1.0 for number in range(17)}))
    with pytest.raises(ValueError, match="itself"):
        await swap_one(a, a.me, Offer(small(1.0)))
    await a.swap(Slot(5), {}, timeout_s=SHORT_S)
    with pytest.raises(ValueError, match="round 4 comes before round 5"):
        await swap_one(a, b.me, Offer(small(1.0)), 4)


async def any_of(
    exchange: Exchange, candidates: Sequence[Exchange], value: float, timeout_s: float = GRACE_S, *, round: int = 1
) -> Swaps:
    """What a peer does that is left over: nobody of its row came, so it looks for another."""
    slot = Slot(round)
    await exchange.swap(slot, {}, timeout_s=timeout_s)
    ids = [candidate.me for candidate in candidates]
    return await exchange.swap_any(slot, ids, Offer(small(value), note={"sent": value}), timeout_s=timeout_s)


def chosen(swaps: Swaps) -> list[PeerId]:
    return [peer for peer, swap in swaps.items() if swap.answer is Answer.ACCEPT]


@in_every_world
async def test_two_that_are_left_over_meet_whoever_of_them_is_early(world: World) -> None:
    a, b = await pair(world)
    for round, (early, late) in enumerate([(a, b), (b, a)], start=1):
        slot = Slot(round)
        waiting = asyncio.create_task(early.swap_any(slot, [late.me], Offer(small(1.0)), timeout_s=GRACE_S))
        await world.pause()
        of_late = await late.swap_any(slot, [early.me], Offer(small(2.0)), timeout_s=GRACE_S)
        of_early = await waiting
        assert equal(got(of_early[late.me]), small(2.0))
        assert equal(got(of_late[early.me]), small(1.0))


@in_every_world
async def test_one_that_is_not_a_candidate_of_the_other_may_choose_it(world: World) -> None:
    """Views differ: A has B among its candidates, and B has only one that has not come yet."""
    a, b, late = [await world.join() for _ in range(3)]
    slot = Slot(1)
    of_a, of_b = await asyncio.gather(
        a.swap_any(slot, [b.me], Offer(small(1.0)), timeout_s=GRACE_S),
        b.swap_any(slot, [late.me], Offer(small(2.0)), timeout_s=GRACE_S),
    )
    assert chosen(of_a) == [b.me]
    assert chosen(of_b) == [a.me]


@in_every_world
async def test_four_that_are_left_over_make_two_pairs(world: World) -> None:
    """Each asks all others at once, and in another order; nobody trades twice."""
    peers = [await world.join() for _ in range(4)]
    orders = [[*peers[index + 1 :], *peers[:index]] for index in range(4)]
    works = [any_of(peer, others, number) for number, (peer, others) in enumerate(zip(peers, orders, strict=True), 1)]
    swaps = await asyncio.gather(*works)
    partner = {peer.me: chosen(outcome) for peer, outcome in zip(peers, swaps, strict=True)}
    assert all(len(others) == 1 for others in partner.values())
    assert all(partner[others[0]] == [me] for me, others in partner.items())
    value = {peer.me: number for number, peer in enumerate(peers, start=1)}
    for peer, outcome in zip(peers, swaps, strict=True):
        (other,) = partner[peer.me]
        assert equal(got(outcome[other]), small(value[other]))
        assert outcome[other].note == {"sent": float(value[other])}
        assert all(swap.tensors is None for who, swap in outcome.items() if who != other)


@in_every_world
async def test_those_that_are_engaged_say_so_and_the_odd_one_goes_on_at_once(world: World) -> None:
    a, b, odd = [await world.join() for _ in range(3)]
    loop = asyncio.get_running_loop()
    await asyncio.gather(swap_one(a, b.me, Offer(small(1.0))), swap_one(b, a.me, Offer(small(2.0))))
    began = loop.time()
    swaps = await any_of(odd, [a, b], 3.0, timeout_s=60.0)
    assert {swap.answer for swap in swaps.values()} == {Answer.PAIRED_ELSEWHERE}
    assert loop.time() - began < 30.0


@in_every_world
async def test_one_that_still_waits_for_its_partner_may_be_left_over_later(world: World) -> None:
    a, b, gone = [await world.join() for _ in range(3)]
    looking = asyncio.create_task(any_of(a, [b], 1.0))
    await world.pause()
    failed = await swap_one(b, gone.me, Offer(small(2.0)), 1, SHORT_S)  # it never comes
    assert failed.answer is Answer.BEHIND, failed.reason
    assert not looking.done()
    of_b = await b.swap_any(Slot(1), [], Offer(small(2.0)), timeout_s=GRACE_S)
    assert of_b == {}  # and B does not look for others
    of_a = await looking
    assert of_a[b.me].answer is Answer.PAIRED_ELSEWHERE, of_a[b.me].reason


@in_every_world
async def test_one_that_is_left_over_late_is_found(world: World) -> None:
    a, b, gone = [await world.join() for _ in range(3)]
    looking = asyncio.create_task(any_of(a, [b], 1.0))
    await world.pause()
    await swap_one(b, gone.me, Offer(small(2.0)), 1, SHORT_S)
    of_b = await b.swap_any(Slot(1), [gone.me], Offer(small(2.0)), timeout_s=GRACE_S)
    assert equal(got((await looking)[b.me]), small(2.0))
    assert equal(got(of_b[a.me]), small(1.0))


@in_every_world
async def test_the_search_ends_with_its_time(world: World) -> None:
    a, b = await pair(world)
    swaps = await any_of(a, [b], 1.0, SHORT_S)
    assert swaps[b.me].answer is Answer.BEHIND, swaps[b.me].reason
    await b.swap(Slot(7), {}, timeout_s=SHORT_S)
    swaps = await any_of(a, [b], 1.0)
    assert swaps[b.me].answer is Answer.AHEAD, swaps[b.me].reason
    assert swaps[b.me].their_round == 7


@in_every_world
async def test_a_plain_swap_is_not_taken_for_a_search(world: World) -> None:
    """Its weights are others, so the two sides would not mix alike."""
    a, b = await pair(world)
    looking = asyncio.create_task(any_of(a, [b], 1.0))
    await world.pause()
    plain = await swap_one(b, a.me, Offer(small(2.0)))
    assert plain.answer is Answer.PAIRED_ELSEWHERE, plain.reason
    of_b = await b.swap_any(Slot(1), [a.me], Offer(small(2.0)), timeout_s=GRACE_S)
    assert chosen(of_b) == [a.me]
    assert chosen(await looking) == [b.me]


@in_every_world
async def test_a_search_that_is_cancelled_or_closed_leaves_nothing_behind(world: World) -> None:
    a, b = await pair(world)
    before = len(asyncio.all_tasks())
    looking = asyncio.create_task(any_of(a, [b], 1.0))
    await world.pause()
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking
    looking = asyncio.create_task(any_of(b, [a], 1.0, round=2))
    await world.pause()
    assert chosen(await any_of(a, [b], 2.0, round=2)) == [b.me]
    assert chosen(await looking) == [a.me]
    await world.pause()
    assert len(asyncio.all_tasks()) <= before
    looking = asyncio.create_task(a.swap_any(Slot(3), [b.me], Offer(small(1.0)), timeout_s=GRACE_S))
    await world.pause()
    await a.close()
    assert (await looking)[b.me].answer is Answer.STOPPED
