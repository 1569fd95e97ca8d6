"""What a peer of this machine knows, out of its folder's events: `gasloc status --dir`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gasloc.errors import UsageError
from gasloc.events import read_events


@dataclass(frozen=True, slots=True)
class Held:
    """What is held against one peer."""

    peer: str
    count: int
    reason: str
    until: float
    """Unix time, seconds, from which on it is paired again; in the past where it is."""


@dataclass(frozen=True, slots=True)
class LocalStatus:
    """As of the last events."""

    round: int | None
    """The round that comes next; None before the first round's end."""
    reason: str
    """What came of the last exchange, in words."""
    held: tuple[Held, ...]
    rejected_records: int


def local_status(folder: Path) -> LocalStatus:
    """Reads a run folder, also while its peer trains. Raises `UsageError` where it has no events."""
    path = folder / "events.jsonl"
    try:
        return summed_up(read_events(path))
    except OSError as error:
        raise UsageError(f"'{path}' cannot be read: {error.strerror}; give the --dir of a peer") from None


def summed_up(events: Sequence[dict[str, Any]]) -> LocalStatus:
    """The status that events, in order, leave behind."""
    rounds = [event for event in events if event["event"] == "round"]
    # a peer that was started again holds nothing against anybody
    began = max((index for index, event in enumerate(events) if event["event"] == "run_started"), default=0)
    told = [event for event in events[began:] if event["event"] == "standing"]
    last = told[-1] if told else None
    held = (
        zip(last["peers"], last["counts"], last["reasons"], last["seconds_left"], strict=True)
        if last is not None
        else ()
    )
    return LocalStatus(
        round=rounds[-1]["next_round"] if rounds else None,
        reason=rounds[-1]["reason"] if rounds else "no round has ended yet",
        held=tuple(
            Held(peer, count, reason, last["time"] + seconds if last else 0.0) for peer, count, reason, seconds in held
        ),
        rejected_records=last["rejected_records"] if last else 0,
    )


def lines(status: LocalStatus, now: float) -> list[str]:
    """The status for a person; `now` in unix seconds."""
    told = ["no round has ended yet" if status.round is None else f"next round {status.round}; last: {status.reason}"]
    for one in status.held:
        left_s = one.until - now
        state = f"set aside for {left_s:.0f} s more" if left_s > 0 else "paired again"
        offences = "1 offence" if one.count == 1 else f"{one.count} offences"
        told.append(f"{one.peer}: {offences}, {state}: {one.reason}")
    told.append(f"records refused: {status.rejected_records}")
    return told
