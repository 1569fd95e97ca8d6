"""`Swarm`: the other members of a run, as the training thread sees them. Synchronous, over `peers`.

with Swarm.join(PeerOptions(identity_path=Path("me.key"), initial_peers=("/ip4/...",))) as swarm:
    optimizer = GaslocOptimizer(inner, model, network=swarm, on_round=swarm.report, ...)
    swarm.enter(optimizer)      # takes over the swarm's state, serves ours
    ...                         # loss.backward(); optimizer.step()
"""

import concurrent.futures
import contextlib
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

from gasloc import entry, pacing, rounds
from gasloc.card import read_card
from gasloc.company import Company
from gasloc.confirmation import Opinion
from gasloc.delivery import Reporter
from gasloc.entry import Entry, Replica, Source
from gasloc.errors import RunError
from gasloc.learner import Delivery, Report
from gasloc.optimizer import RoundResult
from gasloc.pacer import Pacer
from gasloc.recipe import Recipe
from peers.donor import Snapshot
from peers.download import Progress
from peers.exchange import Answer, Offer, PeerId, Slot, Swap, Tensors
from peers.membership import MemberState, Status
from peers.node import Peer, PeerOptions, RunCard
from peers.record import MAX_PARTNERS
from peers.thread import NetworkThread

T = TypeVar("T")

DONORS_ASKED = 4
"""Where replicas are equal, so many are asked for the state, so that each gives a part of it."""
STATE_SIZES = 8
"""A donor's state is refused that is so many times as large as ours: an outer optimizer may hold twice the model."""
_STATE_MARGIN_BYTES = 64 * 1024**2
MEMBERS_TIMEOUT_S = 15.0
"""How long a newcomer looks for a member's record, or waits for one that is about to train."""
START_WAIT_S = 60.0
"""How long `wait_for` waits."""


