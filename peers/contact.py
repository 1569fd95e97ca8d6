"""The first contact with initial peers: at once, patient where it helps, and with a reason for each failure."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from peers.address import Address
from peers.daemon import Daemon
from peers.dht import NOT_A_MEMBER, Dht
from peers.errors import UnreachableError
from peers.identity import Identity
from peers.reasons import REFUSED

_CONNECT_S = 5.0
_RETRY_S = 0.2
_GRACE_S = 0.5  # for the others, once one has answered
_WORTH_RETRYING = (REFUSED, NOT_A_MEMBER)


@dataclass(slots=True)
class Contact:
    """How the contact with one address went."""

    address: Address
    reason: str = "no answer yet"
    """Why it failed; empty where it did not."""
    clock_ahead_s: float = 0.0
    """How far its clock is ahead of ours."""


async def meet(
    addresses: Sequence[Address], daemon: Daemon, dht: Dht, *, identity: Identity, patience_s: float
) -> list[Contact]:
    """Contacts all addresses at once; waits little for the others once one has answered.

    An address that refuses the connection, or whose DHT node is not up yet, is tried again for `patience_s`;
    any other failure is final.
    """
    contacts = [Contact(address) for address in addresses]
    tasks = {asyncio.create_task(_patiently(one, daemon, dht, identity, patience_s)) for one in contacts}
    try:
        pending = tasks
        while pending and all(one.reason for one in contacts):
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending:
            await asyncio.wait(pending, timeout=_GRACE_S)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return contacts


async def connect(address: Address, daemon: Daemon, dht: Dht) -> float:
    """Connects and makes DHT nodes known to each other; returns how far the other clock is ahead, seconds.

    Raises `UnreachableError`.
    """
    await daemon.connect(address, _CONNECT_S)
    return await dht.join(address.peer_id)


async def _patiently(one: Contact, daemon: Daemon, dht: Dht, identity: Identity, patience_s: float) -> None:
    if one.address.peer_id == daemon.peer_id:
        one.reason = f"it is this peer itself; another identity than {identity.path} is needed"
        return
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    while True:
        try:
            one.clock_ahead_s = await connect(one.address, daemon, dht)
            one.reason = ""
            return
        except UnreachableError as error:
            one.reason = str(error)
        if one.reason not in _WORTH_RETRYING or loop.time() > deadline:
            return
        await asyncio.sleep(_RETRY_S)
