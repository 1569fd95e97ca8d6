"""What happens in a run, as typed events: one JSON object a line. The schema is in `docs/events.md`."""

import contextlib
import errno
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TextIO, TypeAlias

from gasloc.errors import UsageError


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The trainer is ready; the first step comes next."""

    name: ClassVar[str] = "run_started"
    peer: str
    run: str
    recipe: str
    digest: str
    rounds: int
    round: int
    step: int
    """Local steps taken so far; above 0 after a resume."""
    resumed: bool
    parameters: int
    device: str
    threads: int
    pid: int
    folder: str


@dataclass(frozen=True, slots=True)
class Listening:
    """The peer can be dialled."""

    name: ClassVar[str] = "listening"
    peer: str
    addresses: tuple[str, ...]
    join: str
    """The complete command for the next peer."""
    local_only: bool


@dataclass(frozen=True, slots=True)
class Joined:
    """The peer is in a swarm with others and knows where it starts."""

    name: ClassVar[str] = "joined"
    round: int
    members: int
    """Members seen, this peer included."""
    source: str
    """`donor`: downloaded; `initial`: nobody had trained yet; `checkpoint`: our own was recent enough."""
    reason: str
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Downloading:
    """The swarm's state is on its way here: about once a second, and when something changes."""

    name: ClassVar[str] = "downloading"
    round: int
    """The round that the state belongs to."""
    done_bytes: int
    """Received and verified."""
    total_bytes: int
    bytes_per_s: float
    """Since this state was begun."""
    donors: tuple[str, ...]
    """Those that give parts of it now."""
    note: str
    """What just changed, in words, such as a donor that was given up; mostly empty."""


@dataclass(frozen=True, slots=True)
class ExchangeStarted:
    """Local steps are done; these partners are dialled or waited for."""

    name: ClassVar[str] = "exchange_started"
    round: int
    mix: int
    """Which of the round's exchanges, where there are several."""
    phase: str
    """Part of the exchange, such as a fragment; empty for a plain one."""
    partners: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """A round ended with its outer step."""

    name: ClassVar[str] = "round"
    round: int
    """The round that ended, from 0."""
    step: int
    loss: float
    """Mean training loss over the round's local steps, nats per token."""
    lr: float
    local_steps: int
    tokens: int
    """Tokens trained on so far, by this peer."""
    tokens_per_s: float
    partners: tuple[str, ...]
    """Partners whose parameters were mixed in."""
    mixed: bool
    tried: bool
    """There was somebody to mix with."""
    reason: str
    """What came of the exchange with each partner, in words."""
    next_round: int
    next_reason: str
    distance: float | None
    """||mix - phi|| / ||phi||: how far mixing moved this peer; None where nobody mixed."""
    bytes_sent: int
    bytes_received: int
    exchange_s: float
    seconds: float
    radius: float | None = None
    """How far from phi a partner may be before it is clipped; None where nobody was measured."""
    excess: float | None = None
    """The farthest partner's distance in units of the radius; above 1 it was clipped. None as above."""
    clipped: tuple[str, ...] = ()
    """Partners that were clipped."""
    rolled_back: int = 0
    """How often this peer put its own state back, since it was not finite."""
    waited_s: float = 0.0
    """Of `exchange_s`, what training could not hide."""
    overlap_steps: int = 0
    """The most local steps that were taken between sending and taking the outcome; 0: training waited."""


@dataclass(frozen=True, slots=True)
class Paced:
    """The number of local steps a round changed."""

    name: ClassVar[str] = "paced"
    round: int
    """The round that comes next."""
    local_steps: int
    reason: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Loss on the held-out split."""

    name: ClassVar[str] = "evaluation"
    round: int
    """Rounds done when it was measured."""
    step: int
    validation_loss: float
    """Nats per token."""
    seconds: float


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """A checkpoint is whole on disk."""

    name: ClassVar[str] = "checkpoint"
    path: str
    round: int
    step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Warned:
    """Something is wrong that training survives."""

    name: ClassVar[str] = "warning"
    message: str


@dataclass(frozen=True, slots=True)
class Standing:
    """Whom this peer leaves alone, and why, changed; or records were refused."""

    name: ClassVar[str] = "standing"
    peers: tuple[str, ...]
    """Peers that erred and are not forgiven, and those that could not be reached or did not answer."""
    counts: tuple[int, ...]
    """Offences of each that count now; 0 for one that only did not answer."""
    seconds_left: tuple[float, ...]
    """For how long each is not paired from now on; 0: it is. With a count of 0, at most: until it publishes again."""
    reasons: tuple[str, ...]
    """The last offence of each, and what follows from it; or why it could not be traded with."""
    rejected_records: int
    """Members' records refused so far: junk, forged, too large, of another run."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The run was told to stop before its last round; a checkpoint was saved."""

    name: ClassVar[str] = "stopped"
    reason: str
    round: int
    step: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The run's last round is done and the model is saved."""

    name: ClassVar[str] = "finished"
    round: int
    step: int
    tokens: int
    model: str
    """The file with the final weights."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The process ends with an error."""

    name: ClassVar[str] = "failed"
    message: str


