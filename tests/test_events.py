"""Events: one JSON object a line, whole lines only, and the documented schema."""

import errno
import io
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gasloc import events
from gasloc.errors import UsageError
from gasloc.events import Evaluation, Event, EventLog, Joined, Stopped, Warned, as_line, read_events

KINDS = get_args(Event)
DOCUMENT = Path(__file__).parent.parent / "docs" / "events.md"


@given(message=st.text(), now=st.floats(0, 4e9))
def test_any_text_is_one_line_of_json(message: str, now: float) -> None:
    line = as_line(Warned(message), now)

    assert len(line.splitlines()) == 1
    record = json.loads(line)
    assert record == {"event": "warning", "time": round(now, 3), "message": message}


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_becomes_null(loss: float) -> None:
    line = as_line(Evaluation(round=1, step=2, validation_loss=loss, seconds=0.5), 0.0)

    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["validation_loss"] is None


def test_names_are_unique_and_no_field_hides_name_or_time() -> None:
    names = [kind.name for kind in KINDS]
    assert len(set(names)) == len(names)
    for kind in KINDS:
        assert {"event", "time"}.isdisjoint(field.name for field in fields(kind))


def test_every_event_class_is_in_the_union() -> None:
    defined = {value for value in vars(events).values() if isinstance(value, type) and hasattr(value, "__slots__")}
    named = {kind for kind in defined if isinstance(vars(kind).get("name"), str)}
    assert named == set(KINDS)


def test_the_document_lists_every_event_with_exactly_its_fields() -> None:
    sections = re.split(r"^## `(\w+)`$", DOCUMENT.read_text(), flags=re.MULTILINE)[1:]
    documented = {
        name: set(re.findall(r"^\| `(\w+)` \|", body, flags=re.MULTILINE))
        for name, body in zip(sections[::2], sections[1::2], strict=True)
    }
    assert documented == {kind.name: {field.name for field in fields(kind)} for kind in KINDS}


def test_the_log_appends_echoes_and_tells_listeners(tmp_path: Path) -> None:
    path, echo, heard = tmp_path / "events.jsonl", io.StringIO(), list[Event]()
    first = Warned("one")
    second = Joined(round=3, members=2, source="donor", reason="because", size_bytes=10, seconds=0.1)
    for event in (first, second):
        log = EventLog(path, echo=echo)
        log.listen(heard.append)
        log.emit(event)
        log.close()

    assert [record["event"] for record in read_events(path)] == ["warning", "joined"]
    assert path.read_text() == echo.getvalue()
    assert heard == [first, second]


def test_a_line_is_readable_before_the_log_is_closed(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.emit(Stopped(reason="told to stop", round=1, step=2))

    (record,) = read_events(tmp_path / "events.jsonl")
    assert record["step"] == 2
    log.close()


@given(cut=st.integers(0, 200))
def test_a_torn_last_line_is_skipped(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("torn") / "events.jsonl"
    lines = [as_line(Warned(f"number {number}"), 1.0) + "\n" for number in range(3)]
    text = "".join(lines)[: -cut or None]
    path.write_text(text)

    assert [record["message"] for record in read_events(path)] == [
        f"number {number}" for number in range(text.count("\n"))
    ]


def test_a_file_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written: Is a directory"):
        EventLog(tmp_path)


def test_a_reader_that_went_away_does_not_end_training(tmp_path: Path) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    log = EventLog(tmp_path / "events.jsonl", echo=Gone())
    log.emit(Warned("one"))
    log.emit(Warned("two"))
    log.close()

    assert len(read_events(tmp_path / "events.jsonl")) == 2


def test_a_disk_that_takes_no_more_is_told_once_and_all_else_goes_on() -> None:
    log, heard = EventLog(Path("/dev/full")), list[Event]()
    log.listen(heard.append)
    for number in range(3):
        log.emit(Warned(f"number {number}"))
    log.close()

    assert [event.message for event in heard if isinstance(event, Warned)] == [
        "number 0",
        "events are not written to '/dev/full': No space left on device; all else goes on",
        "number 1",
        "number 2",
    ]


def test_a_line_that_was_torn_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(as_line(Warned("whole"), 1.0) + "\n" + as_line(Warned("torn"), 1.0)[:-5])
    log = EventLog(path)
    log.emit(Warned("next"))
    log.emit(Warned("last"))
    log.close()

    assert [record["message"] for record in read_events(path)] == ["whole", "next", "last"]


def test_a_terminal_that_is_gone_does_not_end_training(tmp_path: Path) -> None:
    heard: list[Event] = []

    def hung_up(event: Event) -> None:
        raise OSError(errno.EIO, "Input/output error")

    log = EventLog(tmp_path / "events.jsonl")
    log.listen(hung_up)
    log.listen(heard.append)
    log.emit(Warned("one"))
    log.emit(Warned("two"))
    log.close()

    assert heard == [Warned("one"), Warned("two")]
