"""What a person sees while a peer trains: a live line on a terminal, a plain line a round elsewhere."""

import time
from collections.abc import Callable
from dataclasses import replace

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gasloc.events import (
    CheckpointSaved,
    Downloading,
    Evaluation,
    Event,
    Finished,
    Joined,
    Listening,
    Merge,
    Round,
    RunStarted,
    Stopped,
    Warned,
)
from gasloc.reasons import Reasons


def bytes_in_words(size: float) -> str:
    """A size as a person reads it: `1.5 MB`, by powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def time_in_words(seconds: float) -> str:
    """A duration as a person reads it: `45s`, `3m05s`, `2h10m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def short(peer: str) -> str:
    """The end of a peer id, which is what differs between peers."""
    return f"..{peer[-6:]}"


def describe(event: Event) -> str | None:
    """The event as one line of plain text, or None for one that a person need not see."""
    match event:
        case RunStarted():
            return _describe_start(event)
        case Joined():
            got = f", {bytes_in_words(event.size_bytes)} in {event.seconds:.1f} s" if event.size_bytes else ""
            return f"in the swarm: {event.members} members, starting at round {event.round} ({event.reason}{got})"
        case Downloading():
            return _describe_download(event)
        case Round():
            return _describe_round(event)
        case Merge():
            learners = ", ".join(short(peer) for peer in event.learners)
            return f"merged fragment {event.fragment} of round {event.round}, version {event.version}, from {learners}"
        case Evaluation():
            return f"after {event.round} rounds: validation loss {event.validation_loss:.4f} nats per token"
        case Warned():
            return f"warning: {event.message}"
        case Stopped():
            return f"stopped ({event.reason}) in round {event.round} at step {event.step}; checkpoint saved"
        case Finished():
            return (
                f"finished: {event.round} rounds, {event.step} steps, {event.tokens:,} tokens "
                f"in {time_in_words(event.seconds)}; model in {event.model}"
            )
        case _:  # `Failed` too: the command line tells it on stderr
            return None


def _describe_start(event: RunStarted) -> str:
    where = f", going on at step {event.step}" if event.resumed else ""
    return (
        f"run {event.run}: recipe {event.recipe}, {event.parameters:,} parameters, {event.rounds} rounds, "
        f"{event.device}, {event.threads} threads{where}; folder {event.folder}"
    )


def _describe_download(event: Downloading) -> str:
    if event.note:
        return event.note
    rate = f"{bytes_in_words(event.bytes_per_s)} per second"
    donors = ", ".join(short(peer) for peer in event.donors) or "nobody now"
    return (
        f"state of round {event.round}: {bytes_in_words(event.done_bytes)} of {bytes_in_words(event.total_bytes)}, "
        f"{rate}, from {donors}"
    )


def _describe_round(event: Round) -> str:
    partners = ", ".join(short(peer) for peer in event.partners) or "nobody"
    sent, received = bytes_in_words(event.bytes_sent), bytes_in_words(event.bytes_received)
    return (
        f"round {event.round}  step {event.step}  loss {event.loss:.4f}  {event.tokens_per_s:,.0f} tokens/s  "
        f"with {partners}  sent {sent}, received {received}"
    )


class _ReasonLog:
    """Tells why rounds went unmixed, only when the kind of reason changes."""

    def __init__(self) -> None:
        self._reasons = Reasons()

    def changed(self, event: Round) -> str | None:
        reason = "" if event.mixed else event.reason
        if not self._reasons.changed(reason):
            return None
        return f"trained this round alone: {reason}" if reason else "mixing again"


class _DownloadLog:
    """Tells how far a download is at each tenth, and each note."""

    def __init__(self) -> None:
        self._tenth = 0

    def worth_telling(self, event: Downloading) -> bool:
        tenth = 10 * event.done_bytes // max(event.total_bytes, 1)
        told, self._tenth = self._tenth, tenth
        return bool(event.note) or tenth > told


class PlainView:
    """A line an event, for pipes and files."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._reasons = _ReasonLog()
        self._downloads = _DownloadLog()

    def show(self, event: Event) -> None:
        """Writes the event's line, if it has one."""
        if isinstance(event, Listening):
            self._write(_reach(event))
            self._write(event.join)
            return
        if isinstance(event, Downloading) and not self._downloads.worth_telling(event):
            return
        line = describe(event)
        if line is not None:
            self._write(line)
        if isinstance(event, Round):
            changed = self._reasons.changed(event)
            if changed is not None:
                self._write(changed)

    def close(self) -> None:
        """Nothing is left on the screen."""


class LiveView:
    """The state of the run in a few lines that are redrawn, with what happened scrolling above them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._reasons = _ReasonLog()
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._rounds = 0
        self._round: Round | None = None
        self._merge: Merge | None = None
        self._download: Downloading | None = None
        self._validation: float | None = None
        self._sent = self._received = 0
        self._pace_s: float | None = None
        self._shown = False

    def show(self, event: Event) -> None:
        """Takes the event in and redraws."""
        match event:
            case Listening():
                self._console.print(Text(_reach(event)))
                # by itself on a line and never wrapped, so that it can be copied whole
                self._console.print(Text(event.join), soft_wrap=True, style="bold")
                return
            case Downloading():
                self._download = event
            case Joined():
                self._download = None
            case RunStarted():
                self._rounds = event.rounds
            case Round():
                self._take_round(event)
            case Merge():
                self._merge = event
            case Evaluation():
                self._validation = event.validation_loss
            case CheckpointSaved():
                return
        line = describe(event)
        redrawn = isinstance(event, Round | Merge) or (isinstance(event, Downloading) and not event.note)
        if line is not None and not redrawn:
            self._console.print(Text(line))
        if isinstance(event, RunStarted | Downloading) and not self._shown:
            self._shown = True
            self._live.start()
        if self._shown:
            self._live.update(self._table())

    def close(self) -> None:
        """Takes the redrawn lines off the screen."""
        if self._shown:
            self._live.stop()
            self._shown = False

    def _take_round(self, event: Round) -> None:
        self._round = event
        self._download = None  # one in the middle of a run ends without a word of its own
        self._sent += event.bytes_sent
        self._received += event.bytes_received
        self._pace_s = event.seconds if self._pace_s is None else 0.8 * self._pace_s + 0.2 * event.seconds
        changed = self._reasons.changed(event)
        if changed is not None:
            self._console.print(Text(changed))

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        last = self._round
        if self._download is not None:
            table.add_row(_describe_download(replace(self._download, note="")))
            return table
        if self._merge is not None:
            merge = self._merge
            table.add_row(f"round {merge.round}/{self._rounds}", f"{merge.live} learners")
            table.add_row(f"fragment {merge.fragment}, version {merge.version}", merge.reason)
            return table
        if last is None:
            table.add_row("round 0", "the first steps ...")
            return table
        left = (self._rounds - last.next_round) * (self._pace_s or 0.0)
        validation = "" if self._validation is None else f"validation {self._validation:.4f}"
        partners = ", ".join(short(peer) for peer in last.partners) or "nobody"
        table.add_row(
            f"round {last.next_round}/{self._rounds}",
            f"step {last.step}",
            f"loss {last.loss:.4f}",
            validation,
            f"{last.tokens_per_s:,.0f} tokens/s",
        )
        table.add_row(
            f"with {partners}",
            f"sent {bytes_in_words(self._sent)}",
            f"received {bytes_in_words(self._received)}",
            f"left {time_in_words(left)}",
            f"at {time.strftime('%H:%M:%S')}",
        )
        return table


def _reach(event: Listening) -> str:
    if event.local_only:
        return (
            "only this machine can reach this peer; for others start it with --host 0.0.0.0, "
            "and with --public-ip where it is behind a router. The next peer on this machine joins with:"
        )
    return "the next peer joins with:"
