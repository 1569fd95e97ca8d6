"""`Peer`: identity, p2pd, DHT, exchange, donor and membership, started and closed as one."""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from typing import Self

from peers import contact, donor, download
from peers.access import Access, GuardedTransport
from peers.address import Address, Reach, announced, parse, reach
from peers.checks import TimeServer
from peers.codec import CodecName
from peers.contact import Contact
from peers.courier import Courier
from peers.daemon import Daemon
from peers.dht import Dht
from peers.dialback import DialbackServer
from peers.donor import Donor
from peers.donor import RunCard as RunCard
from peers.donor import Snapshot as Snapshot
from peers.download import OnProgress
from peers.errors import (
    NoDonorError,
    NotAdmittedError,
    PeersError,
    RefusedError,
    UnreachableError,
)
from peers.exchange import PeerId
from peers.identity import Identity
from peers.keeper import Keeper
from peers.libp2p import Libp2pTransport
from peers.manifest import MAX_STATE_BYTES
from peers.membership import LIFE_S, MAX_LIVES, Member, Membership, MemberState
from peers.meter import Meter
from peers.options import PeerOptions as PeerOptions
from peers.p2pd import Role
from peers.reachability import Standing
from peers.stream_exchange import StreamExchange
from peers.ties import EVERY_S, Ties

CLOCK_TOLERANCE_S = 2.0
_CARD_S = 5.0
_CARD_PATIENCE_S = 10.0
_CARD_RETRY_S = 0.2
_TIES_EVERY_S = EVERY_S

_log = logging.getLogger(__name__)