class Swarm:
    """One peer's place in a run; the `Network` of a `GaslocOptimizer`, and a learner's `SyncerLink`.

    Every call is made from the training thread and blocks it; `swap` and `swap_any` may be made from another, one at
    a time. When `stop` is set, a call that waits gives up at once: `swap` answers `stopped`, the others raise
    `concurrent.futures.CancelledError`.
    """

    def __init__(
        self, thread: NetworkThread, peer: Peer, card: RunCard, recipe: Recipe, stop: threading.Event, *, first: bool
    ) -> None:
        """Use `start` or `join`."""
        self.recipe = recipe
        self.card = card
        self.company = Company(peer, digest=card.digest, stale_rounds=recipe.stale_rounds)
        """The others: with whom this peer deals, and who is set aside."""
        self._pacer = Pacer(recipe, self.company, peer.peer_id)
        self.on_exchange: Callable[[Slot, tuple[PeerId, ...]], None] | None = None
        """Called before each exchange with its slot and its partners."""
        self.on_download: Callable[[Progress], None] | None = None
        """Called about once a second while the swarm's state is downloaded."""
        self._thread = thread
        self._peer = peer
        self._stop = stop
        self._first = first
        self._replica: Replica | None = None
        self._serving = False
        self._publishing: concurrent.futures.Future[None] | None = None
        self._round_started = time.monotonic()
        self._earned = 0
        """The round that our parameters belong to: a jump to the others' round does not make them newer."""
        self._stale = False
        """We are too far behind to mix, and nobody could give us the swarm's state yet."""
        self._partners: tuple[PeerId, ...] = ()
        self._status = Status(round=0, state=MemberState.JOINING)
        self._reporter = Reporter(thread, lambda: peer.courier, self.company.syncer, stop)

    @classmethod
    def start(
        cls, recipe: Recipe, options: PeerOptions, *, run: str | None = None, stop: threading.Event | None = None
    ) -> Self:
        """Begins a run, or goes on with the one named `run` as the first peer to come back.

        Raises an error of `peers.errors` where p2pd does not start or no address in `options` answers; nothing
        is left running then.
        """
        stop = stop or threading.Event()
        run = run or f"{recipe.name}-{secrets.token_hex(4)}"
        card = RunCard(run=run, digest=recipe.digest, document=recipe.model_dump_json().encode())
        thread = NetworkThread()
        try:
            peer = thread.call(Peer.start(options), stop=stop)
        except BaseException:
            thread.close()
            raise
        return cls(thread, peer, card, recipe, stop, first=True)

    @classmethod
    def join(
        cls, options: PeerOptions, *, expected: RunCard | None = None, stop: threading.Event | None = None
    ) -> Self:
        """Joins the run of the peers in `options`; the recipe comes from them.

        Raises an error of `peers.errors` where none of them answers, and `RunError` where their recipe is not
        what its digest says, or not of the run that `expected` names; nothing is left running then.
        """
        stop = stop or threading.Event()
        thread = NetworkThread()
        try:
            peer = thread.call(Peer.start(options), stop=stop)
            try:
                card = thread.call(peer.fetch_card(), stop=stop)
                recipe = read_card(card, expected)
            except BaseException:
                thread.call(peer.close())
                raise
        except BaseException:
            thread.close()
            raise
        return cls(thread, peer, card, recipe, stop, first=False)

    @property
    def me(self) -> PeerId:
        return self._peer.peer_id

    @property
    def addresses(self) -> list[str]:
        """Full multiaddresses at which others can dial us, best first."""
        return self._peer.addresses

    @property
    def local_only(self) -> bool:
        """Whether only this machine can dial us."""
        return self._peer.local_only

    @property
    def warnings(self) -> list[str]:
        """What went wrong at the start and did not matter, such as a dead address beside a live one."""
        return self._peer.warnings

    def enter(self, replica: Replica) -> Entry:
        """Becomes a member: serves card and state, takes over the swarm's state where ours is too old.

        A newcomer never trains on fresh weights while others have trained: raises `NoDonorError` or `RunError`
        where their state cannot be had, and `ModelError` where the replica's tensors differ from theirs.
        """
        started = time.monotonic()
        self._replica = replica
        self._status = replace(self._status, round=replica.round)
        self._wait(self._peer.enter(self.card, self._provide, codec=self.recipe.exchange.codec))
        self._wait(self._peer.membership.publish(self._status))
        source, reason = self._decide(replica.round)
        size_bytes, self._earned = (
            self._download(replica, not_before=replica.round) if source is Source.DONOR else (0, replica.round)
        )
        self._serving = True
        self._status = replace(self._status, round=replica.round, state=MemberState.WAITING)
        self._wait(self._peer.membership.publish(self._status))
        self._round_started = time.monotonic()
        return Entry(
            source=source,
            reason=reason,
            round=replica.round,
            members=len(self._peer.membership.members()),
            size_bytes=size_bytes,
            seconds=time.monotonic() - started,
        )

    def wait_for(self, count: int) -> int:
        """Waits until `count` members are seen, this one included; returns how many are.

        For at most 60 s, and no longer than until `stop` is set.
        """
        with contextlib.suppress(concurrent.futures.CancelledError):
            return self._wait(self._peer.membership.wait_for(count, START_WAIT_S))
        return len(self._peer.membership.members())

    def members(self, round: int) -> set[PeerId]:
        """Those that may be paired in `round`, this peer included; see `Company.pairable`.

        Nobody else is while we are too far behind, and could not have the swarm's state yet: what is old is not
        averaged as new. Nor in rounds that our link makes us sit out (`gasloc.turns`).
        """
        alone = self._stale or not self._pacer.turns.has(round)
        return {self.me} if alone else self.company.pairable(round)

    def others_rounds(self) -> list[int]:
        """The rounds that the other training members published or answered last."""
        return self.company.rounds()

    def swap(self, slot: Slot, offers: Mapping[PeerId, Offer], *, timeout_s: float) -> dict[PeerId, Swap]:
        """Trades with every partner at once; see `peers.exchange.Exchange.swap`.

        A partner that could not be reached, froze or broke off is set aside until it publishes a newer record;
        one that is merely behind is not. Where `pace` had us begin early for a partner on a slow link, the others
        are waited for as much longer: that transfer takes as long.
        """
        if self.on_exchange is not None:
            self.on_exchange(slot, tuple(sorted(offers)))
        try:
            swap = self._peer.exchange.swap(slot, offers, timeout_s=timeout_s + self._pacer.early_s)
            swaps = self._thread.call(swap, stop=self._stop)
        except concurrent.futures.CancelledError:
            return {peer: Swap(Answer.STOPPED, "this peer was told to stop") for peer in offers}
        self.company.take_note(swaps)
        return swaps

    def swap_any(
        self, slot: Slot, candidates: Sequence[PeerId], offer: Offer, *, timeout_s: float
    ) -> dict[PeerId, Swap]:
        """Trades with one that is left over, too; see `peers.exchange.Exchange.swap_any`, and `swap`."""
        search = self._peer.exchange.swap_any(slot, candidates, offer, timeout_s=timeout_s)
        try:
            swaps = self._thread.call(search, stop=self._stop)
        except concurrent.futures.CancelledError:
            return {peer: Swap(Answer.STOPPED, "this peer was told to stop") for peer in candidates}
        self.company.take_note(swaps)
        return swaps

    def send(self, report: Report) -> "concurrent.futures.Future[Delivery]":
        """Sends a learner's fragment to the run's syncer; see `gasloc.learner.SyncerLink`."""
        return self._reporter.send(report)

    def await_merges(self, merges: "Sequence[concurrent.futures.Future[Delivery]]", *, timeout_s: float) -> None:
        """Blocks until all are done, the time is over, or `stop` is set."""
        self._reporter.await_merges(merges, timeout_s=timeout_s)

    def report(self, result: RoundResult) -> None:
        """Publishes the round that comes next, and takes the swarm's state where ours fell too far behind.

        For `GaslocOptimizer(on_round=...)` in a loop of one's own.
        """
        self.publish(result)
        self.catch_up()
        if self._replica is not None:
            self._replica.local_steps, _ = self.pace(self._replica.local_steps)

    def publish(
        self, result: RoundResult, *, tokens: int = 0, loss: float | None = None, seconds: float | None = None
    ) -> None:
        """Tells the others where we are after a round. Does not wait until they know.

        `seconds`: what the round took, exchange and all; None: since the last call, so that whatever else the
        training thread does between rounds counts as local steps.
        Raises what publishing the round before raised, such as `DaemonError` when p2pd has ended.
        """
        self.company.judge(result)
        self._earned = (self._earned if self._stale else result.round) + 1
        now = time.monotonic()
        took_s = now - self._round_started if seconds is None else seconds
        steps = result.local_steps if result.steps_since is None else result.steps_since
        step_s = max(took_s - result.waited_s, 0.0) / steps if steps else math.nan
        self._round_started = now
        if result.partners:
            self._partners = result.partners
        step_time_s = pacing.smooth(self._status.step_time_s, step_s)
        exchange_time_s, turns = self._pacer.count_round(replace(self._status, step_time_s=step_time_s), result)
        self._status = Status(
            round=result.next_round,
            state=MemberState.TRAINING,
            step_time_s=step_time_s,
            exchange_time_s=exchange_time_s,
            tokens=tokens,
            local_steps=result.local_steps,
            loss=loss,
            partners=self._partners[:MAX_PARTNERS],
            trade_every=turns.every,
            trade_round=turns.round,
        )
        self._send_status()

    def pace(self, previous: int) -> tuple[int, str]:
        """How many local steps this peer takes in the coming round, and why; `previous` is what it took last."""
        return self._pacer.local_steps(self._status, previous)

    def train(self) -> None:
        """Tells the others that the first local step comes now."""
        self._status = replace(self._status, state=MemberState.TRAINING)
        self._round_started = time.monotonic()
        self._send_status()

    def catch_up(self) -> Entry | None:
        """Downloads the swarm's state if the others are more than `stale_rounds` away; None if they are not.

        That is, ahead by their median, or most of them behind: see `rounds.is_stale` and `rounds.is_far_ahead`.

        A learner also does where the syncer refused its report as too old, and a newcomer where most of its partners
        are far away from what its donor gave it (`gasloc.confirmation`).

        Raises `NoDonorError` where nobody could give it; the replica is unchanged then, and mixes with nobody until
        this succeeds, or the others are no longer so far ahead.
        """
        replica = self._replica
        assert replica is not None, "enter comes first"
        mine, others, limit = min(replica.round, self._earned), self.others_rounds(), self.recipe.stale_rounds
        stale, reason = rounds.is_stale(mine, others, limit)
        ahead, why_ahead = rounds.is_far_ahead(replica.round, self.company.rounds_apart(replica.round), limit)
        self._stale = stale
        refused = self._reporter.take_behind()
        opinion, why = self.company.confirmation.conclude()
        not_before = replica.round
        if refused is not None:
            reason = refused
        elif opinion is Opinion.APART:
            reason = why
        elif ahead and self.recipe.topology != "syncer":
            reason, not_before = why_ahead, 0
        elif not stale:
            return None
        started = time.monotonic()
        size_bytes, self._earned = self._download(replica, not_before=not_before)
        self._stale, _ = rounds.is_stale(self._earned, self.others_rounds(), self.recipe.stale_rounds)
        self._status = replace(self._status, round=replica.round)
        self._send_status()
        members = len(self._peer.membership.members())
        return Entry(Source.DONOR, reason, self._earned, members, size_bytes, time.monotonic() - started)

    def take_notices(self) -> list[str]:
        """What happened to p2pd and to time since this was last asked, a line each: p2pd ended and runs again, this
        machine slept, its clock was set. After any of it, see whether to `catch_up`.

        Raises `DaemonError` once p2pd is gone for good.
        """
        return self._peer.take_notices()

    def abandon(self) -> None:
        """Kills p2pd without a goodbye; for a process that exits at once. Safe in a signal handler."""
        self._peer.abandon()

    def close(self) -> None:
        """Says goodbye and stops p2pd. Bounded; safe to call twice."""
        try:
            self._thread.call(self._peer.close())
        finally:
            self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _decide(self, mine: int) -> tuple[Source, str]:
        """Where this peer's state comes from; looks again for a while when others are about to train."""
        deadline = time.monotonic() + MEMBERS_TIMEOUT_S
        while True:
            with contextlib.suppress(TimeoutError):
                self._wait(self._peer.membership.refresh())
            others = [member.status for member in self.company.others().values()]
            source, reason = entry.decide(mine, others, first=self._first, stale_rounds=self.recipe.stale_rounds)
            if source is not Source.WAIT:
                return source, reason
            if time.monotonic() > deadline:
                raise RunError(f"cannot join run '{self.card.run}': {reason}; try again when its members train")
            if self._stop.wait(0.3):
                raise concurrent.futures.CancelledError

    def _download(self, replica: Replica, *, not_before: int) -> tuple[int, int]:
        """Takes over the state of donors; returns its size in bytes and its round.

        The replica's round becomes that of the state, or `not_before`: slots of earlier rounds are used up.
        """
        told = queue.SimpleQueue[Progress]()

        def tell() -> None:
            while not told.empty():
                progress = told.get()
                if self.on_download is not None:
                    self.on_download(progress)

        others = self.others_rounds()
        fetch = self._peer.fetch_state(
            without=self.company.confirmation.doubtful() if self.company.in_doubt() else (),
            least_round=rounds.least_fresh(others, self.recipe.stale_rounds),
            latest_round=rounds.latest_in_step(others, self.recipe.stale_rounds),
            ask=DONORS_ASKED if self.recipe.topology in ("all-to-all", "syncer") else 1,
            limit_bytes=STATE_SIZES * size_of(replica.snapshot()[1]) + _STATE_MARGIN_BYTES,
            on_progress=told.put,
        )
        try:
            snapshot = self._thread.call(fetch, stop=self._stop, meanwhile=tell)
        finally:
            tell()
        before = replica.round
        replica.load_snapshot(max(snapshot.round, not_before), snapshot.tensors)
        if replica.round < before:
            self._wait(self._peer.exchange.step_back())
        if self.recipe.topology != "syncer":
            self.company.begin_anew(snapshot.donors)
        return size_of(snapshot.tensors), snapshot.round

    def _provide(self) -> Snapshot | None:
        """Our state for a newcomer; None while we have none that is sound. Called on a network worker thread."""
        if self._replica is None or not self._serving or self.company.in_doubt():
            return None
        round, tensors = self._replica.snapshot()
        return Snapshot(round=round, meta={}, tensors=tensors)

    def _send_status(self) -> None:
        if self._publishing is not None and self._publishing.done():
            self._publishing.result()
        self._publishing = self._thread.spawn(self._peer.membership.publish(self._status))

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._thread.call(coroutine, stop=self._stop)


def size_of(tensors: Tensors) -> int:
    """Bytes of all tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
