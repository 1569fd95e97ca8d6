"""The syncer's process: folder, network, merging, checkpoints, goodbye. What `gasloc syncer` runs. CPU only."""

import concurrent.futures
import contextlib
import json
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from gasloc import checkpoint, model
from gasloc.errors import CheckpointError, GaslocError, UsageError
from gasloc.events import (
    CheckpointSaved,
    EventLog,
    Failed,
    Finished,
    Listening,
    Merge,
    RunStarted,
    Stopped,
    Warned,
)
from gasloc.first_look import first_look
from gasloc.presence import Presence, join_command
from gasloc.recipe import Recipe, parse
from gasloc.replica import Replica
from gasloc.run_folder import RunFolder, StoredCard, write_whole
from gasloc.stop import Stop
from gasloc.syncer import Merged, Syncer
from gasloc.worker import check_live, reporting, stop_at_eof
from peers.errors import DaemonError, PeersError
from peers.exchange import PeerId
from peers.membership import MemberState, Status
from peers.node import Peer, RunCard, Snapshot
from peers.thread import NetworkThread

CHECKPOINT_INTERVAL_S = 10.0
CHECKPOINT_SHARE = 0.05
"""Share of the time that may go into checkpoints: the interval grows with the model."""
PORT_PATIENCE_S = 20.0
"""How long the p2pd of a syncer that was killed may keep its port."""
_POLL_S = 0.2
_KEPT_PEERS = 64


@dataclass(frozen=True, slots=True)
class SyncerPeerOptions:
    """What a person may choose about a syncer; the run itself is in the recipe."""

    presence: Presence
    threads: int
    json: bool
    stop_on_eof: bool


def run(options: SyncerPeerOptions, make_recipe: Callable[[Recipe | None], Recipe]) -> int:
    """Begins a run, or brings back the syncer of the folder's; returns the exit code.

    `make_recipe` gets the folder's recipe, or None in a new folder, and gives the one to train. Ends when the
    last round is merged and no learner is left, or when told to stop; a checkpoint is saved in either case.
    """
    with Stop() as stop, contextlib.closing(RunFolder(options.presence.folder)) as folder:
        if options.stop_on_eof:
            threading.Thread(target=stop_at_eof, args=(stop,), daemon=True, name="stdin").start()
        with reporting(folder, as_json=options.json) as events:
            try:
                _serve(options, folder, events, stop, make_recipe)
            except concurrent.futures.CancelledError:
                events.emit(Stopped(reason="told to stop before a learner came", round=0, step=0))
            except (GaslocError, PeersError) as error:
                events.emit(Failed(str(error)))
                raise
    return 0


def _serve(
    options: SyncerPeerOptions,
    folder: RunFolder,
    events: EventLog,
    stop: Stop,
    make_recipe: Callable[[Recipe | None], Recipe],
) -> None:
    stored = folder.read_card()
    recipe = make_recipe(parse(json.loads(stored.document)) if stored else None)
    check_live(recipe)
    if recipe.topology != "syncer":
        raise UsageError(f"the folder's run has topology = '{recipe.topology}': go on with 'gasloc start --dir'")
    if options.threads:
        torch.set_num_threads(options.threads)
    card = RunCard(
        run=stored.run if stored else f"{recipe.name}-{secrets.token_hex(4)}",
        digest=recipe.digest,
        document=recipe.model_dump_json().encode(),
    )
    with contextlib.closing(NetworkThread()) as thread:
        peer = _start_peer(thread, options, folder, stop.event)
        stop.on_second = peer.abandon
        try:
            folder.write_card(StoredCard(run=card.run, digest=card.digest, document=card.document))
            _keep_port(folder, peer)
            _SyncerPeer(recipe, card, folder, events, stop.event, thread, peer, options.presence.secret_file).run()
        finally:
            thread.call(peer.close())


