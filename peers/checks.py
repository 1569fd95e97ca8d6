"""A first look at a swarm before joining it: who answers, whose clock is off, is our id free, can others dial us.

Made with a p2pd and an identity of its own, which are gone when the look is over: nothing of ours is entered
anywhere, and a peer that runs with our id can be found, which we could not with that id ourselves.
`/gasloc/time/1`: {} is answered with {"time": unix seconds}.
"""

import asyncio
import contextlib
import math
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from peers import donor
from peers.access import Access, GuardedTransport
from peers.address import Address, Reach, parse, reach
from peers.daemon import Daemon
from peers.dialback import Dialback, ask_dialback
from peers.donor import RunCard
from peers.errors import PeersError, ProtocolError, UnreachableError
from peers.exchange import PeerId
from peers.identity import Identity
from peers.libp2p import Libp2pTransport
from peers.p2pd import Role
from peers.reasons import REFUSED
from peers.transport import Transport
from peers.wire import Kind, Wire

TIME_PROTOCOL = "/gasloc/time/1"
CONNECT_S = 5.0
_TIME_S = 3.0
_CARD_S = 3.0
_CLOSE_S = 1.0
_RETRY_S = 0.2
_MAPPING_S = 3.0
"""How long a router may take to forward a port to us (UPnP), before we say that nobody can dial us."""


@dataclass(frozen=True, slots=True)
class Contact:
    """How the contact with one address went."""

    address: str
    peer_id: PeerId
    reason: str = ""
    """Why it failed; empty where it did not."""
    clock_ahead_s: float | None = None
    """How far its clock is ahead of ours; None where it did not tell."""


@dataclass(frozen=True, slots=True)
class Look:
    """What was found."""

    contacts: tuple[Contact, ...] = ()
    taken: bool | None = None
    """Whether somebody in the swarm answers to our peer id; None where it could not be asked."""
    addresses: tuple[str, ...] = ()
    """What p2pd would announce, best first."""
    dialback: Dialback | None = None
    """What peers found that tried to dial us; None where nobody tried."""
    dialback_refusal: str = ""
    """Why nobody tried."""
    card: RunCard | None = None
    """Of the run that the peers are in; None where none of them gave it."""

    @property
    def answering(self) -> tuple[Contact, ...]:
        """Those that were reached."""
        return tuple(contact for contact in self.contacts if not contact.reason)


@dataclass(frozen=True, slots=True)
class LookOptions:
    """What to look at, and as whom."""

    initial_peers: tuple[str, ...]
    host: str
    port: int
    announce: tuple[str, ...] = ()
    own_id: PeerId | None = None
    """Our peer id; None where it is new, so nobody can have it."""
    ask_card: bool = False
    secret_file: Path | None = None
    """Of a private run, for its card. Clocks and dial-backs are for anybody."""
    patience_s: float = 0.0
    """How long addresses that refuse the connection are tried again."""


