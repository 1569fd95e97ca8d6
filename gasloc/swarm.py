"""`Swarm`: the other members of a run, as the training thread sees them. Synchronous, over `peers`.

with Swarm.join(PeerOptions(identity_path=Path("me.key"), initial_peers=("/ip4/...",))) as swarm:
    optimizer = GaslocOptimizer(inner, model, network=swarm, on_round=swarm.report, ...)
    swarm.enter(optimizer)      # takes over the swarm's state, serves ours
    ...                         # loss.backward(); optimizer.step()
"""

import concurrent.futures
import contextlib
import json
import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from torch import Tensor

from gasloc import entry, overlap, pacing, rounds
from gasloc.delivery import Reporter
from gasloc.entry import Source
from gasloc.errors import GaslocError, RunError
from gasloc.learner import Delivery, Report
from gasloc.offences import Offences, SetAside
from gasloc.optimizer import RoundResult
from gasloc.recipe import Recipe, parse
from peers.donor import Snapshot
from peers.download import Progress
from peers.errors import UnreachableError
from peers.exchange import Answer, Offer, PeerId, Slot, Swap, Tensors
from peers.membership import Member, MemberState, Status
from peers.node import Peer, PeerOptions, RunCard
from peers.reachability import standing_of, tradable
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
MOST_STEPS = 4
"""A fast peer takes at most this many times the recipe's local steps in a round."""
MOST_LEFT_OUT = 64
"""Members that are not dealt with are told one by one up to so many: ids cost a stranger nothing."""

FAR_EXCESS = 10.0
"""A partner that was clipped from so many radii counts as one that errs."""

_SILENT = frozenset({Answer.UNREACHABLE, Answer.TIMEOUT, Answer.BROKEN})


class Replica(Protocol):
    """What a swarm needs of an optimizer; `gasloc.GaslocOptimizer` is one."""

    local_steps: int

    @property
    def round(self) -> int: ...

    def snapshot(self) -> tuple[int, dict[str, Tensor]]: ...

    def load_snapshot(self, round: int, tensors: Tensors) -> None: ...


@dataclass(frozen=True, slots=True)
class Entry:
    """How a peer came into the swarm, or caught up with it."""

    source: Source
    reason: str
    round: int
    members: int
    """Members seen, this one included."""
    size_bytes: int
    seconds: float


