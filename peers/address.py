"""Multiaddresses as text: parsing, and the choice of which ones to tell others."""

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import base58

from peers.errors import AddressError

if TYPE_CHECKING:  # it imports torch, and a malformed address is told without waiting for that
    from peers.exchange import PeerId

FORM = "/ip4/203.0.113.5/tcp/31337/p2p/12D3KooW..."
_CIRCUIT = "/p2p-circuit"
_HOST_KINDS = ("ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr")
_IP_KINDS = ("ip4", "ip6")
_DOCKER_NETWORK = ipaddress.ip_network("172.16.0.0/12")  # docker's default pool, bridges and user networks


@dataclass(frozen=True, slots=True)
class Address:
    """Where a peer can be dialled, and who must answer there."""

    maddr: str
    """The part before the last `/p2p/`, such as `/ip4/203.0.113.5/tcp/31337`."""
    peer_id: "PeerId"

    def __str__(self) -> str:
        return f"{self.maddr}/p2p/{self.peer_id}"


class Reach(IntEnum):
    """From how far an address can be dialled; lower is farther, and tried first."""

    PUBLIC = 0
    RELAY = 1
    """Through another peer: from anywhere, but slow."""
    LAN = 2
    BRIDGE = 3
    """Most likely a bridge between containers on one host."""
    LOOPBACK = 4


def parse(text: str) -> Address:
    """Reads a full address. Raises `AddressError` that names the text, what is wrong and the right form."""
    text = text.strip()
    maddr, separator, peer_id = text.rpartition("/p2p/")
    if not text.startswith("/"):
        raise _wrong(text, "it must start with '/'")
    if not separator or not peer_id:
        raise _wrong(text, "the peer id at the end (/p2p/...) is missing")
    _check_peer_id(text, peer_id)
    direct, relay, relayed = maddr.partition("/p2p/")
    if relay:
        relay_id = relayed.removesuffix(_CIRCUIT)
        if relay_id == relayed:
            raise _wrong(text, f"'/p2p/' comes twice, and not as a relay's ({_CIRCUIT})")
        _check_peer_id(text, relay_id)
    _check_maddr(text, direct)
    return Address(maddr, peer_id)


def best_first(addresses: Iterable[str]) -> list[str]:
    """Without duplicates and port 0; public ones first, then relayed, LAN, bridges of containers, loopback.

    Otherwise in the order given. Takes addresses with or without `/p2p/...`.
    """
    return sorted((address for address in dict.fromkeys(addresses) if not _has_port_zero(address)), key=reach)


def reach(address: str) -> Reach:
    """How far away a peer may be that dials this address. Names and what cannot be judged count as public."""
    if _CIRCUIT in address:
        return Reach.RELAY
    parts = address.split("/")
    if len(parts) < 3 or parts[1] not in _IP_KINDS:
        return Reach.PUBLIC
    try:
        ip = ipaddress.ip_address(parts[2])
    except ValueError:
        return Reach.PUBLIC
    if ip.is_loopback:
        return Reach.LOOPBACK
    if ip.version == 4 and ip in _DOCKER_NETWORK:
        return Reach.BRIDGE
    return Reach.LAN if ip.is_private or ip.is_link_local else Reach.PUBLIC


def listening(host: str, port: int) -> str:
    """The address to listen on, of a host's IP and a port (0: any free one). Raises `AddressError`."""
    if not 0 <= port <= 65_535:
        raise AddressError(f"port {port}: it must be from 0 (any free port) to 65535")
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        raise AddressError(
            f"host '{host}' is not an IP address; use 0.0.0.0 for every interface, 127.0.0.1 for this machine"
        ) from None
    return f"/ip{ip.version}/{ip.compressed}/tcp/{port}"


def announced(entry: str, port: int) -> str:
    """The address to announce, of a public IP (and the port we listen on) or of a multiaddress without a peer id.

    Raises `AddressError`, also when no port is known: port 0 cannot be dialled.
    """
    if not entry.startswith("/"):
        if port == 0:
            raise AddressError(f"address to announce '{entry}' needs a fixed port to go with it, not any free one")
        try:
            ip = ipaddress.ip_address(entry)
        except ValueError:
            raise AddressError(
                f"address to announce '{entry}' is neither an IP address nor like /ip4/203.0.113.5/tcp/31337"
            ) from None
        entry = f"/ip{ip.version}/{ip.compressed}/tcp/{port}"
    maddr = entry.partition("/p2p/")[0]
    _check_maddr(entry, maddr)
    return maddr


def _check_peer_id(text: str, peer_id: str) -> None:
    try:
        raw = base58.b58decode(peer_id)
    except ValueError:
        raise _wrong(text, f"'{peer_id}' is not a peer id in base58") from None
    # a multihash: kind, length, digest; 0x00 is an Ed25519 key itself, 0x12 the SHA-256 of another key
    if len(raw) < 4 or raw[0] not in (0x00, 0x12) or raw[1] != len(raw) - 2:
        raise _wrong(text, f"'{peer_id}' is not a whole peer id; was it cut off in copying?")


def _check_maddr(text: str, maddr: str) -> None:
    parts = maddr.split("/")[1:]
    if len(parts) < 2 or parts[0] not in _HOST_KINDS:
        raise _wrong(text, f"it must start with one of {', '.join('/' + kind for kind in _HOST_KINDS)}")
    kind, host = parts[:2]
    if kind in _IP_KINDS:
        try:
            ip = ipaddress.ip_address(host)
        except ValueError:
            raise _wrong(text, f"'{host}' is not an IP address") from None
        if f"ip{ip.version}" != kind:
            raise _wrong(text, f"'{host}' is an IPv{ip.version} address behind /{kind}")
    elif not host:
        raise _wrong(text, f"the name after /{kind} is missing")
    if len(parts) < 4 or parts[2] not in ("tcp", "udp"):
        raise _wrong(text, "the port (/tcp/31337) is missing")
    port = parts[3]
    if not (port.isascii() and port.isdecimal() and 0 < int(port) <= 65_535):
        raise _wrong(text, f"port '{port}' is not a number from 1 to 65535")
    if parts[2] == "tcp" and len(parts) > 4:
        raise _wrong(text, f"'/{'/'.join(parts[4:])}' after the port is not understood")


def _has_port_zero(address: str) -> bool:
    parts = address.split("/")
    return len(parts) > 4 and parts[4] == "0"


def _wrong(text: str, reason: str) -> AddressError:
    shown = text if len(text) <= 200 else text[:200] + "..."
    return AddressError(f"address '{shown}': {reason}; the form is {FORM}")