class TimeServer:
    """Tells peers our time."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def start(self) -> None:
        """Serves from now on."""
        await self._transport.serve(TIME_PROTOCOL, self._on_stream)

    async def _on_stream(self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer, "time")
        with contextlib.suppress(PeersError, TimeoutError):
            async with asyncio.timeout(_TIME_S):
                await wire.receive_header(Kind.HEADER)
                await wire.send_header(Kind.HEADER, {"time": time.time()})
                await wire.linger(_CLOSE_S)


async def ask_time(transport: Transport, peer: PeerId) -> float:
    """How far a peer's clock is ahead of ours, seconds: its answer against the middle of our waiting.

    Raises `UnreachableError` when it does not answer, and `ProtocolError` when it answers nonsense.
    """
    reader, writer = await transport.dial(peer, TIME_PROTOCOL, timeout_s=_TIME_S)
    wire = Wire(reader, writer, "time")
    try:
        async with asyncio.timeout(_TIME_S):
            asked, steady = time.time(), time.monotonic()
            await wire.send_header(Kind.HEADER, {})
            told = (await wire.receive_header(Kind.HEADER)).get("time")
            waited_s = time.monotonic() - steady
    except TimeoutError:
        raise UnreachableError(f"silent for {_TIME_S:g} s") from None
    finally:
        await wire.close(_CLOSE_S)
    if not (isinstance(told, int | float) and math.isfinite(told)):
        raise ProtocolError("a time that is not a number")
    return float(told) - (asked + waited_s / 2)


async def look(options: LookOptions) -> Look:
    """Looks at the swarm, within about 20 s whatever the others do.

    Raises `AddressError` for a malformed address, `IdentityError`, and `DaemonError` where p2pd does not start.
    """
    addresses = [parse(text) for text in options.initial_peers]
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gasloc-look-"))
        identity = Identity.load_or_create(Path(folder) / "identity.key")
        daemon = await Daemon.start(
            identity, host=options.host, port=options.port, announce=options.announce, role=Role.VISITOR
        )
        stack.push_async_callback(daemon.close)
        transport = Libp2pTransport(daemon)
        access = Access.load(secret_file=options.secret_file)
        stack.push_async_callback(transport.close)
        contacts = await asyncio.gather(
            *(_contact(address, daemon, transport, options.patience_s) for address in addresses)
        )
        seen = Look(contacts=tuple(contacts), addresses=tuple(await daemon.addresses()))
        if not seen.answering:
            return seen
        taken, dialled, card = await asyncio.gather(
            _is_taken(transport, options.own_id),
            _dialback(daemon, transport, seen.answering),
            _card(GuardedTransport(transport, access), seen.answering) if options.ask_card else _nothing(),
        )
        found, refusal = dialled
        return replace(
            seen,
            taken=taken,
            dialback=found,
            dialback_refusal=refusal,
            card=card,
            addresses=tuple(await daemon.addresses()),
        )


async def _contact(address: Address, daemon: Daemon, transport: Transport, patience_s: float) -> Contact:
    contact = Contact(str(address), address.peer_id)
    deadline = time.monotonic() + patience_s
    while True:
        try:
            await daemon.connect(address, CONNECT_S)
            break
        except UnreachableError as error:
            if str(error) != REFUSED or time.monotonic() > deadline:
                return replace(contact, reason=str(error))
        await asyncio.sleep(_RETRY_S)
    try:
        return replace(contact, clock_ahead_s=await ask_time(transport, address.peer_id))
    except (UnreachableError, ProtocolError):
        return contact


async def _is_taken(transport: Transport, own_id: PeerId | None) -> bool | None:
    """Whether a peer answers to our id. What a crashed one left may still be known, but does not answer."""
    if own_id is None:
        return None
    try:
        await ask_time(transport, own_id)
    except PeersError:
        return False
    return True


async def _dialback(daemon: Daemon, transport: Transport, contacts: Sequence[Contact]) -> tuple[Dialback | None, str]:
    """Asks one peer after another until one dials us; the last one's findings where none does."""
    deadline = time.monotonic() + _MAPPING_S
    found: Dialback | None = None
    refusal = "nobody was asked"
    while True:
        for contact in contacts:
            direct = [address for address in await daemon.addresses() if reach(address) is not Reach.RELAY]
            try:
                found = await ask_dialback(transport, contact.peer_id, direct)
            except PeersError as error:
                refusal = f"{contact.peer_id}: {error}"
                continue
            if found.dialled:
                return found, ""
        if found is None or time.monotonic() > deadline:
            return found, refusal if found is None else ""
        await asyncio.sleep(1.0)


async def _card(transport: Transport, contacts: Sequence[Contact]) -> RunCard | None:
    for contact in contacts:
        with contextlib.suppress(PeersError):
            return await donor.fetch_card(transport, contact.peer_id, timeout_s=_CARD_S, meter=None)
    return None


async def _nothing() -> None:
    return None