class Swarm:
    """One peer's place in a run; the `Network` of a `GaslocOptimizer`, and a learner's `SyncerLink`.

    Every call is made from the training thread and blocks it; `swap` and `swap_any` may be made from another, one at
    a time. When `stop` is set, a call that waits gives up at
    once: `swap` answers `stopped`, the others raise `concurrent.futures.CancelledError`.

    Members that count for pairing have this run's recipe, are training or waiting, and are at most
    `stale_rounds` rounds away: one further behind takes fresh state before it mixes again.
    """

    def __init__(
        self, thread: NetworkThread, peer: Peer, card: RunCard, recipe: Recipe, stop: threading.Event, *, first: bool
    ) -> None:
        """Use `start` or `join`."""
        self.recipe = recipe
        self.card = card
        self.on_exchange: Callable[[Slot, tuple[PeerId, ...]], None] | None = None
        """Called before each exchange with its slot and its partners."""
        self.on_left_out: Callable[[str], None] | None = None
        """Called once for each member that is not dealt with, with the reason in words."""
        self.on_download: Callable[[Progress], None] | None = None
        """Called about once a second while the swarm's state is downloaded."""
        self._left_out: set[PeerId] = set()
        self._unpaired: set[PeerId] = set()
        """Those that we cannot trade with, as neither they nor we can be dialled."""
        self.on_set_aside: Callable[[PeerId, SetAside], None] | None = None
        """Called when a peer that erred again is left alone for a while."""
        self._offences = Offences()
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
        self._heard: dict[PeerId, int] = {}
        """The rounds that partners answered last."""
        self._partners: tuple[PeerId, ...] = ()
        self._early_s = 0.0
        """How much sooner than the others we are to trade this round, as a partner's link is slow: it waits for us."""
        self._status = Status(round=0, state=MemberState.JOINING)
        self._reporter = Reporter(thread, lambda: peer.courier, self._syncer, stop)

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
        size_bytes = self._download(replica) if source is Source.DONOR else 0
        self._serving = True
        self._earned = replica.round
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

    def others(self) -> dict[PeerId, Member]:
        """The other members of this run that are alive and that we deal with, whatever their state."""
        return {
            peer: member
            for peer, member in self._peer.membership.members().items()
            if peer != self.me and not self._leaves_out(member) and member.digest == self.card.digest
        }

    def members(self, round: int) -> set[PeerId]:
        """Those that may be paired in `round`, this peer included.

        Two that cannot be dialled are not, unless relays carry both; `on_left_out` is told why. Nobody is while we
        are too far behind, and could not have the swarm's state yet: what is old is not averaged as new.
        """
        if self._stale:
            return {self.me}
        barred = self._offences.barred(time.monotonic())
        near = {
            peer: standing_of(member)
            for peer, member in self._training().items()
            if abs(member.status.round - round) <= self.recipe.stale_rounds and peer not in barred
        }
        can, why_not = tradable(self._peer.standing, near)
        for peer in sorted(why_not.keys() - self._unpaired)[:MOST_LEFT_OUT]:
            if self.on_left_out is not None:
                self.on_left_out(f"not paired with {peer}: {why_not[peer]}")
        self._unpaired = set(why_not)
        return can | {self.me}

    def others_rounds(self) -> list[int]:
        """The rounds that the other training members published or answered last."""
        return [max(member.status.round, self._heard.get(peer, 0)) for peer, member in self._training().items()]

    def swap(self, slot: Slot, offers: Mapping[PeerId, Offer], *, timeout_s: float) -> dict[PeerId, Swap]:
        """Trades with every partner at once; see `peers.exchange.Exchange.swap`.

        A partner that could not be reached, froze or broke off is set aside until it publishes a newer record;
        one that is merely behind is not. Where `pace` had us begin early for a partner on a slow link, the others
        are waited for as much longer: that transfer takes as long.
        """
        if self.on_exchange is not None:
            self.on_exchange(slot, tuple(sorted(offers)))
        try:
            swap = self._peer.exchange.swap(slot, offers, timeout_s=timeout_s + self._early_s)
            swaps = self._thread.call(swap, stop=self._stop)
        except concurrent.futures.CancelledError:
            return {peer: Swap(Answer.STOPPED, "this peer was told to stop") for peer in offers}
        self._take_note(swaps)
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
        self._take_note(swaps)
        return swaps

    def _take_note(self, swaps: Mapping[PeerId, Swap]) -> None:
        for peer, swap in swaps.items():
            if swap.at_fault:
                self._count_offence(peer, swap.reason)
            if swap.answer in _SILENT:
                self._peer.membership.set_aside(peer, swap.reason)
            if swap.their_round is not None:
                # fresher than its record, which we look at once a second
                self._heard[peer] = swap.their_round

    def set_aside(self) -> dict[PeerId, SetAside]:
        """What is held against peers that erred, with counts and reasons; `until` by `time.monotonic`.

        Such a peer sent values that are not finite, tensors of another layout or garbled frames, or lay more than
        `FAR_EXCESS` radii away. The first time has no consequence; from the second on this peer does not pair
        with it, for 30 s and then twice as long each time (`gasloc.offences`). A clean trade takes one off.
        """
        return self._offences.standing()

    def rejected_records(self) -> int:
        """Members' records that were refused so far: junk, forged, too large, of another run."""
        return self._peer.rejected_records

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
        self._judge(result)
        self._earned = (self._earned if self._stale else result.round) + 1
        now = time.monotonic()
        took_s = now - self._round_started if seconds is None else seconds
        step_s = max(took_s - result.waited_s, 0.0) / result.local_steps
        self._round_started = now
        if result.partners:
            self._partners = result.partners
        self._status = Status(
            round=result.next_round,
            state=MemberState.TRAINING,
            step_time_s=pacing.smooth(self._status.step_time_s, step_s),
            exchange_time_s=pacing.smooth(
                self._status.exchange_time_s, overlap.unhidden_s(self._transfer_s(result), result.waited_s)
            ),
            tokens=tokens,
            local_steps=result.local_steps,
            loss=loss,
            partners=self._partners[:MAX_PARTNERS],
        )
        self._send_status()

    def pace(self, previous: int) -> tuple[int, str]:
        """How many local steps this peer takes in the coming round, and why; `previous` is what it took last.

        See `gasloc.pacing`. The recipe's number where it says no to pacing, or where nobody waits for anybody.
        """
        reference = self.recipe.local_steps
        if not self.recipe.pacing or self.recipe.topology in ("none", "syncer"):
            return reference, f"the recipe's {reference} steps: it has no pacing"
        training = self._training()
        statuses = {self.me: self._status, **{peer: member.status for peer, member in training.items()}}
        paces = {peer: pacing.Pace(status.step_time_s, status.exchange_time_s) for peer, status in statuses.items()}
        if self._pairs_once():
            round = self._status.round
            near = {peer: paces[peer] for peer in self.members(round) if peer in paces}
            paces |= pacing.beside_partners(near, self.recipe.topology, round=round, me=self.me, seed=self.recipe.seed)
        own = paces[self.me]
        self._early_s = max(own.exchange_time_s - self._status.exchange_time_s, 0.0) if own.known else 0.0
        return pacing.local_steps(own, list(paces.values()), reference, MOST_STEPS * reference, previous=previous)

    def _transfer_s(self, result: RoundResult) -> float:
        """Of transfers alone: the wait for a late partner must not make us look slow ourselves."""
        transfers_s = {peer: swap.seconds for peer, swap in result.swaps.items() if swap.answer is Answer.ACCEPT}
        if not self._pairs_once():
            return max(transfers_s.values(), default=math.nan)
        known = {peer: member.status.exchange_time_s for peer, member in self._training().items()}
        told = [(seconds, known.get(peer, math.nan)) for peer, seconds in transfers_s.items()]
        return pacing.own_transfer_s(self._status.exchange_time_s, told)

    def _pairs_once(self) -> bool:
        """Whether a round has one exchange, with a few partners: a transfer tells then which side was slow."""
        return self.recipe.topology != "all-to-all" and self.recipe.mixes == 1 and self.recipe.fragments == 1

    def train(self) -> None:
        """Tells the others that the first local step comes now."""
        self._status = replace(self._status, state=MemberState.TRAINING)
        self._round_started = time.monotonic()
        self._send_status()

    def catch_up(self) -> Entry | None:
        """Downloads the swarm's state if the others are more than `stale_rounds` ahead; None if they are not.

        A learner also does where the syncer refused its report as too old.

        Raises `NoDonorError` where nobody could give it; the replica is unchanged then, and mixes with nobody until
        this succeeds, or the others are no longer so far ahead.
        """
        replica = self._replica
        assert replica is not None, "enter comes first"
        mine = min(replica.round, self._earned)
        stale, reason = rounds.is_stale(mine, self.others_rounds(), self.recipe.stale_rounds)
        self._stale = stale
        refused = self._reporter.take_behind()
        if refused is not None:
            reason = refused
        elif not stale:
            return None
        started = time.monotonic()
        size_bytes = self._download(replica)
        self._earned, self._stale = replica.round, False
        self._status = replace(self._status, round=replica.round)
        self._send_status()
        members = len(self._peer.membership.members())
        return Entry(Source.DONOR, reason, replica.round, members, size_bytes, time.monotonic() - started)

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

    def _judge(self, result: RoundResult) -> None:
        for peer in result.partners:
            excess = result.clipped.get(peer, 0.0)
            if excess > FAR_EXCESS:
                self._count_offence(peer, f"its parameters were {excess:.3g} times the radius away from ours")
            else:
                self._offences.forgive(peer)

    def _count_offence(self, peer: PeerId, what: str) -> None:
        now = time.monotonic()
        if peer in self._offences.barred(now):  # known, and not asked for: it came to us
            return
        follows = self._offences.add(peer, what, now)
        if follows.until > now and self.on_set_aside is not None:
            self.on_set_aside(peer, follows)

    def _leaves_out(self, member: Member) -> bool:
        """Whether a member is not dealt with: see `peers.access`."""
        reason = self._peer.objection(member)
        if reason is not None and member.peer_id not in self._left_out and len(self._left_out) < MOST_LEFT_OUT:
            self._left_out.add(member.peer_id)
            if self.on_left_out is not None:
                self.on_left_out(f"left out of this run: {reason}")
        return reason is not None

    def _syncer(self) -> PeerId:
        """The run's syncer; on the network thread."""
        syncers = [peer for peer, member in self.others().items() if member.status.state is MemberState.MERGING]
        if not syncers:
            raise UnreachableError("no syncer is seen in the run")
        return min(syncers)

    def _training(self) -> dict[PeerId, Member]:
        return {
            peer: member
            for peer, member in self.others().items()
            if member.status.state in (MemberState.TRAINING, MemberState.WAITING)
        }

    def _decide(self, mine: int) -> tuple[Source, str]:
        """Where this peer's state comes from; looks again for a while when others are about to train."""
        deadline = time.monotonic() + MEMBERS_TIMEOUT_S
        while True:
            with contextlib.suppress(TimeoutError):
                self._wait(self._peer.membership.refresh())
            others = [member.status for member in self.others().values()]
            source, reason = entry.decide(mine, others, first=self._first, stale_rounds=self.recipe.stale_rounds)
            if source is not Source.WAIT:
                return source, reason
            if time.monotonic() > deadline:
                raise RunError(f"cannot join run '{self.card.run}': {reason}; try again when its members train")
            if self._stop.wait(0.3):
                raise concurrent.futures.CancelledError

    def _download(self, replica: Replica) -> int:
        """Takes over the state of donors; returns its size in bytes."""
        told = queue.SimpleQueue[Progress]()

        def tell() -> None:
            while not told.empty():
                progress = told.get()
                if self.on_download is not None:
                    self.on_download(progress)

        fetch = self._peer.fetch_state(
            ask=DONORS_ASKED if self.recipe.topology in ("all-to-all", "syncer") else 1,
            limit_bytes=STATE_SIZES * size_of(replica.snapshot()[1]) + _STATE_MARGIN_BYTES,
            on_progress=told.put,
        )
        try:
            snapshot = self._thread.call(fetch, stop=self._stop, meanwhile=tell)
        finally:
            tell()
        replica.load_snapshot(snapshot.round, snapshot.tensors)
        return size_of(snapshot.tensors)

    def _provide(self) -> Snapshot | None:
        """Our state for a newcomer; None while we have none ourselves. Called on a network worker thread."""
        if self._replica is None or not self._serving:
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


def read_card(card: RunCard, expected: RunCard | None = None) -> Recipe:
    """The recipe in a run's card. Raises `RunError` if it is not valid, or not of the run expected."""
    try:
        recipe = parse(json.loads(card.document))
    except (ValueError, GaslocError) as error:
        raise RunError(f"run '{card.run}': its recipe cannot be read here, perhaps another version: {error}") from None
    if recipe.digest != card.digest:
        raise RunError(f"run '{card.run}': its recipe has digest {recipe.digest[:12]}, not {card.digest[:12]} as said")
    if expected is not None and (card.run, card.digest) != (expected.run, expected.digest):
        raise RunError(
            f"the swarm there trains run '{card.run}', this folder holds run '{expected.run}': choose another --dir"
        )
    return recipe
