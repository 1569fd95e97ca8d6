"""Can others dial us? A peer tries to, when asked; `/gasloc/dialback/1`.

request   {"addresses": [full address, ...]}
answer    {"observed": [IP, ...], "results": [{"address": ..., "reason": ...}, ...]}; reason "" where it was dialled

Whoever dials where a stranger says can be made to knock at other people's doors. So an address is dialled only
when its IP is one from which the asker is connected to us (as libp2p's AutoNAT does), in private ranges too: an
asker can have itself dialled, and nobody else. Names are not looked up. The dial is a TCP connection and a
TLS handshake of libp2p, from which we learn the listener's peer id and nothing else is sent; it must be the asker's.

Sources: https://github.com/libp2p/specs/blob/master/autonat/autonat-v1.md (the IP rule),
https://github.com/libp2p/specs/blob/master/tls/tls.md (the certificate's extension).
"""

import asyncio
import contextlib
import socket
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from peers.address import Address, parse
from peers.errors import AddressError, PeersError, ProtocolError, UnreachableError
from peers.exchange import PeerId
from peers.identity import peer_id_of
from peers.transport import Transport
from peers.wire import Kind, Wire, clean

DIALBACK_PROTOCOL = "/gasloc/dialback/1"
MAX_ADDRESSES = 8
DIAL_S = 3.0
_ASK_S = 5.0
_CLOSE_S = 1.0
_WINDOW_S = 60.0
_EACH = 6
_ALL = 60
_OID = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
_SIGNED = b"libp2p-tls-handshake:"
_KEY_PREFIX = bytes.fromhex("3068042408011220")  # SEQUENCE, OCTET STRING of libp2p's PublicKey: Ed25519, 32 bytes
_SIGNATURE_PREFIX = bytes.fromhex("0440")  # OCTET STRING, 64 bytes
_MULTISTREAM = b"/multistream/1.0.0\n"
_TLS = b"/tls/1.0.0\n"


@dataclass(frozen=True, slots=True)
class Dialback:
    """What a peer found when it tried to dial us."""

    observed: tuple[str, ...]
    """IPs from which the peer sees us connected."""
    reasons: Mapping[str, str]
    """For each address that was asked about, why it could not be dialled; empty where it was."""

    @property
    def dialled(self) -> bool:
        """Whether any address was dialled."""
        return any(not reason for reason in self.reasons.values())


class DialbackLimit:
    """How often we dial: so often for one IP, and so often for all together, within a minute."""

    def __init__(self) -> None:
        self._times: deque[tuple[float, str]] = deque()

    def refusal(self, ip: str, now_s: float) -> str:
        """Why not to dial now; empty where it may be done, which is then counted. `now_s`: any steady clock."""
        while self._times and self._times[0][0] <= now_s - _WINDOW_S:
            self._times.popleft()
        if len(self._times) >= _ALL:
            return "this peer is asked too often; ask another, or in a minute"
        if sum(1 for _, other in self._times if other == ip) >= _EACH:
            return f"{ip} asks too often; wait a minute"
        self._times.append((now_s, ip))
        return ""


def judge(address: Address, asker: PeerId, observed: Collection[str]) -> str:
    """Why an address is not dialled for `asker`, who is connected from the IPs `observed`; empty where it is."""
    if address.peer_id != asker:
        return "it is another peer's address"
    if "/p2p-circuit" in address.maddr:
        return "it is at a relay"
    _, kind, host, transport, *_ = [*address.maddr.split("/"), "", ""]
    if kind not in ("ip4", "ip6"):
        return "it is a name, and only IP addresses are tried"
    if transport != "tcp":
        return f"/{transport} is not tried"
    if host not in observed:
        return f"this peer is seen at {', '.join(sorted(observed)) or 'no IP'}, not at {host}"
    return ""


class DialbackServer:
    """Dials those who ask for it."""

    def __init__(self, transport: Transport, connections: Callable[[PeerId], Awaitable[Sequence[str]]]) -> None:
        """`connections` tells the multiaddresses from which a peer is connected to us."""
        self._transport = transport
        self._connections = connections
        self._limit = DialbackLimit()

    async def start(self) -> None:
        """Serves from now on."""
        await self._transport.serve(DIALBACK_PROTOCOL, self._on_stream)

    async def _on_stream(self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer, "dialback")
        with contextlib.suppress(PeersError, TimeoutError):
            async with asyncio.timeout(_ASK_S + DIAL_S):
                request = await wire.receive_header(Kind.HEADER)
                observed = {ip for ip in map(ip_of, await self._connections(peer)) if ip}
                refusal = self._limit.refusal(min(observed, default="it"), time.monotonic())
                if refusal:
                    await wire.abort(refusal)
                else:
                    await wire.send_header(Kind.HEADER, await _answer(request, peer, observed))
                await wire.linger(_CLOSE_S)


