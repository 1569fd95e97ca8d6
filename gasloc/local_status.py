"""What a peer of this machine knows, out of its folder's events: `gasloc status --dir`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gasloc.errors import UsageError
from gasloc.events import read_events


@dataclass(frozen=True, slots=True)
class Held:
    """One peer that is left alone, or was, and why."""

    peer: str
    count: int
    """Offences; 0 for one that never erred, but could not be reached or did not answer."""
    reason: str
    until: float
    """Unix time, seconds, from which on it is paired again; in the past where it is.

    For one without offences: when its last record runs out. It is paired as soon as it publishes a newer one.
    """

    def seconds_left(self, now: float) -> float:
        """For how long it is left alone still; `now` in unix seconds."""
        return max(self.until - now, 0.0)


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


def as_record(status: LocalStatus, now: float) -> dict[str, Any]:
    """The status as plain values, with `seconds_left` for each peer; `now` in unix seconds."""
    held = [asdict(one) | {"seconds_left": round(one.seconds_left(now), 3)} for one in status.held]
    return asdict(status) | {"held": held}


def lines(status: LocalStatus, now: float) -> list[str]:
    """The status for a person; `now` in unix seconds."""
    told = ["no round has ended yet" if status.round is None else f"next round {status.round}; last: {status.reason}"]
    told += [f"{one.peer}: {_standing(one, one.seconds_left(now))}: {one.reason}" for one in status.held]
    told.append(f"records refused: {status.rejected_records}")
    return told


def _standing(one: Held, left_s: float) -> str:
    if one.count == 0:
        until = f"for {left_s:.0f} s at most" if left_s > 0 else "its last record has run out"
        return f"no offence, set aside until it publishes again, {until}"
    offences = "1 offence" if one.count == 1 else f"{one.count} offences"
    return f"{offences}, " + (f"set aside for {left_s:.0f} s more" if left_s > 0 else "paired again")
