"""What the straggler benchmark makes of its peers' rounds: spans, settling, swings, curves, bars."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import straggler
from benchmarks.straggler import Phase, Run
from benchmarks.straggler_figures import (
    PeerRound,
    common_loss,
    loss_curve,
    mean_round_s,
    median_round_s,
    reversals,
    settled_after,
    time_to,
    within,
)


def made(peer: int, number: int, began_s: float, ended_s: float, *, loss: float = 1.0, steps: int = 25) -> PeerRound:
    return PeerRound(
        peer=peer,
        round=number,
        began_s=began_s,
        ended_s=ended_s,
        local_steps=steps,
        beside_straggler=False,
        transfer_s=0.2,
        waited_s=0.3,
        loss_before=loss,
    )


def test_only_whole_rounds_of_a_span_count_and_not_its_first() -> None:
    rounds = [made(peer, number, 10.0 * number, 10.0 * number + 10) for number in range(8) for peer in (2, 1)]
    found = within(rounds, began_s=5.0, ended_s=65.0, discard=2)
    assert {peer: [each.round for each in some] for peer, some in found.items()} == {1: [3, 4, 5], 2: [3, 4, 5]}
    assert list(found) == [1, 2]
    assert within(rounds, began_s=5.0, ended_s=65.0, discard=5) == {}


def test_a_late_round_shows_in_the_mean_and_not_in_the_median() -> None:
    rounds = [made(1, 0, 0.0, 3.0), made(1, 1, 3.0, 6.0), made(1, 2, 6.5, 12.5)]
    assert median_round_s(rounds) == 3.0
    assert mean_round_s(rounds) == pytest.approx(12.5 / 3)


@pytest.mark.parametrize(
    ("steps", "settled"),
    [
        ([], None),
        ([25], 0),
        ([25, 25, 25, 25], 0),
        ([25, 26, 24, 25, 25], 0),
        ([25, 25, 9, 9, 9, 9], 2),
        ([25, 18, 12, 9, 9, 9], 3),
        ([25, 9, 25, 9, 25, 9, 25, 9], None),
        ([9, 9, 9, 9, 25], None),
        ([100, 92, 109, 100, 100, 100], 0),
    ],
)
def test_when_local_steps_settle(steps: list[int], settled: int | None) -> None:
    assert settled_after(steps) == settled


@pytest.mark.parametrize(
    ("steps", "turned"),
    [([], 0), ([3], 0), ([3, 3], 0), ([9, 7, 7, 5], 0), ([9, 5, 7], 1), ([9, 5, 5, 7], 1), ([25, 9, 25, 9, 25], 3)],
)
def test_how_often_local_steps_turn(steps: list[int], turned: int) -> None:
    assert reversals(steps) == turned


@given(st.lists(st.integers(1, 99)))
def test_a_row_and_its_mirror_turn_as_often(steps: list[int]) -> None:
    assert reversals(steps) == reversals(steps[::-1])


def test_a_curve_is_the_mean_of_the_latest_losses_of_all() -> None:
    rounds = [
        made(1, 0, 10.0, 12.0, loss=5.0),
        made(2, 0, 10.5, 13.0, loss=5.0),
        made(1, 1, 12.0, 14.0, loss=3.0),
        made(2, 1, 13.0, 15.0, loss=2.0),
    ]
    curve = loss_curve(rounds, began_s=10.0)
    assert curve == [(0.5, 5.0), (2.0, 4.0), (3.0, 2.5)]
    assert time_to(curve, 4.0) == 2.0
    assert time_to(curve, 2.6) == 3.0
    assert math.isinf(time_to(curve, 2.4))
    assert common_loss({"fast": curve, "slow": curve[:2]}) == 4.0


def run_of(topology: str, thin_s: float, equal_s: float) -> Run:
    rounds = []
    phases = []
    now = 0.0
    for thin, length_s in ((True, thin_s), (False, equal_s)):
        began = now
        for number in range(10):
            rounds += [made(peer, number, now, now + length_s) for peer in range(1, straggler.PEERS + 1)]
            now += length_s
        phases.append(Phase(thin, began, now, cpu_share=0.4, machine_share=0.5))
    return Run(topology, 0.0, phases, rounds)


@pytest.mark.parametrize(("thin_s", "ok"), [(3.1, True), (3.2, False)])
def test_bars_hold_2_peer_to_its_own_rounds_with_equal_links(thin_s: float, ok: bool) -> None:
    runs = [run_of("2-peer", thin_s, 3.0), run_of("all-to-all", 6.0, 3.0)]
    rows = [straggler.figures(run, phase) for run in runs for phase in run.phases]
    assert [bar.ok for bar in straggler.judge(rows)] == [ok] * 3
    assert straggler.ratio(rows, "all-to-all", "others_mean_s") == pytest.approx(2.0)
    assert len(list(straggler.table(rows))) == 2 + len(rows)