async def ask_dialback(transport: Transport, peer: PeerId, addresses: Sequence[str]) -> Dialback:
    """Asks a peer to dial us at our addresses, at most `MAX_ADDRESSES`.

    Raises `UnreachableError` when it does not answer, `RefusedError` when it does not want to, and
    `ProtocolError` when it answers nonsense.
    """
    reader, writer = await transport.dial(peer, DIALBACK_PROTOCOL, timeout_s=_ASK_S)
    wire = Wire(reader, writer, "dialback")
    try:
        async with asyncio.timeout(_ASK_S + DIAL_S):
            await wire.send_header(Kind.HEADER, {"addresses": list(addresses[:MAX_ADDRESSES])})
            return read_answer(await wire.receive_header(Kind.HEADER))
    except TimeoutError:
        raise UnreachableError(f"silent for {_ASK_S + DIAL_S:g} s") from None
    finally:
        await wire.close(_CLOSE_S)


def read_answer(value: Mapping[str, object]) -> Dialback:
    """Out of a peer's words. Raises `ProtocolError`, and nothing else."""
    observed, results = value.get("observed"), value.get("results")
    if not (isinstance(observed, list) and isinstance(results, list) and len(results) <= MAX_ADDRESSES):
        raise ProtocolError("a dial-back's answer is not two lists")
    reasons = {}
    for result in results:
        entry = result if isinstance(result, dict) else {}
        address, reason = entry.get("address"), entry.get("reason")
        if not (isinstance(address, str) and isinstance(reason, str)):
            raise ProtocolError("a dial-back's result is not an address and a reason")
        reasons[clean(address)] = clean(reason)
    return Dialback(tuple(clean(ip) for ip in observed[:MAX_ADDRESSES] if isinstance(ip, str)), reasons)


def ip_of(maddr: str) -> str:
    """The IP of a direct TCP or UDP multiaddress; empty where there is none."""
    _, kind, host, *_ = [*maddr.split("/"), "", ""]
    return host if kind in ("ip4", "ip6") and "/p2p-circuit" not in maddr else ""


async def _answer(request: Mapping[str, object], asker: PeerId, observed: Collection[str]) -> dict[str, object]:
    asked = request.get("addresses")
    if not (isinstance(asked, list) and len(asked) <= MAX_ADDRESSES):
        raise ProtocolError(f"'addresses' is not a list of at most {MAX_ADDRESSES}")
    texts = [text for text in asked if isinstance(text, str)]
    reasons = await asyncio.gather(*(_try(text, asker, observed) for text in texts))
    results = [{"address": text, "reason": reason} for text, reason in zip(texts, reasons, strict=True)]
    return {"observed": sorted(observed), "results": results}


async def _try(text: str, asker: PeerId, observed: Collection[str]) -> str:
    try:
        address = parse(text)
    except AddressError as error:
        return str(error)
    reason = judge(address, asker, observed)
    if reason:
        return reason
    _, _, host, _, port, *_ = address.maddr.split("/")
    try:
        found = await asyncio.to_thread(listener_id, host, int(port), DIAL_S)
    except UnreachableError as error:
        return str(error)
    return "" if found == asker else f"another peer listens there: {found}"


def listener_id(host: str, port: int, timeout_s: float) -> PeerId:
    """The peer id of what listens at an IP and port; blocks for at most about `timeout_s`.

    Proven by a TLS handshake with its key. Raises `UnreachableError` with the reason.
    """
    try:
        with socket.create_connection((host, port), timeout_s) as raw:
            raw.sendall(b"".join(bytes([len(part)]) + part for part in (_MULTISTREAM, _TLS)))
            for part in (_MULTISTREAM, _TLS):
                if _read_exactly(raw, len(part) + 1) != bytes([len(part)]) + part:
                    raise UnreachableError("what listens there is not a peer")
            with _tls().wrap_socket(raw) as secure:
                certificate = secure.getpeercert(binary_form=True)
    except TimeoutError:
        raise UnreachableError(f"silent for {timeout_s:g} s") from None
    except (ssl.SSLError, EOFError):
        raise UnreachableError("what listens there is not a peer") from None
    except ConnectionRefusedError:
        raise UnreachableError("connection refused") from None
    except OSError as error:
        raise UnreachableError((error.strerror or str(error)).lower()) from None
    found = certificate_id(certificate or b"")
    if found is None:
        raise UnreachableError("what listens there is not a peer with an Ed25519 key")
    return found


def certificate_id(certificate: bytes) -> PeerId | None:
    """The peer id that signed a libp2p TLS certificate (DER); None where none with an Ed25519 key did."""
    try:
        parsed = x509.load_der_x509_certificate(certificate)
        value = parsed.extensions.get_extension_for_oid(_OID).value
        spki = parsed.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except (ValueError, x509.ExtensionNotFound):
        return None
    raw = value.public_bytes()
    if len(raw) != 106 or not raw.startswith(_KEY_PREFIX) or raw[40:42] != _SIGNATURE_PREFIX:
        return None
    key, signature = raw[8:40], raw[42:]
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, _SIGNED + spki)
    except (InvalidSignature, ValueError):
        return None
    return peer_id_of(key)


def _tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # libp2p certificates are self-signed; `certificate_id` checks them
    context.set_alpn_protocols(["libp2p"])
    return context


def _read_exactly(raw: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = raw.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data
