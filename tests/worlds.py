"""Places where exchanges meet, for tests that hold on each: one process, pipes in memory, p2pd on loopback."""

import asyncio
import inspect
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest
import uvloop

from peers.codec import CodecName
from peers.exchange import Exchange, PeerId
from peers.memory_exchange import MemoryExchange, MemoryHub
from peers.pipes import PipeNetwork
from peers.stream_exchange import StreamExchange
from tests import virtual_time

RUN = "tiny"
DIGEST = "d" * 64


class Closable(Exchange, Protocol):
    """An exchange that can be told to stop."""

    async def close(self) -> None: ...


class World(Protocol):
    """Makes exchanges that can reach each other."""

    @abstractmethod
    async def join(self, codec: CodecName = "fp32") -> Closable:
        """A new peer. One process needs no codec: values pass as they are."""

    @abstractmethod
    async def kill(self, exchange: Exchange) -> None:
        """The peer is gone, without a word."""

    @abstractmethod
    async def pause(self) -> None:
        """A moment passes in which everybody else does what they can."""


class MemoryWorld:
    """`MemoryExchange`, under virtual time."""

    def __init__(self) -> None:
        self._hub = MemoryHub()
        self._names = iter("DACB")

    async def join(self, codec: CodecName = "fp32") -> Closable:
        return MemoryExchange(self._hub, next(self._names))

    async def kill(self, exchange: Exchange) -> None:
        await self._hub.members[exchange.me].close()

    async def pause(self) -> None:
        await asyncio.sleep(1.0)


class PipesWorld:
    """`StreamExchange` over pipes, under virtual time."""

    def __init__(self) -> None:
        self.network = PipeNetwork()
        self._names = iter("DACB")

    async def join(self, codec: CodecName = "fp32") -> Closable:
        exchange = StreamExchange(self.network.join(next(self._names)), run=RUN, digest=DIGEST, codec=codec)
        await exchange.start()
        return exchange

    async def kill(self, exchange: Exchange) -> None:
        self.network.leave(exchange.me)

    async def pause(self) -> None:
        await asyncio.sleep(1.0)


class Libp2pWorld:
    """`StreamExchange` over real p2pd daemons on 127.0.0.1, in real time."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._addresses: dict[PeerId, list[str]] = {}
        self._closers: dict[PeerId, Callable[[], Awaitable[None]]] = {}

    async def join(self, codec: CodecName = "fp32") -> Closable:
        from peers.daemon import Daemon
        from peers.identity import Identity
        from peers.libp2p import Libp2pTransport

        identity = Identity.load_or_create(self._folder / f"{len(self._addresses)}.key")
        daemon = await Daemon.start(identity, host="127.0.0.1", port=0)
        transport = Libp2pTransport(daemon, lambda peer: self._addresses.get(peer, []))
        self._stack.push_async_callback(daemon.close)
        self._stack.push_async_callback(transport.close)
        self._addresses[daemon.peer_id] = await daemon.addresses()
        self._closers[daemon.peer_id] = daemon.close
        exchange = StreamExchange(transport, run=RUN, digest=DIGEST, codec=codec)
        await exchange.start()
        return exchange

    async def kill(self, exchange: Exchange) -> None:
        await self._closers[exchange.me]()

    async def pause(self) -> None:
        await asyncio.sleep(0.3)  # stands for a partner that is late; nothing is awaited by it


Scenario = Callable[[World], Coroutine[Any, Any, None]]


async def _over_libp2p(scenario: Scenario, folder: Path) -> None:
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        await scenario(Libp2pWorld(folder, stack))


def play(kind: str, scenario: Scenario, folder: Path) -> None:
    """Runs a scenario in a new world. Over libp2p: on uvloop, as peers do where it is installed, or on asyncio."""

    async def checked() -> None:
        if kind.startswith("libp2p"):
            await _over_libp2p(scenario, folder)
        else:
            await scenario(MemoryWorld() if kind == "memory" else PipesWorld())

    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
        "libp2p": uvloop.new_event_loop,
        "libp2p-asyncio": asyncio.SelectorEventLoop,
    }
    if kind in loops:
        with asyncio.Runner(loop_factory=loops[kind]) as runner:
            runner.run(checked())
    else:
        virtual_time.run(checked())


def in_every_world(scenario: Scenario) -> Callable[[str, Path], None]:
    """A scenario as a test, once in each world."""

    def test(kind: str, tmp_path: Path) -> None:
        play(kind, scenario, tmp_path)

    test.__name__ = scenario.__name__
    test.__doc__ = inspect.getdoc(scenario)
    return pytest.mark.parametrize("kind", ["memory", "pipes", "libp2p", "libp2p-asyncio"])(test)
