"""Named tensors between authenticated peers, over libp2p.

The names below are imported when they are first used: hivemind and torch take seconds.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peers.donor import RunCard, Snapshot
    from peers.errors import (
        AccessError,
        AddressError,
        DaemonError,
        IdentityError,
        LayoutError,
        NoDonorError,
        NotAdmittedError,
        PeersError,
        ProtocolError,
        RefusedError,
        UnreachableError,
        WireError,
    )
    from peers.exchange import Answer, Exchange, Offer, PeerId, Slot, Swap, Tensors
    from peers.memory_exchange import MemoryExchange
    from peers.node import Peer, PeerOptions
    from peers.record import Member, MemberState, Status
    from peers.thread import NetworkThread

__all__ = [
    "AccessError",
    "AddressError",
    "Answer",
    "DaemonError",
    "Exchange",
    "IdentityError",
    "LayoutError",
    "Member",
    "MemberState",
    "MemoryExchange",
    "NetworkThread",
    "NoDonorError",
    "NotAdmittedError",
    "Offer",
    "Peer",
    "PeerId",
    "PeerOptions",
    "PeersError",
    "ProtocolError",
    "RefusedError",
    "RunCard",
    "Slot",
    "Snapshot",
    "Status",
    "Swap",
    "Tensors",
    "UnreachableError",
    "WireError",
]

_HOMES = {
    "RunCard": "donor",
    "Snapshot": "donor",
    "Answer": "exchange",
    "Exchange": "exchange",
    "Offer": "exchange",
    "PeerId": "exchange",
    "Slot": "exchange",
    "Swap": "exchange",
    "Tensors": "exchange",
    "MemoryExchange": "memory_exchange",
    "Peer": "node",
    "PeerOptions": "node",
    "Member": "record",
    "MemberState": "record",
    "Status": "record",
    "NetworkThread": "thread",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'peers' has no attribute '{name}'")
    return getattr(importlib.import_module(f"peers.{_HOMES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return __all__
