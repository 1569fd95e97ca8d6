"""hivemind's DHT node, in our own process and event loop."""

import asyncio
import logging
from collections.abc import Collection
from functools import partial
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
from peers.record_desk import RecordDesk, RecordStream
from peers.record_line import RecordLine
from peers.record_log import Page
from peers.record_store import RecordStore
from peers.record_wire import Ask
from peers.transport import Transport

NOT_A_MEMBER = "answers, but not as a member of a swarm"
_REPLICAS = 5
_NEAREST = 20
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
    """A node of the DHT that the members' records lie in, at the nodes nearest to the run's key.

    Which nodes these are is hivemind's affair. Reading and writing go over streams of our own (`peers.record_desk`),
    by which only what is new travels: hivemind's own look-up sends all records, from each of the nodes, each time.
    """

    def __init__(
        self, node: Any, daemon: Daemon, transport: Transport, store: RecordStore, *, client_only: bool
    ) -> None:
        """Use `start`."""
        self._node = node
        self._daemon = daemon
        self._transport = transport
        self._store = store
        self._client_only = client_only
        self._streams: dict[PeerId, RecordStream] = {}
        self.validator = store.validator

    @classmethod
    async def start(cls, daemon: Daemon, transport: Transport, *, max_life_s: float, client_only: bool = False) -> Self:
        """A node that knows nobody yet. `client_only`: it asks others, and answers and stores nothing.

        A record that lives longer than `max_life_s` from now is refused.
        """
        store = RecordStore(RecordValidator(max_life_s=max_life_s, clock=now), clock=now)
        node = await _create(daemon, store, client_only=client_only)
        if not client_only:
            await RecordDesk(transport, store.answer).start()
        return cls(node, daemon, transport, store, client_only=client_only)

    async def resume(self) -> None:
        """Goes on with a new node of the same id through a p2pd that was started again. It knows nobody yet."""
        self._node.is_alive = False
        self._hang_up()
        self._node = await _create(self._daemon, self._store, client_only=self._client_only, node_id=self._node.node_id)

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

    def holders(self, key: str) -> list[PeerId]:
        """The nodes that we know nearest to a key, nearest first; ours among them, unless it is a client."""
        wanted = DHTID.generate(source=key)
        nearest = self._node.protocol.routing_table.get_nearest_neighbors(wanted, _NEAREST, exclude=self._node.node_id)
        nodes = [(wanted.xor_distance(node_id), peer_id.to_base58()) for node_id, peer_id in nearest]
        if not self._client_only:
            nodes.append((wanted.xor_distance(self._node.node_id), self._daemon.peer_id))
        return [peer for _, peer in sorted(nodes)]

    async def survey(self, key: str) -> None:
        """Asks the nodes near a key for those nearer to it; those that do not answer are forgotten."""
        wanted = DHTID.generate(source=key)
        beside = DHTID(int(wanted) ^ 1)  # a key of its own: asked for `key` itself, nodes would send all records
        await self._node.find_nearest_nodes([beside])

    def line(self, key: str, holder: PeerId) -> RecordLine:
        """For reading from, and writing to, one holder of a key; ourselves, too."""
        return RecordLine(key_bytes(key), partial(self._ask, holder))

    def release(self, kept: Collection[PeerId]) -> None:
        """Closes the streams to all holders but those in `kept`."""
        for holder in self._streams.keys() - set(kept):
            self._streams.pop(holder).retire()

    async def forget(self, peer: PeerId) -> None:
        """The peer did not answer: no node of ours until it is met again."""
        protocol = self._node.protocol
        peer_id = PeerID.from_base58(peer)
        await protocol.update_routing_table(protocol.routing_table.get(peer_id=peer_id), peer_id, responded=False)

    def _hang_up(self) -> None:
        while self._streams:
            self._streams.popitem()[1].close()

    async def _ask(self, holder: PeerId, ask: Ask) -> Page:
        if holder == self._daemon.peer_id:
            return self._store.answer(ask)
        stream = self._streams.setdefault(holder, RecordStream(self._transport, holder))
        return await stream.ask(ask)

    async def close(self) -> None:
        """Answers nobody any more."""
        self._hang_up()
        if not self._daemon.alive():
            return
        try:
            async with asyncio.timeout(_CALL_S):
                await self._node.shutdown()
        except Exception as error:  # p2pd may be gone in the meantime
            _log.debug("the DHT node did not end in good order: %r", error)


async def _create(daemon: Daemon, store: RecordStore, *, client_only: bool, node_id: DHTID | None = None) -> Any:
    node = await DHTNode.create(
        p2p=daemon.p2p,
        node_id=node_id,
        num_replicas=_REPLICAS,
        wait_timeout=_CALL_S,
        # no caches: records are read elsewhere
        cache_locally=False,
        cache_nearest=0,
        cache_on_store=False,
        cache_refresh_before_expiry=0,
        client_mode=client_only,
        record_validator=store.validator,
    )
    node.protocol.storage = store.storage  # the node knows nobody yet, so nothing was stored in its own
    return node
