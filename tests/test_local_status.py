"""What `gasloc status --dir` tells of a peer on this machine."""

from pathlib import Path

import pytest

from gasloc.errors import UsageError
from gasloc.events import EventLog, Standing
from gasloc.local_status import lines, local_status, summed_up

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
