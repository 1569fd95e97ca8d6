"""One peer's life: folder, network, text, training, goodbye. What `gasloc start` and `gasloc join` run."""

import concurrent.futures
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import typer
from rich.console import Console

from gasloc import corpus, inner
from gasloc.consensus import consensus
from gasloc.errors import GaslocError, RecipeError, UsageError
from gasloc.events import Downloading, EventLog, Failed, Joined, Listening, RunStarted, Stopped, Warned
from gasloc.first_look import first_look
from gasloc.presence import Presence, join_command
from gasloc.recipe import SIMULATED_ONLY, Recipe, parse
from gasloc.run_folder import RunFolder, StoredCard
from gasloc.stability import Verdict
from gasloc.stop import Stop
from gasloc.swarm import Swarm
from gasloc.trainer import Trainer
from gasloc.view import LiveView, PlainView
from peers.download import Progress
from peers.errors import PeersError
from peers.node import RunCard

EOF_STOP_S = 15.0
"""After our parent is gone: how long an orderly end may take."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What a person may choose about one peer; the run itself is in the recipe."""

    presence: Presence
    data: str | None
    device: str
    threads: int
    json: bool
    wait_for: int
    stop_on_eof: bool


def start(options: WorkerOptions, make_recipe: Callable[[Recipe | None], Recipe]) -> int:
    """Begins a run, or brings back the one in the folder; returns the exit code.

    `make_recipe` gets the folder's recipe, or None in a new folder, and gives the one to train.
    """

    def open_swarm(folder: RunFolder, stop: threading.Event) -> Swarm:
        stored = folder.read_card()
        recipe = make_recipe(parse(json.loads(stored.document)) if stored else None)
        check_live(recipe)
        if recipe.topology == "syncer":
            raise UsageError("recipe: topology = 'syncer': its syncer begins the run, with 'gasloc syncer'")
        # whoever brings a run back may be the first: those it met before are looked for, and not insisted on
        cached = tuple(folder.read_peers())
        chosen = first_look(options.presence.peer_options(folder, cached_peers=cached), stop)
        return Swarm.start(recipe, chosen, run=stored.run if stored else None, stop=stop)

    return _run(options, open_swarm)


def join(options: WorkerOptions) -> int:
    """Joins the run that the initial peers train, or the folder's; returns the exit code."""

    def open_swarm(folder: RunFolder, stop: threading.Event) -> Swarm:
        stored = folder.read_card()
        expected = RunCard(stored.run, stored.digest, stored.document) if stored else None
        cached = tuple(folder.read_peers())
        initial = options.presence.initial_peers or cached
        chosen = options.presence.peer_options(folder, initial_peers=initial, cached_peers=cached)
        swarm = Swarm.join(first_look(chosen, stop), expected=expected, stop=stop)
        try:
            check_live(swarm.recipe)
        except BaseException:
            swarm.close()
            raise
        return swarm

    return _run(options, open_swarm)


def check_live(recipe: Recipe) -> None:
    """Raises `UsageError` for what the recipe asks for and real peers do not do; it is never ignored.

    `RecipeError` for a recipe whose peers would drift apart.
    """
    if recipe.topology in SIMULATED_ONLY:
        raise UsageError(f"recipe: topology = '{recipe.topology}': real peers do not run it; choose another topology")
    if recipe.outer.rule != "gasloc":
        raise UsageError(f"recipe: outer.rule = '{recipe.outer.rule}': real peers do 'gasloc' only")
    verdict, reason = consensus(recipe)
    if verdict is Verdict.REFUSE:
        raise RecipeError(f"recipe: outer: {reason}")


def _run(options: WorkerOptions, open_swarm: Callable[[RunFolder, threading.Event], Swarm]) -> int:
    with Stop() as stop, contextlib.closing(RunFolder(options.presence.folder)) as folder:
        if options.stop_on_eof:
            threading.Thread(target=stop_at_eof, args=(stop,), daemon=True, name="stdin").start()
        with reporting(folder, as_json=options.json) as events:
            try:
                _train(options, folder, events, stop, open_swarm)
            except concurrent.futures.CancelledError:
                events.emit(Stopped(reason="told to stop before training began", round=0, step=0))
            except (GaslocError, PeersError) as error:
                events.emit(Failed(str(error)))
                raise
    return 0