@dataclass(frozen=True, slots=True)
class Merge:
    """The syncer merged a fragment."""

    name: ClassVar[str] = "merge"
    fragment: int
    version: int
    """Merges of this fragment so far, this one included."""
    round: int
    """The highest round that a learner has reported."""
    learners: tuple[str, ...]
    """Whose fragments went in."""
    shares: tuple[float, ...]
    """Each one's share; they sum to 1."""
    tokens: float
    """Trained on for this merge, by all of them."""
    live: int
    """Learners that were here at the time."""
    waited_s: float
    """From the first report to the decision."""
    merge_s: float
    norm: float
    """Length of the outer gradient."""
    reason: str
    """Why it was merged then, in words."""


Event: TypeAlias = (
    RunStarted
    | Listening
    | Joined
    | Downloading
    | ExchangeStarted
    | Round
    | Paced
    | Evaluation
    | CheckpointSaved
    | Warned
    | Standing
    | Stopped
    | Finished
    | Failed
    | Merge
)

Listener: TypeAlias = Callable[[Event], None]


def as_line(event: Event, now: float) -> str:
    """The event as one line of strict JSON without the line's end; `now` in unix seconds.

    A number that is not finite becomes null: JSON has no name for it.
    """
    record: dict[str, object] = {"event": event.name, "time": round(now, 3)}
    for field in fields(event):
        value = getattr(event, field.name)
        record[field.name] = None if isinstance(value, float) and not math.isfinite(value) else value
    return json.dumps(record, allow_nan=False)


class EventLog:
    """Appends events to a file, a line at a time, and passes them on to listeners.

    Events may come from several threads, one at a time. A line is flushed as it is written, so a reader sees whole
    lines and a killed process loses none that it reported.
    """

    def __init__(self, path: Path | None, *, echo: TextIO | None = None) -> None:
        """Opens `path` for appending; `echo` gets a copy of each line. Raises `UsageError` if it cannot."""
        self._path = path
        self._file: BinaryIO | None = None
        self._torn = False
        """The file may end in a part of a line: what a full disk or a killed process leaves."""
        self._trouble = ""
        """Why the file takes no lines now, as told."""
        self._echo = echo
        self._listeners: list[Listener] = []
        self._lock = threading.RLock()
        if path is not None:
            try:
                self._torn = _ends_within_a_line(path)
                self._file = path.open("ab", buffering=0)
            except OSError as error:
                raise UsageError(f"'{path}' cannot be written: {error.strerror}") from None

    def listen(self, listener: Listener) -> None:
        """Calls `listener` with every event from now on."""
        self._listeners.append(listener)

    def emit(self, event: Event) -> None:
        """Writes the event and calls every listener.

        A file that takes no more, as on a full disk, is a warning to those who listen, once for each reason; the
        events after it are written where that works again. A listener whose terminal is gone is not called again.
        """
        with self._lock:
            line = as_line(event, time.time()) + "\n"
            trouble = self._write_file(line)
            self._pass_on(event, line)
            if trouble and trouble != self._trouble:
                warning = Warned(f"events are not written to '{self._path}': {trouble}; all else goes on")
                self._pass_on(warning, as_line(warning, time.time()) + "\n")
            self._trouble = trouble

    def _write_file(self, line: str) -> str:
        """Why the line was not written, or not whole; empty where it was."""
        if self._file is None:
            return ""
        content = ("\n" if self._torn else "").encode() + line.encode()
        try:
            written = self._file.write(content)
        except OSError as error:
            return error.strerror or str(error)
        self._torn = written != len(content)
        return os.strerror(errno.ENOSPC) if self._torn else ""

    def _pass_on(self, event: Event, line: str) -> None:
        if self._echo is not None:
            self._write_echo(line)
        for listener in list(self._listeners):
            try:
                listener(event)
            except OSError:
                self._listeners.remove(listener)

    def _write_echo(self, line: str) -> None:
        assert self._echo is not None
        try:
            self._echo.write(line)
            self._echo.flush()
        except OSError:
            # whoever read our output is gone, or the disk that it goes to is full; the file still has every line
            if self._echo is sys.stdout:
                sys.stdout = None  # else Python complains of the pipe once more as it exits
            self._echo = None

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _ends_within_a_line(path: Path) -> bool:
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def read_events(path: Path) -> list[dict[str, Any]]:
    """Reads an event file; a line that is not whole, as a killed process or a full disk leaves it, is skipped."""
    records: list[dict[str, Any]] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("{") and line.endswith("\n"):
                with contextlib.suppress(ValueError):
                    records.append(json.loads(line))
    return records
