"""What `gasloc status --dir` tells of a peer on this machine."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gasloc import cli
from gasloc.errors import UsageError
from gasloc.events import EventLog, Standing
from gasloc.local_status import as_record, lines, local_status, summed_up
from gasloc.offences import SetAside, with_silent
from gasloc.recipe import parse
from gasloc.swarm import Swarm
from peers.exchange import Offer, Slot
from peers.node import PeerOptions
from tests.test_guard import Weight

ROUND = {"event": "round", "time": 50.0, "next_round": 8, "reason": "mixed with 0 of 1; p: did not answer in time"}
HELD = {
    "event": "standing",
    "time": 100.0,
    "peers": ["liar", "clumsy"],
    "counts": [2, 1],
    "seconds_left": [30.0, 0.0],
    "reasons": ["NaN; its offence number 2", "garbled; its first offence"],
    "rejected_records": 3,
}


def test_those_set_aside_are_told_with_counts_and_reasons() -> None:
    told = lines(summed_up([{"event": "run_started"}, ROUND, HELD]), 110.0)
    assert told == [
        "next round 8; last: mixed with 0 of 1; p: did not answer in time",
        "liar: 2 offences, set aside for 20 s more: NaN; its offence number 2",
        "clumsy: 1 offence, paired again: garbled; its first offence",
        "records refused: 3",
    ]
    assert "liar: 2 offences, paired again" in lines(summed_up([HELD]), 131.0)[1]


SILENT: dict[str, Any] = HELD | {
    "peers": ["gone", "liar"],
    "counts": [0, 2],
    "seconds_left": [12.0, 30.0],
    "reasons": ["cannot be reached: nobody answers", "NaN; its offence number 2"],
}


def test_one_that_only_could_not_be_reached_is_told_as_such() -> None:
    found = summed_up([SILENT])
    assert lines(found, 104.0)[1] == (
        "gone: no offence, set aside until it publishes again, for 8 s at most: cannot be reached: nobody answers"
    )
    assert lines(found, 120.0)[1] == (
        "gone: no offence, set aside until it publishes again, its last record has run out: "
        "cannot be reached: nobody answers"
    )


def test_the_record_says_how_long_each_is_left_alone() -> None:
    record = as_record(summed_up([SILENT]), 104.5)
    assert record["held"] == [
        {"peer": "gone", "count": 0, "reason": SILENT["reasons"][0], "until": 112.0, "seconds_left": 7.5},
        {"peer": "liar", "count": 2, "reason": SILENT["reasons"][1], "until": 130.0, "seconds_left": 25.5},
    ]
    assert record["rejected_records"] == 3
    assert [one["seconds_left"] for one in as_record(summed_up([SILENT]), 115.0)["held"]] == [0.0, 15.0]


def test_both_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.emit(Standing(("gone",), (0,), (900.0,), ("did not answer in time",), rejected_records=0))
    log.close()
    assert cli.run(["status", "--dir", str(tmp_path)]) == 0
    told = capsys.readouterr().out.splitlines()[1]
    assert told.startswith("gone: no offence, set aside until it publishes again, for ")
    assert told.endswith(" s at most: did not answer in time")
    assert cli.run(["status", "--dir", str(tmp_path), "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["local"]["held"]
    assert (one["peer"], one["count"], one["reason"]) == ("gone", 0, "did not answer in time")
    assert 0 < one["seconds_left"] <= 900


def test_silence_is_told_beside_offences_and_is_none() -> None:
    erred = {"liar": SetAside(30.0, 2, "NaN"), "clumsy": SetAside(5.0, 1, "garbled")}
    silent = {"gone": ("cannot be reached", 12.0), "clumsy": ("did not answer", 9.0), "liar": ("broke off", 20.0)}
    assert with_silent(erred, silent) == {
        "liar": SetAside(30.0, 2, "NaN; and now: broke off"),
        "clumsy": SetAside(9.0, 1, "garbled; and now: did not answer"),
        "gone": SetAside(12.0, 0, "cannot be reached"),
    }
    assert with_silent(erred, {}) == erred


def test_a_peer_holds_it_of_one_that_died_until_its_record_runs_out(tmp_path: Path) -> None:
    with Swarm.start(parse({"rounds": 50}), PeerOptions(tmp_path / "here", host="127.0.0.1")) as here:
        here.enter(Weight(1.0))
        here.train()
        options = PeerOptions(tmp_path / "gone", host="127.0.0.1", initial_peers=(here.addresses[0],))
        with Swarm.join(options) as gone:
            gone.enter(Weight(1.0))
            gone.train()
            assert here.wait_for(2) == 2
            assert here.company.set_aside() == {}
            gone.abandon()
            swap = here.swap(Slot(0), {gone.me: Offer({"w": torch.zeros(4)})}, timeout_s=60.0)[gone.me]
            held = here.company.set_aside()
            assert held.keys() == {gone.me}
            assert (held[gone.me].count, held[gone.me].reason) == (0, swap.reason)
            assert held[gone.me].until <= time.monotonic() + 60.0
            assert gone.me not in here.members(0)


def test_a_peer_that_was_started_again_holds_nothing_against_anybody() -> None:
    found = summed_up([{"event": "run_started"}, HELD, {"event": "run_started"}])
    assert found.held == ()
    assert lines(found, 0.0) == ["no round has ended yet", "records refused: 0"]


def test_it_is_read_from_a_folder(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.emit(Standing(peers=("p",), counts=(1,), seconds_left=(0.0,), reasons=("why",), rejected_records=2))
    log.close()
    found = local_status(tmp_path)
    assert [(one.peer, one.count, one.reason) for one in found.held] == [("p", 1, "why")]
    assert found.rejected_records == 2
    with pytest.raises(UsageError, match="No such file"):
        local_status(tmp_path / "nowhere")