class Peer:
    """One peer. Made by `start`; a member of a run after `enter`."""

    def __init__(
        self,
        options: PeerOptions,
        access: Access,
        identity: Identity,
        daemon: Daemon,
        transport: Libp2pTransport,
        dht: Dht,
    ) -> None:
        self._options = options
        self._identity = identity
        self._daemon = daemon
        self.meter = Meter()
        self._access = access
        self._libp2p = transport
        self._transport = GuardedTransport(transport, access, meter=self.meter)
        self._dht = dht
        self._initial = [parse(text) for text in options.initial_peers]
        self._alive: list[PeerId] = []
        self._stack = AsyncExitStack()
        self._card: RunCard | None = None
        self._exchange: StreamExchange | None = None
        self._courier: Courier | None = None
        self._membership: Membership | None = None
        self._cached = [address for address in _readable(options.cached_peers) if address not in self._initial]
        self._ties = Ties(daemon, dht, initial=self._initial, cached=self._cached, members=self._seen)
        self._keeper = Keeper(daemon, resume=self._resume, wake=self._wake)
        self.peer_id = identity.peer_id
        self.addresses: list[str] = []
        """Full multiaddresses that others can dial, best first. Empty for a client."""
        self.warnings: list[str] = []
        """What went wrong at the start and did not matter, one line each."""

    @classmethod
    async def start(cls, options: PeerOptions) -> Self:
        """Starts p2pd and joins the DHT of the initial peers.

        Dead initial peers beside a live one end up in `warnings`. Raises, within about 15 s, `AddressError` for
        a malformed address, `AccessError`, `IdentityError`, `DaemonError`, and `UnreachableError` when no initial peer
        answers: one line that names each address and the reason. Nothing is left running then.
        """
        for text in options.initial_peers:
            parse(text)
        for entry in options.announce:
            announced(entry, options.port)
        access = Access.load(
            secret_file=options.secret_file, allow_file=options.allow_file, deny_file=options.deny_file
        )
        async with AsyncExitStack() as stack:
            identity = Identity.load_or_create(options.identity_path)
            identity.acquire()
            stack.callback(identity.release)
            daemon = await Daemon.start(
                identity,
                host=options.host,
                port=options.port,
                announce=options.announce,
                role=options.role,
                relays=[one for one in map(parse, options.initial_peers) if reach(one.maddr) is not Reach.RELAY],
            )
            stack.push_async_callback(daemon.close)
            peer_box: list[Self] = []
            transport = Libp2pTransport(daemon, lambda other: peer_box[0]._ties.addresses_of(other))
            stack.push_async_callback(transport.close)
            holds_keys = options.role in (Role.MEMBER, Role.RELAY)
            dht = await Dht.start(daemon, transport, max_life_s=MAX_LIVES * LIFE_S, client_only=not holds_keys)
            stack.push_async_callback(dht.close)
            peer = cls(options, access, identity, daemon, transport, dht)
            peer_box.append(peer)
            if not options.client_only:
                await TimeServer(transport).start()
                await DialbackServer(transport, daemon.connections).start()
            peer.addresses = await daemon.addresses()
            await peer._meet()
            if options.undialable:
                peer.warnings.append(f"others cannot dial this peer, so it dials them: {options.undialable}")
            peer._keeper.start()
            stack.push_async_callback(peer._keeper.close)
            tying = asyncio.create_task(peer._keep_ties())
            stack.push_async_callback(_end, tying)
            peer._stack = stack.pop_all()
        return peer

    @property
    def local_only(self) -> bool:
        """Whether only peers on this machine can dial us."""
        return bool(self.addresses) and all(reach(address) is Reach.LOOPBACK for address in self.addresses)

    @property
    def reachable(self) -> bool:
        """Whether others can dial us directly. p2pd gets itself relayed addresses when it finds that they cannot."""
        told = not self._options.undialable and bool(self.addresses)
        return told and all(reach(address) is not Reach.RELAY for address in self.addresses)

    @property
    def standing(self) -> Standing:
        """How others can dial us."""
        return Standing(self.reachable, any(reach(address) is Reach.RELAY for address in self.addresses))

    @property
    def exchange(self) -> StreamExchange:
        """Trades tensors with members. Only after `enter`, and not for a client."""
        assert self._exchange is not None, "enter() comes first"
        return self._exchange

    @property
    def courier(self) -> Courier:
        """Sends and answers parcels within the run. Only after `enter`, and not for a client."""
        assert self._courier is not None, "enter() comes first"
        return self._courier

    @property
    def membership(self) -> Membership:
        """Who is in the run. Only after `enter`."""
        assert self._membership is not None, "enter() comes first"
        return self._membership

    @property
    def rejected_records(self) -> int:
        """Records of members that our DHT node refused so far."""
        return self._dht.validator.rejected.total()

    def objection(self, member: Member) -> str | None:
        """Why a member is not dealt with, in words: the lists, or no proof of the secret; None where it is."""
        if self._access.private and self._card is not None and member.digest != self._card.digest:
            return f"{member.peer_id} publishes no proof that it knows the secret"
        return self._access.objection(member.peer_id)

    def alive(self) -> bool:
        """Whether p2pd runs, or is just being started again; once it is gone for good, nothing here works any more."""
        return not self._keeper.given_up

    def take_notices(self) -> list[str]:
        """What happened to p2pd and to time since this was last asked, a line each. From any thread.

        Raises `DaemonError` once p2pd is gone for good.
        """
        self._keeper.up()
        return self._keeper.take_notices()

    async def fetch_card(self) -> RunCard:
        """The card of the run that the initial peers are in.

        A peer that has not entered its run yet is asked again for up to 10 s. Raises `UnreachableError` with
        one line that names each peer and why it gave none; and `NotAdmittedError` with the reason at once where
        all who answer do not let us in.
        """
        deadline = time.monotonic() + _CARD_PATIENCE_S
        while True:
            reasons = {}
            refusals = []
            for peer in self._alive:
                try:
                    return await donor.fetch_card(self._transport, peer, timeout_s=_CARD_S, meter=self.meter)
                except PeersError as error:
                    reasons[peer] = str(error)
                    refusals += [str(error)] if isinstance(error, NotAdmittedError | RefusedError) else []
            if refusals and len(refusals) == len(reasons):
                raise NotAdmittedError("; ".join(dict.fromkeys(refusals)))
            if time.monotonic() > deadline or not reasons:
                raise UnreachableError(f"no run to join: {_listed(reasons) or 'there are no initial peers'}")
            await asyncio.sleep(_CARD_RETRY_S)

    async def find_card(self) -> RunCard | None:
        """The card of the run that anybody connected to us is in; None where nobody gives one."""
        connected: list[PeerId] = []
        with contextlib.suppress(PeersError):  # p2pd may be away just now; the keeper tells if it is gone for good
            connected += await self._daemon.connected()
        for peer in connected:
            with contextlib.suppress(PeersError):
                return await donor.fetch_card(self._transport, peer, timeout_s=_CARD_S, meter=self.meter)
        return None

    async def enter(self, card: RunCard, provide: Callable[[], Snapshot | None], *, codec: CodecName = "fp32") -> None:
        """Becomes a part of the run: serves its card and our state, accepts exchanges, watches the members.

        `provide` is called on a worker thread for each newcomer; None: there is no state to give. Others see us
        once `membership.publish` was called. A client only watches.
        """
        assert self._membership is None, "a peer enters one run"
        membership = Membership(
            self._dht,
            self._identity,
            run=card.run,
            digest=card.digest,
            badge=lambda peer: self._access.badge(card.run, card.digest, peer),
            addresses=lambda: self.addresses,
            reachable=lambda: self.reachable,
            check=self._keeper.up,
        )
        self._card, self._membership = card, membership
        self._stack.push_async_callback(membership.close)
        await membership.start()
        if self._options.client_only:
            return
        self._exchange = StreamExchange(
            self._transport,
            run=card.run,
            digest=card.digest,
            codec=codec,
            meter=self.meter,
            reachable=self._is_reachable,
        )
        self._stack.push_async_callback(self._exchange.close)
        self._stack.push_async_callback(membership.withdraw)
        await self._exchange.start()
        self._courier = Courier(self._transport, run=card.run, digest=card.digest, codec=codec, meter=self.meter)
        await Donor(
            self._transport,
            card,
            provide,
            meter=self.meter,
            max_downloads=self._options.serve_downloads,
            rate_bytes_per_s=self._options.serve_rate_bytes_per_s,
        ).start()

    async def fetch_state(
        self,
        *,
        least_round: int = 0,
        latest_round: int | None = None,
        without: Collection[PeerId] = (),
        ask: int = 4,
        limit_bytes: int = MAX_STATE_BYTES,
        on_progress: OnProgress = lambda progress: None,
    ) -> Snapshot:
        """The whole state from syncers, or else from members that train, those with the highest round first.

        Nobody in `without` is asked, and those past `latest_round` come last: they went on without the others.
        The arguments, and how long it may take: see `peers.download.fetch_state`. Raises `NoDonorError` that says
        why nobody could give it.
        """
        assert self._card is not None, "enter() comes first"
        reasons = []
        for donors in self._donors(without, latest_round):
            try:
                return await download.fetch_state(
                    self._transport,
                    donors,
                    run=self._card.run,
                    digest=self._card.digest,
                    least_round=least_round,
                    ask=ask,
                    limit_bytes=limit_bytes,
                    meter=self.meter,
                    on_progress=on_progress,
                )
            except NoDonorError as error:
                reasons.append(str(error))
        raise NoDonorError("; ".join(reasons) or "nobody could give the state: no member of this run trains yet")

    async def close(self) -> None:
        """Says goodbye, ends what runs, stops p2pd; leaves no process, socket or file. Safe to call twice."""
        await self._stack.aclose()

    def abandon(self) -> None:
        """Kills p2pd without a goodbye: for a process that exits now. From any thread, or a signal handler."""
        self._daemon.abandon()

    async def _meet(self) -> None:
        """Connects to the initial peers; see `start`."""
        if not self._initial and not self._cached:
            return
        contacts = await contact.meet(
            [*self._initial, *self._cached],
            self._daemon,
            self._dht,
            identity=self._identity,
            patience_s=self._options.patience_s,
        )
        dead = {str(one.address): one.reason for one in contacts if one.reason}
        live = [one for one in contacts if not one.reason]
        if not live and self._initial:
            raise UnreachableError(f"no initial peer answers: {_listed(dead)}")
        if not live:
            self.warnings.append("nobody answers where the swarm was met before; they are tried again now and then")
            return
        told = {str(address) for address in self._initial}
        self.warnings += [f"initial peer {at} is left out: {reason}" for at, reason in dead.items() if at in told]
        self.warnings += _clock_warning(live)
        self._alive = list(dict.fromkeys(one.address.peer_id for one in live))
        try:
            async with asyncio.timeout(3.0):
                await self._dht.explore()
        except TimeoutError:
            _log.debug("some DHT nodes are slow to answer")

    def _is_reachable(self, peer: PeerId) -> bool:
        if peer == self.peer_id:
            return self.reachable
        member = self.membership.members().get(peer)
        return member is None or member.reachable

    def _donors(self, without: Collection[PeerId], latest_round: int | None) -> list[list[PeerId]]:
        """Syncers, then those that train; each by preference. Never one that joins: it may have no state yet."""
        assert self._card is not None
        others = [
            member
            for peer, member in self.membership.members().items()
            if peer != self.peer_id and peer not in without and member.digest == self._card.digest
        ]

        def order(member: Member) -> tuple[bool, bool, int, bytes]:
            # between equals each newcomer has an order of its own, so that they do not all ask the same donor
            mixed = hashlib.sha256(f"{self.peer_id} {member.peer_id}".encode()).digest()
            apart = latest_round is not None and member.status.round > latest_round
            return (apart, not member.reachable, -member.status.round, mixed)

        tiers = []
        for states in ({MemberState.MERGING}, {MemberState.TRAINING, MemberState.WAITING}):
            able = [member for member in others if member.status.state in states]
            tiers.append([member.peer_id for member in sorted(able, key=order)])
        return [tier for tier in tiers if tier]

    async def _resume(self) -> None:
        """All as before, through a p2pd that was started again."""
        await self._libp2p.resume()
        await self._dht.resume()
        self.addresses = await self._daemon.addresses()

    async def _wake(self) -> None:
        """After time in which we were away: meets the others again, renews our record, looks at theirs."""
        await self._ties.renew()
        if self._membership is not None:
            await self._membership.wake()

    async def _keep_ties(self) -> None:
        while True:
            await asyncio.sleep(_TIES_EVERY_S)
            try:
                if self._keeper.up():
                    self.addresses = await self._daemon.addresses()
                    await self._ties.mend()
            except PeersError as error:
                _log.debug("could not look after our ties: %s", error)
            except Exception:
                _log.exception("could not look after our ties")

    def _seen(self) -> dict[PeerId, Member]:
        return self._membership.members() if self._membership is not None else {}


def _clock_warning(contacts: Sequence[Contact]) -> list[str]:
    offsets_s = sorted(one.clock_ahead_s for one in contacts)
    offset_s = offsets_s[len(offsets_s) // 2]
    if abs(offset_s) <= CLOCK_TOLERANCE_S:
        return []
    way = "behind" if offset_s > 0 else "ahead of"
    return [
        f"this machine's clock is {abs(offset_s):.0f} s {way} the swarm's: "
        "set it by NTP, or others may not see this peer"
    ]


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _readable(texts: Sequence[str]) -> list[Address]:
    """Those that are addresses; an old cache may hold others."""
    addresses = []
    for text in texts:
        try:
            addresses.append(parse(text))
        except PeersError as error:
            _log.debug("left out of the cache: %s", error)
    return addresses


def _listed(reasons: dict[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
