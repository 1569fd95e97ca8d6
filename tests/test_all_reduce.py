"""All-to-all by reduce-scatter and all-gather: pieces, the mean, bytes, and members that are missing."""

from collections.abc import Collection, Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gasloc.all_reduce import GATHER, REPAIR, SCATTER, Reduced, Trades, WithAll, all_reduce, cut
from peers.exchange import Answer, Offer, PeerId, Slot, Swap, Tensors, layout_of


class Meeting:
    """Drives every member's all-reduce step by step, as a network without delays would."""

    def __init__(self, phis: Mapping[PeerId, Tensors], *, dead_from: Mapping[PeerId, str] | None = None) -> None:
        """`dead_from`: the phase from which on a member answers nobody."""
        self.phis = phis
        self.dead_from = dead_from or {}
        self.sent: dict[PeerId, int] = dict.fromkeys(phis, 0)

    def run(self) -> dict[PeerId, Reduced]:
        running: dict[PeerId, Trades[Reduced]] = {
            peer: all_reduce(phi, self.phis.keys(), peer, Slot(3), note={}) for peer, phi in self.phis.items()
        }
        waiting = {peer: _asked(next(steps)) for peer, steps in running.items()}
        done: dict[PeerId, Reduced] = {}
        while waiting:
            phase = min(request.slot for request in waiting.values())
            here = {peer: request.offers for peer, request in waiting.items() if request.slot == phase}
            for peer in here:
                del waiting[peer]
            for peer in here:
                answers = {other: self._answer(phase, peer, other, here) for other in here[peer]}
                try:
                    waiting[peer] = _asked(running[peer].send(answers))
                except StopIteration as end:
                    done[peer] = end.value
        return done

    def _answer(self, slot: Slot, me: PeerId, other: PeerId, here: Mapping[PeerId, Mapping[PeerId, Offer]]) -> Swap:
        dead = [peer for peer in (me, other) if peer in self.dead_from and slot.phase >= self.dead_from[peer]]
        if dead or me not in here.get(other, {}):
            return Swap(Answer.UNREACHABLE, "gone")
        ours, theirs = here[me][other], here[other][me]
        expected = layout_of(ours.send) if ours.expect is None else ours.expect
        assert layout_of(theirs.send) == expected, "both sides cut alike"
        self.sent[me] += sum(tensor.numel() for tensor in ours.send.values())
        return Swap(Answer.ACCEPT, "whole", {name: tensor.clone() for name, tensor in theirs.send.items()})


def _asked(request: object) -> WithAll:
    assert isinstance(request, WithAll), "an all-reduce has no next choices"
    return request


def random_phis(
    count: int, shapes: Collection[tuple[int, ...]] = ((5, 3), (7,), (), (0, 4), (1, 11))
) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(count)
    return {
        f"peer-{index:02d}": {
            f"layer.{number}": torch.randn(shape, dtype=torch.float64, generator=generator)
            for number, shape in enumerate(shapes)
        }
        for index in range(count)
    }


def mean(phis: Collection[Tensors]) -> dict[str, torch.Tensor]:
    first = next(iter(phis))
    return {name: torch.stack([phi[name] for phi in phis]).mean(0) for name in first}


@given(st.dictionaries(st.text("abc.", min_size=1, max_size=4), st.integers(0, 40), min_size=1), st.integers(1, 12))
def test_the_pieces_hold_every_element_once_and_differ_by_at_most_one(sizes: dict[str, int], count: int) -> None:
    pieces = cut(sizes, count)
    lengths = [sum(stop - start for _, start, stop in piece) for piece in pieces]
    assert max(lengths) - min(lengths) <= 1
    seen = sorted((name, element) for piece in pieces for name, start, stop in piece for element in range(start, stop))
    assert seen == sorted((name, element) for name, size in sizes.items() for element in range(size))


@pytest.mark.parametrize("count", [2, 3, 4, 8, 13])
def test_everybody_ends_with_the_mean_bit_for_bit_alike(count: int) -> None:
    phis = random_phis(count)
    before = {peer: {name: tensor.clone() for name, tensor in phi.items()} for peer, phi in phis.items()}
    results = Meeting(phis).run()
    expected = mean(phis.values())
    first = results["peer-00"].mix
    for peer, result in results.items():
        for name, tensor in expected.items():
            assert torch.allclose(result.mix[name], tensor, atol=1e-12, rtol=0)
            assert torch.equal(result.mix[name], first[name])
            assert torch.equal(phis[peer][name], before[peer][name])
        assert all(swap.answer is Answer.ACCEPT for swap in result.swaps.values())


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_peer_sends_about_two_times_n_minus_one_over_n_of_the_model(count: int) -> None:
    meeting = Meeting(random_phis(count, shapes=[(960,)]))
    meeting.run()
    assert set(meeting.sent.values()) == {2 * (count - 1) * 960 // count}


def test_a_member_that_never_comes_is_left_out_and_its_piece_repaired() -> None:
    phis = random_phis(5)
    results = Meeting(phis, dead_from={"peer-02": SCATTER}).run()
    left = {peer: phi for peer, phi in phis.items() if peer != "peer-02"}
    expected = mean(left.values())
    for peer in left:
        for name, tensor in expected.items():
            assert torch.allclose(results[peer].mix[name], tensor, atol=1e-12, rtol=0)
        answers = {other: swap.answer for other, swap in results[peer].swaps.items()}
        assert answers.pop("peer-02") is Answer.UNREACHABLE
        assert set(answers.values()) == {Answer.ACCEPT}


def test_a_member_that_dies_between_the_phases_leaves_the_others_equal() -> None:
    phis = random_phis(4)
    results = Meeting(phis, dead_from={"peer-01": GATHER}).run()
    left = [results[peer].mix for peer in phis if peer != "peer-01"]
    whole, without = mean(phis.values()), mean([phi for peer, phi in phis.items() if peer != "peer-01"])
    for name in whole:
        assert torch.equal(left[0][name], left[1][name])
        assert torch.equal(left[0][name], left[2][name])
        either = torch.minimum((left[0][name] - whole[name]).abs(), (left[0][name] - without[name]).abs())
        assert float(either.max() if either.numel() else 0.0) < 1e-12


def test_with_everybody_else_gone_ones_own_values_stay() -> None:
    phis = random_phis(3)
    results = Meeting(phis, dead_from={"peer-01": SCATTER, "peer-02": SCATTER}).run()
    for name, tensor in phis["peer-00"].items():
        assert torch.equal(results["peer-00"].mix[name], tensor)


def test_the_phases_come_in_the_order_of_slots() -> None:
    assert Slot(1, phase=SCATTER) < Slot(1, phase=GATHER) < Slot(1, phase=REPAIR) < Slot(2, phase=SCATTER)
