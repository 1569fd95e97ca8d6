"""What a person sees while several peers train on this machine."""

from collections.abc import Callable
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gasloc.view import bytes_in_words, short, time_in_words

Record = dict[str, Any]


class LaunchView(Protocol):
    """Shows the events of named workers, and lines of text."""

    def show(self, worker: str, event: Record) -> None: ...

    def lose(self, worker: str) -> None: ...

    def say(self, line: str) -> None: ...

    def close(self) -> None: ...


class Progress:
    """How far the workers are, out of their events."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.last: dict[str, Record] = {}
        """The last `round` event of each worker."""
        self.validation: dict[str, float] = {}
        self.mixed = self.tried = 0
        self._by_round: dict[int, dict[str, Record]] = {}
        self._validation_by_round: dict[int, dict[str, float]] = {}
        self.working: set[str] = set()

    def take(self, worker: str, event: Record) -> str | None:
        """Takes an event in; returns a line when all workers have come to the same point."""
        match event["event"]:
            case "run_started":
                self.working.add(worker)
            case "round":
                return self._take_round(worker, event)
            case "evaluation":
                return self._take_validation(worker, event)
        return None

    def _take_round(self, worker: str, event: Record) -> str | None:
        self.last[worker] = event
        self.tried += bool(event["tried"])
        self.mixed += bool(event["mixed"])
        ended = self._by_round.setdefault(int(event["round"]), {})
        ended[worker] = event
        if not self.working <= ended.keys():
            return None
        del self._by_round[int(event["round"])]
        loss = sum(float(record["loss"]) for record in ended.values()) / len(ended)
        pace = sum(float(record["tokens_per_s"]) for record in ended.values())
        mixed = sum(bool(record["mixed"]) for record in ended.values())
        left_s = (self.rounds - int(event["next_round"])) * float(event["seconds"])
        return (
            f"round {event['round']}: mean loss {loss:.4f}, {mixed} of {len(ended)} mixed, "
            f"{pace:,.0f} tokens/s, about {time_in_words(left_s)} left"
        )

    def _take_validation(self, worker: str, event: Record) -> str | None:
        self.validation[worker] = float(event["validation_loss"])
        measured = self._validation_by_round.setdefault(int(event["round"]), {})
        measured[worker] = float(event["validation_loss"])
        if not self.working <= measured.keys():
            return None
        del self._validation_by_round[int(event["round"])]
        mean = sum(measured.values()) / len(measured)
        return f"after {event['round']} rounds: mean validation loss {mean:.4f} nats per token"


class PlainLaunchView:
    """A line a round, for pipes and files."""

    def __init__(self, progress: Progress, write: Callable[[str], None]) -> None:
        self._progress = progress
        self._write = write

    def show(self, worker: str, event: Record) -> None:
        """Writes what the event completes, and every worker's warning."""
        line = self._progress.take(worker, event)
        if line is not None:
            self._write(line)
        if event["event"] == "warning":
            self._write(f"{worker}: warning: {event['message']}")

    def lose(self, worker: str) -> None:
        """Waits no more for a worker that has ended."""
        self._progress.working.discard(worker)

    def say(self, line: str) -> None:
        """Writes a line."""
        self._write(line)

    def close(self) -> None:
        """Nothing is left on the screen."""


class LiveLaunchView:
    """A row a worker, redrawn in place."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress = progress
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._live.start()

    def show(self, worker: str, event: Record) -> None:
        """Redraws, and lets warnings and validation losses scroll above."""
        line = self._progress.take(worker, event)
        if line is not None and event["event"] == "evaluation":
            self.say(line)
        if event["event"] == "warning":
            self.say(f"{worker}: warning: {event['message']}")
        self._live.update(self._table())

    def lose(self, worker: str) -> None:
        """Takes the row of a worker that has ended away."""
        self._progress.working.discard(worker)
        self._live.update(self._table())

    def say(self, line: str) -> None:
        """Prints a line above the table."""
        self._console.print(Text(line))

    def close(self) -> None:
        """Takes the table off the screen."""
        self._live.stop()

    def _table(self) -> Table:
        progress = self._progress
        table = Table(box=None, padding=(0, 2))
        for title in ("worker", "round", "step", "loss", "validation", "tokens/s", "with", "sent", "left"):
            table.add_column(title, justify="left" if title in ("worker", "with") else "right")
        for worker in sorted(progress.working):
            last = progress.last.get(worker)
            validation = progress.validation.get(worker)
            if last is None:
                table.add_row(worker, f"0/{progress.rounds}", "", "", f"{validation:.4f}" if validation else "")
                continue
            left_s = (progress.rounds - int(last["next_round"])) * float(last["seconds"])
            table.add_row(
                worker,
                f"{last['next_round']}/{progress.rounds}",
                str(last["step"]),
                f"{last['loss']:.4f}",
                f"{validation:.4f}" if validation else "",
                f"{last['tokens_per_s']:,.0f}",
                ", ".join(short(peer) for peer in last["partners"]) or "nobody",
                bytes_in_words(int(last["bytes_sent"])),
                time_in_words(left_s),
            )
        return table
