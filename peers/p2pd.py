"""The p2pd program: what it does for others, its command line, and the forms in which it takes ids and addresses."""

import importlib.resources
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Self

import hivemind.hivemind_cli
from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

from peers.address import Address, Reach, announced, listening, reach
from peers.circuit import Limit
from peers.errors import DaemonError, UnreachableError
from peers.exchange import PeerId
from peers.identity import Identity
from peers.reasons import port_trouble
from peers.sockets import Sockets

_IDLE_S = 15  # p2pd ends when nobody holds a connection to it for this long after its start
_P2P_CODE = bytes.fromhex("a503")  # "p2p" and "p2p-circuit" in a binary multiaddress
_CIRCUIT_CODE = bytes.fromhex("a202")
_CIRCUIT = "/p2p-circuit"
RELAY_LIMIT = Limit(time_s=24 * 3600, data_bytes=1 << 40)
"""Of a connection through a relay of ours."""


class Role(Enum):
    """What a p2pd does for others."""

    MEMBER = "member"
    """Listens, holds a part of the DHT, and relays for others where it finds that it can be dialled from anywhere."""
    HIDDEN = "hidden"
    """Cannot be dialled: holds no part of the DHT, and looks for relays to be dialled through."""
    VISITOR = "visitor"
    """Listens for a moment, to be looked at; holds no part of the DHT."""
    CLIENT = "client"
    """Listens nowhere."""
    RELAY = "relay"
    """Listens, holds a part of the DHT, and relays for others at once."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a p2pd is started; and started again, should it end."""

    host: str
    port: int
    """0: any free one."""
    announce: tuple[str, ...] = ()
    """Multiaddresses to tell others instead of what p2pd finds out."""
    role: Role = Role.MEMBER
    relays: tuple[Address, ...] = ()
    """Peers that may relay for us, where we are hidden."""

    @classmethod
    def read(cls, host: str, port: int, announce: Sequence[str], role: Role, relays: Sequence[Address]) -> Self:
        """`announce` may hold public IPs too. Raises `AddressError` for what cannot be an address."""
        listening(host, port)
        return cls(host, port, tuple(announced(entry, port) for entry in announce), role, tuple(relays))

    @property
    def where(self) -> str:
        """The multiaddress to listen on."""
        return listening(self.host, self.port)

    def settled(self, found: Sequence[str]) -> Self:
        """The same at the port that was taken, as far as the addresses `found` by p2pd tell it.

        Addresses that we told p2pd to announce do not, nor does what a router forwards to us: the nearest count.
        """
        direct = [address for address in found if "/tcp/" in address and reach(address) is not Reach.RELAY]
        if self.port or self.announce or not direct:
            return self
        return replace(self, port=int(max(direct, key=reach).split("/tcp/")[1].split("/")[0]))

    def command(self, identity: Identity, sockets: Sockets) -> list[str]:
        """The program and its arguments."""
        local = reach(self.where) is Reach.LOOPBACK
        with importlib.resources.as_file(importlib.resources.files(hivemind.hivemind_cli) / "p2pd") as program:
            words = [str(program)]
        words += [f"-id={identity.path}", f"-listen=/unix{sockets.control}", f"-idleTimeout={_IDLE_S}s"]
        words += ["-connManager=1", "-tls=1", "-relay=1"]
        if self.role is Role.CLIENT:
            return [*words, "-dhtClient=1", "-noListenAddrs=1", "-natPortMap=0", "-autonat=0", "-relayService=0"]
        holds_keys = self.role in (Role.MEMBER, Role.RELAY)
        words += ["-dhtServer=1" if holds_keys else "-dhtClient=1", f"-hostAddrs={self.where}"]
        if self.announce:
            words.append(f"-announceAddrs={','.join(self.announce)}")
        if self.role is Role.RELAY:
            words += ["-forceReachabilityPublic=1", "-relayService=1", f"-relayTimeLimit={RELAY_LIMIT.time_s}s"]
            words += [f"-relayDataLimit={RELAY_LIMIT.data_bytes}", "-autonat=1"]
            return [*words, "-natPortMap=0" if local else "-natPortMap=1"]
        if self.role is Role.HIDDEN:
            words += ["-forceReachabilityPrivate=1", "-relayService=0", "-autonat=0", "-natPortMap=0"]
            if self.relays:
                words += ["-autoRelay=1", f"-trustedRelays={','.join(str(relay) for relay in self.relays)}"]
            return words
        if local:  # nothing of ours may leave this machine
            return [*words, "-natPortMap=0", "-autonat=0", "-relayService=0"]
        if self.role is Role.VISITOR:
            return [*words, "-natPortMap=1", "-autonat=0", "-relayService=0"]
        return [*words, "-natPortMap=1", "-autonat=1", "-autoRelay=1"]


def check_free(host: str, port: int) -> None:
    """Raises `DaemonError` where another process listens. p2pd itself would share the port with another p2pd."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port we had a moment ago is free
        try:
            probe.bind((host, port))
        except OSError as error:
            raise DaemonError(port_trouble(f"{host} port {port}", str(error))) from None


def orphans(identity: Identity) -> list[int]:
    """The p2pds that run with this identity's file: none but what a killed process of ours left, for seconds.

    Only on Linux, and only of this user; elsewhere none are found.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"/p2pd") and f"-id={identity.path}".encode() in words:
            found.append(int(path.parent.name))
    return found


def to_binary(maddr: str) -> bytes:
    """A multiaddress as p2pd takes it; hivemind writes a relay's peer id in a form that p2pd cannot read."""
    direct, relay, relayed = maddr.partition("/p2p/")
    raw: bytes = Multiaddr(direct).to_bytes()
    if relay:
        peer = raw_peer_id(relayed.removesuffix(_CIRCUIT))
        raw += _P2P_CODE + bytes([len(peer)]) + peer + (_CIRCUIT_CODE if relayed.endswith(_CIRCUIT) else b"")
    return raw


def raw_peer_id(peer_id: PeerId) -> bytes:
    """A peer id as p2pd takes it. Raises `UnreachableError` for text that is none."""
    try:
        raw: bytes = PeerID.from_base58(peer_id).to_bytes()
    except ValueError:
        raw = b""
    if len(raw) < 4 or raw[1] != len(raw) - 2:
        raise UnreachableError(f"'{peer_id[:80]}' is not a peer id")
    return raw


def plain_line(line: bytes) -> str:
    """One line of p2pd's output; of its JSON lines, the message and the error."""
    text = line.decode(errors="replace").strip()
    if not text.startswith("{"):
        return text
    try:
        entry = json.loads(text)
        return ": ".join(str(entry[key]) for key in ("msg", "error") if key in entry)
    except (ValueError, RecursionError):
        return text