def _train(
    options: WorkerOptions,
    folder: RunFolder,
    events: EventLog,
    stop: Stop,
    open_swarm: Callable[[RunFolder, threading.Event], Swarm],
) -> None:
    if options.threads:
        torch.set_num_threads(options.threads)
    device = inner.pick_device(options.device)
    with open_swarm(folder, stop.event) as swarm:
        stop.on_second = swarm.abandon
        swarm.company.on_left_out = lambda line: events.emit(Warned(line))
        swarm.on_download = lambda progress: events.emit(downloading(progress))
        recipe, card = swarm.recipe, swarm.card
        folder.write_card(StoredCard(run=card.run, digest=card.digest, document=card.document))
        for warning in swarm.warnings:
            events.emit(Warned(warning))
        verdict, reason = consensus(recipe)
        if verdict is Verdict.WARN:
            events.emit(Warned(f"recipe: outer: {reason}"))
        trainer = Trainer(
            recipe,
            corpus.load(options.data or recipe.data),
            peer_id=swarm.me,
            folder=folder.path,
            device=device,
            emit=events.emit,
            stop=stop.event,
            swarm=swarm,
        )
        entered = swarm.enter(trainer.optimizer)
        events.emit(
            Listening(
                peer=swarm.me,
                addresses=tuple(swarm.addresses),
                join=join_command(swarm.addresses, options.presence.secret_file),
                local_only=swarm.local_only,
            )
        )
        events.emit(
            Joined(
                round=entered.round,
                members=entered.members,
                source=entered.source,
                reason=entered.reason,
                size_bytes=entered.size_bytes,
                seconds=entered.seconds,
            )
        )
        events.emit(
            RunStarted(
                peer=swarm.me,
                run=card.run,
                recipe=recipe.name,
                digest=card.digest,
                rounds=recipe.rounds,
                round=trainer.optimizer.round,
                step=trainer.step,
                resumed=trainer.resumed,
                parameters=trainer.parameter_count,
                device=str(device),
                threads=torch.get_num_threads(),
                pid=os.getpid(),
                folder=str(folder.path),
            )
        )
        _keep_peers(folder, options, swarm)
        if options.wait_for > 1:
            seen = swarm.wait_for(options.wait_for)
            if seen < options.wait_for and not stop.event.is_set():
                events.emit(Warned(f"{seen} of {options.wait_for} peers are here; training without the rest"))
        trainer.run()
        _keep_peers(folder, options, swarm)


def downloading(progress: Progress) -> Downloading:
    """The event that tells how far a download is."""
    return Downloading(
        round=progress.round,
        done_bytes=progress.done_bytes,
        total_bytes=progress.total_bytes,
        bytes_per_s=progress.bytes_per_s,
        donors=progress.donors,
        note=progress.note,
    )


def _keep_peers(folder: RunFolder, options: WorkerOptions, swarm: Swarm) -> None:
    """Keeps where the swarm can be reached, for a `join --dir` without `--peers`."""
    others = [address for member in swarm.company.others().values() for address in member.addresses]
    addresses = list(dict.fromkeys([*others, *options.presence.initial_peers]))
    if addresses:
        folder.write_peers(addresses[:64])


@contextlib.contextmanager
def reporting(folder: RunFolder, *, as_json: bool) -> Iterator[EventLog]:
    """The event log, with whoever watches it."""
    events = EventLog(folder.events_path, echo=sys.stdout if as_json else None)
    view: LiveView | PlainView | None = None
    if not as_json:
        view = LiveView(Console()) if sys.stdout.isatty() else PlainView(typer.echo)
        events.listen(view.show)
    try:
        yield events
    finally:
        if view is not None:
            view.close()
        events.close()


def stop_at_eof(stop: Stop) -> None:
    """Stops in good order when standard input ends: whoever started us is gone."""
    # not through sys.stdin: a thread that sits in its buffer cannot be left behind when Python ends
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    stop.tell()
    time.sleep(EOF_STOP_S)
    stop.exit_now()
