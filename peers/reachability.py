"""Who can be dialled, and so who can trade with whom. Pure: its facts come from records and dial-backs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peers.address import Reach, reach
from peers.dialback import Dialback, ip_of
from peers.exchange import PeerId
from peers.record import Member


@dataclass(frozen=True, slots=True)
class Standing:
    """How a peer can be dialled."""

    direct: bool
    """Others reach it by one of its own addresses."""
    relayed: bool = False
    """It has an address at a relay."""


def standing_of(member: Member) -> Standing:
    """How a member can be dialled, as its record shows it."""
    return Standing(member.reachable, any(reach(address) is Reach.RELAY for address in member.addresses))


def can_trade(one: Standing, other: Standing) -> tuple[bool, str]:
    """Whether two peers can open a stream to each other, and why. Symmetric in its arguments.

    One side that can be dialled is enough: the other dials it. Of two that cannot be, the lower id dials, and
    which one that is was not looked at here; so each needs an address at a relay.
    """
    if one.direct or other.direct:
        return True, "one of the two can be dialled"
    if one.relayed and other.relayed:
        return True, "neither can be dialled, but relays carry both"
    return False, "neither can be dialled, and no relay carries both"


def tradable(me: Standing, others: Mapping[PeerId, Standing]) -> tuple[set[PeerId], dict[PeerId, str]]:
    """Those of `others` that a peer can trade with, and for each of the rest why not."""
    can: set[PeerId] = set()
    why_not: dict[PeerId, str] = {}
    for peer, standing in others.items():
        possible, reason = can_trade(me, standing)
        if possible:
            can.add(peer)
        else:
            why_not[peer] = reason
    return can, why_not


def dialable(addresses: Sequence[str], found: Dialback | None) -> tuple[bool | None, str]:
    """Whether others can dial us at `addresses`, by what a peer found that tried, and why; None: not known."""
    if found is None:
        return None, "no peer has tried"
    if found.dialled:
        return True, "a peer has dialled this one"
    seen = ", ".join(found.observed)
    from_afar = bool(found.observed) and all(reach(ip_maddr(ip)) is not Reach.LOOPBACK for ip in found.observed)
    if from_afar and all(reach(address) is Reach.LOOPBACK for address in addresses):
        return False, f"this peer listens on this machine only, and others see it at {seen}"
    tried = {a: why for a, why in found.reasons.items() if ip_of(a) in found.observed}
    if tried:
        return False, "; ".join(f"{address.partition('/p2p/')[0]}: {why}" for address, why in tried.items())
    return None, f"others see this peer at {seen or 'no IP'}, and it announces none of that"


def ip_maddr(ip: str) -> str:
    """An IP as the beginning of a multiaddress."""
    return f"/ip6/{ip}" if ":" in ip else f"/ip4/{ip}"
