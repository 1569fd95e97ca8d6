"""Several peers on this machine, each a process of its own with its own p2pd: `gasloc launch`."""

import contextlib
import json
import os
import queue
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import typer
from rich.console import Console

from gasloc import summary
from gasloc.child import Child, Ended, Message
from gasloc.commands.choices import choose_recipe
from gasloc.errors import UsageError
from gasloc.events import read_events
from gasloc.launch_view import LaunchView, LiveLaunchView, PlainLaunchView, Progress, Record
from gasloc.recipe import Recipe, parse
from gasloc.run_folder import RunFolder, StoredCard
from gasloc.stop import Stop
from gasloc.summary import Summary

DEFAULT_WORKERS = 4
ORDERLY_S = 30.0
"""How long workers may take to end in good order once told."""
SYNCER = "syncer"
"""The syncer's name and folder, where the recipe has one."""
SYNCER_ENDS_S = 10.0
"""How long the syncer may take to find that all learners have left; then it is told."""
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """What a person may choose about a launch."""

    folder: Path
    workers: int | None
    """None: as many as the folder has, or 4 in a new one."""
    recipe: str | None
    changes: dict[str, object]
    data: str | None
    device: str
    json: bool
    access: Mapping[str, Path | None] = field(default_factory=dict)
    """Flags of `peers.access` that every worker is given."""


def launch(options: LaunchOptions) -> int:
    """Runs all workers to the end of their run, or until told to stop; returns the exit code.

    In a used folder the workers that have not finished go on. Raises `RunError` where none finishes, and
    `UsageError` where the folder holds another run.
    """
    with Stop() as stop, contextlib.closing(RunFolder(options.folder)) as folder:
        recipe, folders = _prepare(folder, options)
        left = [path for path in folders if not _is_finished(path)]
        known = summary.read(folder.path / "summary.json")
        if known is not None and not left:
            _show_summary(known, folder.path, options, "this run is finished; its summary:")
            return 0
        if left:
            syncer = folder.path / SYNCER if recipe.topology == "syncer" else None
            _Launch(options, recipe, left, stop, syncer).run()
        if stop.event.is_set():
            if not options.json:
                typer.echo(f"stopped; go on with: gasloc launch --dir {folder.path}")
            return 0
        result = summary.summarise(folders)
        summary.write(folder.path / "summary.json", result)
        if not summary.plot(folder.path / "loss.png", folders) and not options.json:
            typer.echo("no loss.png: matplotlib is not installed (pip install 'gasloc[plots]')")
        _show_summary(result, folder.path, options, "finished:")
    return 0


def _prepare(folder: RunFolder, options: LaunchOptions) -> tuple[Recipe, list[Path]]:
    """The recipe and every worker's folder; both are laid down on the first launch."""
    stored = folder.read_card()
    recipe = choose_recipe(options.recipe, options.changes, parse(json.loads(stored.document)) if stored else None)
    present = sorted(folder.path.glob("worker-*"), key=lambda path: (len(path.name), path.name))
    if stored is None and present:
        raise UsageError(f"folder '{folder.path}' has workers but no run.json: choose another --dir")
    if stored is not None and present:
        if options.workers not in (None, len(present)):
            raise UsageError(
                f"folder '{folder.path}' holds {len(present)} workers, not {options.workers}: "
                "choose another --dir, or leave --workers out"
            )
        return recipe, present
    count = options.workers or DEFAULT_WORKERS
    if recipe.topology == "syncer" and recipe.syncer.quorum > count:
        raise UsageError(
            f"recipe: syncer.quorum = {recipe.syncer.quorum} with --workers {count}: "
            "a merge would never have so many learners; lower the quorum, or start more workers"
        )
    folders = [folder.path / f"worker-{number}" for number in range(count)]
    card = stored or StoredCard(
        run=f"{recipe.name}-{secrets.token_hex(4)}",
        digest=recipe.digest,
        document=recipe.model_dump_json().encode(),
    )
    for path in [*folders, *([folder.path / SYNCER] if recipe.topology == "syncer" else [])]:
        with contextlib.closing(RunFolder(path)) as worker:
            worker.write_card(card)
    folder.write_card(card)
    return recipe, folders


