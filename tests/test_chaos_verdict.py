"""What a chaos run is judged by, on records made by hand."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import chaos_verdict
from benchmarks.chaos_swarm import Life
from benchmarks.chaos_verdict import Cut


def a_round(time: float, **fields: Any) -> dict[str, Any]:
    usual = {
        "loss": 1.0,
        "rolled_back": 0,
        "tried": True,
        "mixed": True,
        "partners": [],
        "clipped": [],
        "reason": "mixed with 1 of 1",
    }
    return {"event": "round", "time": time, **usual, **fields}


def evaluations(*losses: float) -> list[dict[str, Any]]:
    return [{"event": "evaluation", "time": float(index), "validation_loss": loss} for index, loss in enumerate(losses)]


@pytest.fixture
def life(tmp_path: Path) -> Life:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(20)
    return Life("peer-0", tmp_path, 1, process, 0.0)


@pytest.mark.parametrize(("losses", "ok"), [((4, 4, 4, 2, 2, 2, 2, 2, 2), True), ((4,) * 9, False), ((), False)])
def test_the_loss_must_fall_by_a_quarter(losses: tuple[float, ...], ok: bool) -> None:
    assert chaos_verdict.loss(evaluations(*losses)).ok == ok


@pytest.mark.parametrize(("fields", "ok"), [({}, True), ({"loss": math.nan}, False), ({"rolled_back": 1}, False)])
def test_one_state_that_is_not_finite_is_one_too_many(fields: dict[str, Any], ok: bool) -> None:
    assert chaos_verdict.finite([a_round(1), a_round(2, **fields)]).ok == ok


def test_rounds_with_nobody_in_sight_do_not_count_against_the_mixed() -> None:
    alone = [a_round(index, tried=False, mixed=False) for index in range(10)]
    missed = [a_round(index, mixed=False) for index in range(2)]
    assert chaos_verdict.goodput([a_round(1), *alone]).ok
    assert not chaos_verdict.goodput([a_round(1), *missed]).ok
    assert not chaos_verdict.goodput(alone).ok


def cut() -> Cut:
    return Cut(frozenset({"a", "b"}), frozenset({"c", "d"}), began=100.0, healed=130.0)


def test_a_heal_is_seen_where_a_round_mixes_across_the_cut() -> None:
    apart = {"a": [a_round(110, partners=["b"])], "c": [a_round(112, partners=["d"])]}
    together = {**apart, "d": [a_round(145, partners=["a"])]}
    line = chaos_verdict.healed([cut()], together)
    assert line.ok
    assert "at most 15 s" in line.figure
    assert not chaos_verdict.healed([cut()], apart).ok


def test_a_half_that_stood_still_while_apart_is_told() -> None:
    line = chaos_verdict.healed([cut()], {"a": [a_round(110), a_round(140, partners=["c"])]})
    assert not line.ok
    assert "1 halves stood still" in line.figure


def test_a_late_heal_is_too_late() -> None:
    late = {"a": [a_round(110), a_round(300, partners=["c"])], "c": [a_round(112)]}
    assert not chaos_verdict.healed([cut()], late).ok


@pytest.mark.parametrize(
    ("records", "ok"),
    [
        ([a_round(1, clipped=["liar"])], True),
        ([a_round(1, reason="mixed with 0 of 1; liar: refused what it sent")], True),
        ([{"event": "warning", "time": 1.0, "message": "liar: set aside for 30 s"}], True),
        ([a_round(1, clipped=["somebody"])], False),
    ],
)
def test_a_liar_that_nobody_noticed_fails_the_run(records: list[dict[str, Any]], ok: bool) -> None:
    assert chaos_verdict.liar(records, ["liar"]).ok == ok


@pytest.mark.parametrize(
    ("values", "ok"),
    [
        ([50] * 100, True),
        ([*range(10, 40), *([50] * 200)], True),
        (list(range(50, 180)), False),
        ([50] * 5, False),
    ],
)
def test_what_rises_after_warm_up_is_not_flat(life: Life, values: list[int], ok: bool) -> None:
    life.samples = [(float(index), value, 0) for index, value in enumerate(values)]
    assert chaos_verdict.flat("descriptors", 1, 0.1, 8, [life]).ok == ok


def test_what_a_peer_said_itself_is_not_what_those_before_it_in_its_folder_said(life: Life) -> None:
    before = [
        '{"event": "joined"}',
        '{"event": "listening", "addresses": ["/ip4/1.2.3.4/tcp/1"]}',
        '{"event": "round"}',
    ]
    (life.folder / "events.jsonl").write_text("\n".join(before) + "\n")
    life.lines_before = len(before)
    assert (life.joined(), life.rounds(), life.addresses()) == (False, [], [])
    with (life.folder / "events.jsonl").open("a") as file:
        file.write('{"event": "joined"}\n{"event": "round", "round": 7}\n{"event": "rou')
    assert life.joined()
    assert [event["round"] for event in life.rounds()] == [7]
    assert len(list(life.events())) == 5