class _SyncerPeer:
    """A syncer among its learners."""

    def __init__(
        self,
        recipe: Recipe,
        card: RunCard,
        folder: RunFolder,
        events: EventLog,
        stop: threading.Event,
        thread: NetworkThread,
        peer: Peer,
        secret_file: Path | None,
    ) -> None:
        self._recipe = recipe
        self._secret_file = secret_file
        self._card = card
        self._folder = folder
        self._events = events
        self._stop = stop
        self._thread = thread
        self._peer = peer
        self._merged: queue.SimpleQueue[Merged] = queue.SimpleQueue()
        self._started = self._saved = time.monotonic()
        self._interval_s = CHECKPOINT_INTERVAL_S
        self._unsaved = True
        self._save_trouble = ""
        """Why the last checkpoint could not be written, as told."""
        self._last_merged = False
        """Whether the last fragment of the last round is merged."""
        self._tokens = 0.0
        """Trained on by all learners, as far as it was merged."""
        self._kept: list[str] = []
        decoder = model.build(recipe.model, recipe.seed)
        replica = Replica(decoder)
        self._buffers = {f"buffer/{name}": tensor for name, tensor in replica.buffers().items()}
        self._syncer = Syncer(
            recipe,
            replica.parameters(),
            embeddings=embeddings(decoder),
            learners=self._learners,
            on_merge=self._merged.put,
        )

    def run(self) -> None:
        """Merges until the run is over or we are told to stop."""
        resumed = self._resume()
        told = self._syncer.round
        thread, peer = self._thread, self._peer
        thread.call(peer.enter(self._card, self._provide, codec=self._recipe.exchange.codec), stop=self._stop)
        thread.call(peer.courier.serve(self._syncer.layout, self._syncer.handle), stop=self._stop)
        thread.call(peer.membership.publish(Status(told, MemberState.MERGING)), stop=self._stop)
        self._announce(resumed)
        self._save_if_possible()
        try:
            while not self._stop.is_set() and not self._is_over():
                self._tell_merges(timeout_s=_POLL_S)
                if self._syncer.round != told:
                    told = self._syncer.round
                    thread.call(peer.membership.publish(Status(told, MemberState.MERGING)), stop=self._stop)
                if self._unsaved and time.monotonic() - self._saved > self._interval_s:
                    self._save_if_possible()
                self._keep_peers()
                for notice in peer.take_notices():
                    self._events.emit(Warned(notice))
        except concurrent.futures.CancelledError:
            pass  # told to stop while the network was asked; the end is the same
        finally:
            thread.call(self._syncer.close())
            self._tell_merges()
            self._save()
        self._end()

    def _learners(self) -> list[PeerId]:
        """Those that train, or are about to; on the network thread.

        One that is joining only matters while there are fewer learners than the quorum: then it is waited for.
        """
        return [
            peer
            for peer, member in self._peer.membership.members().items()
            if peer != self._peer.peer_id
            and member.digest == self._card.digest
            and self._peer.objection(member) is None
        ]

    def _provide(self) -> Snapshot:
        round, tensors = self._syncer.snapshot()
        return Snapshot(round=round, meta={}, tensors=tensors | self._buffers)

    def _announce(self, resumed: bool) -> None:
        recipe, peer, syncer = self._recipe, self._peer, self._syncer
        for warning in peer.warnings:
            self._events.emit(Warned(warning))
        if syncer.imbalance > 1.5:
            self._events.emit(
                Warned(
                    f"fragments = {recipe.fragments}: the largest has {syncer.imbalance:.1f} times the mean size, "
                    "so traffic is uneven; fewer fragments are more even"
                )
            )
        self._events.emit(
            Listening(
                peer=peer.peer_id,
                addresses=tuple(peer.addresses),
                join=join_command(peer.addresses, self._secret_file),
                local_only=peer.local_only,
            )
        )
        self._events.emit(
            RunStarted(
                peer=peer.peer_id,
                run=self._card.run,
                recipe=recipe.name,
                digest=self._card.digest,
                rounds=recipe.rounds,
                round=syncer.round,
                step=0,
                resumed=resumed,
                parameters=model.parameter_count(recipe.model),
                device="cpu",
                threads=torch.get_num_threads(),
                pid=os.getpid(),
                folder=str(self._folder.path),
            )
        )

    def _tell_merges(self, timeout_s: float = 0.0) -> None:
        """Reports what was merged; waits up to `timeout_s` for the first."""
        with contextlib.suppress(queue.Empty):
            merged = self._merged.get(timeout=timeout_s) if timeout_s else self._merged.get_nowait()
            while True:
                self._unsaved = True
                self._tokens += merged.tokens if merged.fragment == 0 else 0.0
                self._last_merged |= merged.fragment == 0 and merged.round >= self._recipe.rounds - 1
                self._events.emit(
                    Merge(
                        fragment=merged.fragment,
                        version=merged.version,
                        round=merged.round,
                        learners=merged.learners,
                        shares=tuple(merged.shares[learner] for learner in merged.learners),
                        tokens=merged.tokens,
                        live=merged.live,
                        waited_s=merged.waited_s,
                        merge_s=merged.merge_s,
                        norm=merged.norm,
                        reason=merged.reason,
                    )
                )
                merged = self._merged.get_nowait()

    def _is_over(self) -> bool:
        """The last round is merged, and every learner has left."""
        others = self._peer.membership.members().keys() - {self._peer.peer_id}
        return self._last_merged and not others

    def _keep_peers(self) -> None:
        """Keeps where the learners can be reached, so that a restart finds them whatever became of their DHT."""
        members = self._peer.membership.members()
        addresses = sorted(
            address for peer, member in members.items() if peer != self._peer.peer_id for address in member.addresses
        )
        if addresses and addresses != self._kept:
            self._kept = addresses
            self._folder.write_peers(addresses[:_KEPT_PEERS])

    def _save_if_possible(self) -> None:
        """Saves; where that fails, as on a full disk, it is told once and tried again after the usual time."""
        try:
            self._save()
            self._save_trouble = ""
        except CheckpointError as error:
            self._saved = time.monotonic()
            self._unsaved = True
            if str(error) != self._save_trouble:
                self._save_trouble = str(error)
                self._events.emit(Warned(f"{error}; merging goes on, tried again every {self._interval_s:g} s"))

    def _save(self) -> None:
        started = time.monotonic()
        state = self._syncer.state_dict()
        self._unsaved = False
        meta = {
            "digest": self._recipe.digest,
            "syncer": state["meta"],
            "last_merged": self._last_merged,
            "tokens": self._tokens,
        }
        path = checkpoint.save(self._folder.checkpoints_path, state["tensors"], meta)
        self._saved = time.monotonic()
        seconds = self._saved - started
        self._interval_s = max(CHECKPOINT_INTERVAL_S, seconds / CHECKPOINT_SHARE)
        # what was saved: learners' reports may have moved the round on while it was written
        saved_round = int(state["meta"]["round"])
        self._events.emit(CheckpointSaved(path=str(path), round=saved_round, step=0, seconds=seconds))

    def _resume(self) -> bool:
        found = checkpoint.load_latest(self._folder.checkpoints_path, digest=self._recipe.digest)
        if found is None:
            return False
        for reason in found.skipped:
            self._events.emit(Warned(f"a newer checkpoint is not whole and was passed over: {reason}"))
        if "syncer" not in found.meta:
            raise CheckpointError(f"checkpoint '{found.path}' is a learner's, not a syncer's; choose another --dir")
        self._syncer.load_state_dict({"meta": found.meta["syncer"], "tensors": found.tensors})
        self._last_merged, self._tokens = bool(found.meta["last_merged"]), float(found.meta["tokens"])
        return True

    def _end(self) -> None:
        if not self._is_over():
            self._events.emit(Stopped(reason="told to stop", round=self._syncer.round, step=0))
            return
        _, tensors = self._syncer.snapshot()
        theta = {name.removeprefix("anchor/"): t for name, t in tensors.items() if name.startswith("anchor/")}
        content = safetensors.torch.save(theta, {"recipe": self._recipe.model_dump_json()})
        write_whole(self._folder.model_path, content)
        self._events.emit(
            Finished(
                round=self._syncer.round + 1,
                step=0,
                tokens=round(self._tokens),
                model=str(self._folder.model_path),
                seconds=time.monotonic() - self._started,
            )
        )


