"""hivemind's DHT node, in our own process and event loop."""

import asyncio
import logging
from typing import Any, Self

from hivemind.dht import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.timed_storage import get_dht_time

from peers.daemon import Daemon
from peers.errors import UnreachableError
from peers.exchange import PeerId
from peers.record import RecordValidator

NOT_A_MEMBER = "answers, but not as a member of a swarm"
_REPLICAS = 5
_CALL_S = 2.0

_log = logging.getLogger(__name__)


def now() -> float:
    """The DHT's clock: unix time, seconds."""
    return float(get_dht_time())


def key_bytes(key: str) -> bytes:
    """A key as nodes store it and as signatures cover it, 20 bytes."""
    raw: bytes = DHTID.generate(source=key).to_bytes()
    return raw


class Dht:
    """Stores small records under a key, one for each peer, until they expire."""

    def __init__(self, node: Any, daemon: Daemon, validator: RecordValidator, *, client_only: bool) -> None:
        """Use `start`."""
        self._node = node
        self._daemon = daemon
        self._client_only = client_only
        self.validator = validator

    @classmethod
    async def start(cls, daemon: Daemon, *, max_life_s: float, client_only: bool = False) -> Self:
        """A node that knows nobody yet. `client_only`: it asks others, and answers and stores nothing.

        A record that lives longer than `max_life_s` from now is refused.
        """
        validator = RecordValidator(max_life_s=max_life_s, clock=now)
        node = await _create(daemon, validator, client_only=client_only)
        return cls(node, daemon, validator, client_only=client_only)

    async def resume(self) -> None:
        """Goes on with a new node of the same id through a p2pd that was started again. It knows nobody yet."""
        self._node.is_alive = False
        self._node = await _create(
            self._daemon, self.validator, client_only=self._client_only, node_id=self._node.node_id
        )

    async def join(self, peer: PeerId) -> float:
        """Makes a connected peer known to our node, and ours to it; returns how far its clock is ahead, seconds.

        Raises `UnreachableError` when it does not answer as a node of this DHT.
        """
        protocol = self._node.protocol
        peer_id = PeerID.from_base58(peer)
        request = dht_pb2.PingRequest(peer=protocol.node_info, validate=False)
        asked = now()
        try:
            answer = await protocol.get_stub(peer_id).rpc_ping(request, timeout=_CALL_S)
            answered = now()
            node_id = DHTID.from_bytes(answer.peer.node_id)
        except Exception as error:  # hivemind raises many kinds, for what the other side does
            _log.debug("no DHT at %s: %r", peer, error)
            raise UnreachableError(NOT_A_MEMBER) from None
        await protocol.update_routing_table(node_id, peer_id, responded=True)
        return float(answer.dht_time) - (asked + answered) / 2

    async def explore(self) -> None:
        """Asks the nodes we know for those near us, so that we are found and find."""
        await self._node.find_nearest_nodes([self._node.node_id])

    def knows(self, peer: PeerId) -> bool:
        """Whether the peer is in our routing table."""
        return self._node.protocol.routing_table.get(peer_id=PeerID.from_base58(peer)) is not None

    async def store(self, key: str, peer: PeerId, record: bytes, expires: float) -> bool:
        """Stores a record at the nodes nearest to the key. False when one with a later expiration is there."""
        stored: bool = await self._node.store(key, record, expires, subkey=peer)
        return stored

    async def find(self, key: str) -> dict[PeerId, tuple[bytes, float]]:
        """The latest record of each peer, and when it expires. What fails the validator is left out."""
        found = await self._node.get(key, latest=True)
        if found is None or not isinstance(found.value, dict):
            return {}
        return {
            peer: (record.value, record.expiration_time)
            for peer, record in found.value.items()
            if isinstance(peer, str) and isinstance(record.value, bytes)
        }

    async def close(self) -> None:
        """Answers nobody any more."""
        if not self._daemon.alive():
            return
        try:
            async with asyncio.timeout(_CALL_S):
                await self._node.shutdown()
        except Exception as error:  # p2pd may be gone in the meantime
            _log.debug("the DHT node did not end in good order: %r", error)


async def _create(
    daemon: Daemon, validator: RecordValidator, *, client_only: bool, node_id: DHTID | None = None
) -> Any:
    return await DHTNode.create(
        p2p=daemon.p2p,
        node_id=node_id,
        num_replicas=_REPLICAS,
        wait_timeout=_CALL_S,
        # no caches: a view is refreshed every second anyway, and what is seen must be what is stored
        cache_locally=False,
        cache_nearest=0,
        cache_on_store=False,
        cache_refresh_before_expiry=0,
        client_mode=client_only,
        record_validator=validator,
    )