class _Launch:
    """One launch, from the first process to the last."""

    def __init__(
        self, options: LaunchOptions, recipe: Recipe, folders: Sequence[Path], stop: Stop, syncer: Path | None
    ) -> None:
        self._options = options
        self._syncer = syncer
        self._left_alone_at: float | None = None
        """When the syncer's last learner ended."""
        self._folders = folders
        self._stop = stop
        self._messages: queue.Queue[Message | Ended] = queue.Queue()
        self._children: dict[str, Child] = {}
        self._alive: set[str] = set()
        self._told_at: float | None = None
        self._threads = max(1, (os.cpu_count() or 1) // len(folders))
        self._view = _make_view(options, Progress(recipe.rounds))

    def run(self) -> None:
        """Starts the first worker, the others when it can be joined, and waits for all."""
        # with the syncer, or the one that got furthest, the others find a state to go on from
        first = self._syncer or max(self._folders, key=_rounds_saved)
        rest = [path for path in self._folders if path != first]
        self._view.say(f"{len(self._folders)} workers, {self._threads} threads each; folder {self._options.folder}")
        self._stop.on_second = self._exit_now
        try:
            if self._syncer is not None:
                self._begin(first, ["syncer", *self._access()])
            else:
                self._begin(first, ["start", *self._training()])
            while self._alive:
                self._tell_once()
                self._tell_the_syncer()
                message = self._next_message()
                if isinstance(message, Ended):
                    self._end(message)
                elif message is not None:
                    self._show(message)
                    if message.event["event"] == "listening" and message.child == first.name:
                        address = message.event["addresses"][0]
                        for path in rest:
                            self._begin(path, ["join", "--peers", address, *self._training()])
        finally:
            self._view.close()
            for child in self._children.values():
                child.kill()

    def _begin(self, folder: Path, arguments: list[str]) -> None:
        if self._stop.event.is_set():
            return
        self._children[folder.name] = Child(
            folder.name,
            [*arguments, "--dir", str(folder), "--host", "127.0.0.1"],
            folder=folder,
            threads=self._threads,
            messages=self._messages,
        )
        self._alive.add(folder.name)

    def _access(self) -> list[str]:
        given = self._options.access.items()
        return [word for flag, path in given if path is not None for word in (flag, str(path))]

    def _training(self) -> list[str]:
        """What every worker is told of its training."""
        options = self._options
        members = len(self._folders) + (self._syncer is not None)
        given = ["--data", options.data] if options.data is not None else []
        return ["--device", options.device, "--wait-for", str(members), *given, *self._access()]

    def _show(self, message: Message) -> None:
        """The syncer is no worker: of its events a person sees only warnings."""
        if self._syncer is None or message.child != SYNCER or self._options.json:
            self._view.show(message.child, message.event)
        elif message.event["event"] == "warning":
            self._view.say(f"{SYNCER}: warning: {message.event['message']}")

    def _next_message(self) -> Message | Ended | None:
        with contextlib.suppress(queue.Empty):
            return self._messages.get(timeout=_POLL_S)
        return None

    def _end(self, ended: Ended) -> None:
        self._alive.discard(ended.child)
        self._view.lose(ended.child)
        if ended.code != 0 and not self._stop.event.is_set():
            self._view.say(ended.in_words())

    def _tell_once(self) -> None:
        """Passes on that we were told to stop, once; workers that take too long are ended."""
        if not self._stop.event.is_set():
            return
        if self._told_at is None:
            self._told_at = time.monotonic()
            self._view.say("stopping: workers finish their step and save ...")
            for child in self._children.values():
                child.interrupt()
        elif time.monotonic() - self._told_at > ORDERLY_S:
            for child in self._children.values():
                child.kill()

    def _tell_the_syncer(self) -> None:
        """It ends by itself once the last round is merged and all have left; for when that does not come about."""
        if self._alive != {SYNCER} or len(self._children) == 1:
            return
        if self._left_alone_at is None:
            self._left_alone_at = time.monotonic()
        elif time.monotonic() - self._left_alone_at > SYNCER_ENDS_S:
            self._left_alone_at = float("inf")
            self._children[SYNCER].interrupt()

    def _exit_now(self) -> None:
        """In the signal handler: a worker that is told twice ends its own p2pd before it exits."""
        for child in self._children.values():
            child.interrupt()
            if self._told_at is None:
                child.interrupt()
        deadline = time.monotonic() + 2.0
        for child in self._children.values():
            child.wait_until(deadline)
            child.kill()


class _JsonView:
    """Every worker's events as they are, with the worker's name added."""

    def show(self, worker: str, event: Record) -> None:
        sys.stdout.write(json.dumps({"worker": worker, **event}) + "\n")
        sys.stdout.flush()

    def lose(self, worker: str) -> None:
        """The `launch` line that follows tells it."""

    def say(self, line: str) -> None:
        sys.stdout.write(json.dumps({"event": "launch", "time": round(time.time(), 3), "message": line}) + "\n")
        sys.stdout.flush()

    def close(self) -> None:
        """Nothing is held back."""


def _make_view(options: LaunchOptions, progress: Progress) -> LaunchView:
    if options.json:
        return _JsonView()
    if sys.stdout.isatty():
        return LiveLaunchView(progress, Console())
    return PlainLaunchView(progress, typer.echo)


def _show_summary(result: Summary, folder: Path, options: LaunchOptions, title: str) -> None:
    if options.json:
        typer.echo(json.dumps({"event": "summary", "time": round(time.time(), 3), **asdict(result)}))
        return
    for line in (title, *summary.lines(result)):
        typer.echo(line)
    typer.echo("results:")
    for path in (folder / "summary.json", folder / "loss.png"):
        if path.exists():
            typer.echo(f"  {path}")
    typer.echo(f"  {folder}/worker-*/events.jsonl")


def _is_finished(folder: Path) -> bool:
    path = folder / "events.jsonl"
    return path.exists() and summary.is_finished(read_events(path))


def _rounds_saved(folder: Path) -> int:
    """The round of the worker's last checkpoint; -1 without one."""
    path = folder / "events.jsonl"
    events = read_events(path) if path.exists() else []
    return max((int(record["round"]) for record in events if record["event"] == "checkpoint"), default=-1)