def embeddings(decoder: nn.Module) -> list[str]:
    """The names of embedding tensors, which are averaged plainly; tied ones under their first name."""
    held = {id(module.weight) for module in decoder.modules() if isinstance(module, nn.Embedding)}
    return [name for name, parameter in decoder.named_parameters() if id(parameter) in held]


def _start_peer(thread: NetworkThread, options: SyncerPeerOptions, folder: RunFolder, stop: threading.Event) -> Peer:
    """Starts the peer at the folder's port, where learners look for it, and joins those that are still there.

    The port of a syncer that was killed is waited for; where no learner of the last time answers, the syncer
    begins alone and is found by those that come back.
    """
    presence = options.presence
    port = presence.port or _kept_port(folder)
    deadline = time.monotonic() + (PORT_PATIENCE_S if port and not presence.port else 0.0)
    chosen = replace(presence.peer_options(folder, cached_peers=tuple(folder.read_peers())), port=port)
    while True:
        try:
            return thread.call(Peer.start(first_look(chosen, stop)), stop=stop)
        except DaemonError:
            if time.monotonic() > deadline:
                raise
            if stop.wait(_POLL_S):
                raise concurrent.futures.CancelledError from None


def _keep_port(folder: RunFolder, peer: Peer) -> None:
    for address in peer.addresses:
        _, found, rest = address.partition("/tcp/")
        if found:
            write_whole(folder.path / "port", f"{int(rest.partition('/')[0])}\n".encode())
            return


def _kept_port(folder: RunFolder) -> int:
    try:
        return int((folder.path / "port").read_text())
    except (OSError, ValueError):
        return 0
