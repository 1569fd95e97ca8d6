"""p2pd, the libp2p daemon: started with our identity, connected with plain reasons, and ended with us.

p2pd is a child process in a session of its own, so that Ctrl-C in a terminal reaches us and not it. It ends by
itself within seconds when our connection to it breaks, however we end. We talk to it through a unix socket,
one connection a request; hivemind's DHT has its own connection.
"""

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr

from peers.address import Address, best_first, parse
from peers.circuit import HOP_PROTOCOL, ask_limit
from peers.direct import open_stream
from peers.errors import DaemonError, PeersError, UnreachableError
from peers.exchange import PeerId
from peers.identity import Identity
from peers.p2pd import RELAY_LIMIT, Plan, Role, check_free, orphans, plain_line, raw_peer_id, to_binary
from peers.reasons import plain_reason, port_trouble
from peers.sockets import Sockets, sweep

_START_S = 15.0
_END_S = 3.0
_ORPHAN_S = 10.0  # for the p2pd of a process of ours that was killed a moment ago
_ANSWER_S = 5.0  # for what p2pd answers by itself, without the network
_LIMIT_S = 10.0  # for what a relay on this machine answers another p2pd on it
_MOST_RELAY_STARTS = 10
_ONE_CORE_FROM = 5  # there p2pd's two relay services were ready in the right order in 60 of 60 starts

_log = logging.getLogger(__name__)

# hivemind's warnings are about its own inner life: they go where ours go, and no further than debug
use_hivemind_log_handler("nowhere")
logging.getLogger("hivemind").setLevel(logging.ERROR)


class Daemon:
    """A running p2pd. Made by `start`."""

    def __init__(self, identity: Identity, plan: Plan) -> None:
        """Use `start`."""
        self._identity = identity
        self._plan = plan
        self._process: asyncio.subprocess.Process | None = None
        self._log_task: asyncio.Task[None] | None = None
        self._words: deque[str] = deque(maxlen=20)
        self.abandoned = False
        """Killed on purpose, so that nobody starts it again."""
        self.sockets = Sockets()
        """Others after each `restart`."""
        self.peer_id: PeerId = identity.peer_id
        self.p2p: Any = None
        """hivemind's view of this p2pd, for its DHT; another one after each `restart`."""

    @classmethod
    async def start(
        cls,
        identity: Identity,
        *,
        host: str,
        port: int,
        announce: tuple[str, ...] = (),
        role: Role = Role.MEMBER,
        relays: Sequence[Address] = (),
    ) -> Self:
        """Starts p2pd, listening on `host` and `port` (0: any free one).

        `announce`: public IPs or multiaddresses to tell others instead of what p2pd finds out; an IP needs a
        port of our choosing. `relays`: peers that may relay for us, where we are hidden.
        Raises `AddressError` for what cannot be an address, and `DaemonError` with p2pd's reason when it does
        not start; nothing is left of it then.
        """
        daemon = cls(identity, Plan.read(host, port, announce, role, relays))
        await daemon._launch()
        return daemon

    async def restart(self) -> None:
        """Starts p2pd again after it has ended: the same identity, the same port, the same addresses announced.

        What was asked of the old one is to be asked again: the streams' handlers, the DHT's node. Raises
        `DaemonError` when it does not start; it counts as ended then, and may be started again.
        """
        await self.close()
        self.sockets = Sockets()
        await self._launch()

    @property
    def pid(self) -> int:
        """Of the p2pd process."""
        return self._child.pid

    @property
    def _child(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "start() comes first"
        return self._process

    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._child.returncode is None

    async def ended(self) -> None:
        """Waits until the process has ended, whatever the cause."""
        await self._child.wait()

    async def connect(self, address: Address, timeout_s: float) -> None:
        """Connects to a peer at one address.

        Raises `UnreachableError` with a short reason, such as "connection refused", within `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        await _knock(address.maddr, timeout_s)
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.CONNECT,
            connect=p2pd_pb2.ConnectRequest(
                peer=raw_peer_id(address.peer_id),
                addrs=[to_binary(address.maddr)],
                timeout=max(1, round(timeout_s)),
            ),
        )
        _, _, writer = await self.ask(request, max(deadline - loop.time(), 0.0))
        writer.close()

    async def addresses(self) -> list[str]:
        """Full addresses at which others can dial us now, best first. Empty when listening nowhere."""
        return [f"{maddr}/p2p/{self.peer_id}" for maddr in best_first(await self._identify())]

    async def connections(self, peer: PeerId) -> list[str]:
        """The multiaddresses from which a peer is connected to us; without `/p2p/...`. Raises `DaemonError`."""
        return (await self.connected()).get(peer, [])

    async def connected(self) -> dict[PeerId, list[str]]:
        """Every peer that is connected to us, and from which multiaddresses. Raises `DaemonError`."""
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS)
        response, _, writer = await self.ask(request, _ANSWER_S)
        writer.close()
        found: dict[PeerId, list[str]] = {}
        for info in response.peers:
            found.setdefault(PeerID(info.id).to_base58(), []).extend(str(Multiaddr(raw)) for raw in info.addrs)
        return found

    async def ask(self, request: Any, timeout_s: float) -> tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]:
        """Sends p2pd one request; returns its answer, and the connection, which is the caller's to close.

        Raises `UnreachableError` with a short reason when p2pd answers with an error or not within `timeout_s`,
        and `DaemonError` when it is gone.
        """
        try:
            reader, writer = await open_stream(self.sockets.control)
        except OSError:
            raise DaemonError(f"p2pd has ended; its last words: {self._said()}") from None
        response = p2pd_pb2.Response()
        try:
            async with asyncio.timeout(timeout_s):
                await write_pbmsg(writer, request)
                await read_pbmsg_safe(reader, response)
        except TimeoutError:
            writer.transport.abort()
            raise UnreachableError(f"silent for {timeout_s:.2g} s") from None
        except (OSError, EOFError):
            writer.transport.abort()
            raise DaemonError(f"p2pd has ended; its last words: {self._said()}") from None
        except BaseException:
            writer.transport.abort()
            raise
        if response.type == p2pd_pb2.Response.ERROR:
            writer.close()
            raise UnreachableError(plain_reason(response.error.msg, timeout_s))
        return response, reader, writer

    async def open(
        self, peer: PeerId, protocol: str, timeout_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Opens a stream to a peer; p2pd knows where it is, or finds out. Raises as `ask` does."""
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_OPEN,
            streamOpen=p2pd_pb2.StreamOpenRequest(
                peer=raw_peer_id(peer), proto=[protocol], timeout=max(1, round(timeout_s))
            ),
        )
        _, reader, writer = await self.ask(request, timeout_s)
        return reader, writer

    async def close(self) -> None:
        """Ends p2pd and waits for it; removes its sockets. May be called twice, and after p2pd died."""
        if self._child.returncode is None:
            # first of all: p2pd also ends when hivemind's connection does, and ending it a second time confuses
            # asyncio's child watcher
            with contextlib.suppress(ProcessLookupError):
                self._child.terminate()
        if self.p2p is not None:
            await _quietly_shut(self.p2p)
            self.p2p = None
        if self._child.returncode is None:
            try:
                async with asyncio.timeout(_END_S):
                    await self._child.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._child.kill()
                await self._child.wait()
        if self._log_task:
            await asyncio.wait({self._log_task}, timeout=_END_S)
            self._log_task.cancel()
            self._log_task = None
        self.sockets.remove()

    def abandon(self) -> None:
        """Kills p2pd and removes its sockets, at once and from any thread: for a process that exits now."""
        self.abandoned = True
        with contextlib.suppress(ProcessLookupError):
            if self._child.returncode is None:
                os.kill(self._child.pid, signal.SIGKILL)
        self.sockets.remove()

    async def _launch(self) -> None:
        """Raises `DaemonError`; nothing is left then."""
        if self._plan.role is not Role.RELAY:
            await self._launch_once({})
            return
        begun_with = self._plan
        for number in range(_MOST_RELAY_STARTS):
            await self._launch_once({} if number < _ONE_CORE_FROM else {"GOMAXPROCS": "1"})
            try:
                reason = await self._why_limited()
            except BaseException:
                await self.close()
                raise
            if not reason:
                return
            _log.debug("%s; starting p2pd again", reason)
            await self.close()
            self._plan, self.sockets = begun_with, Sockets()
        raise DaemonError(f"p2pd did not become a relay in {_MOST_RELAY_STARTS} starts: {reason}; start it again")

    async def _why_limited(self) -> str:
        """Why our p2pd, a relay, does not carry as much as its plan says; empty where it does. See `circuit`.

        Asks it through another p2pd, for that moment: none can ask itself. Raises `DaemonError`.
        """
        with tempfile.TemporaryDirectory(prefix="gasloc-relay-") as folder:
            identity = Identity.load_or_create(Path(folder) / "identity.key")
            asker = await type(self).start(identity, host="127.0.0.1", port=0, role=Role.VISITOR)
            try:
                await self.connect(parse((await asker.addresses())[0]), _LIMIT_S)
                limit = await ask_limit(*await asker.open(self.peer_id, HOP_PROTOCOL, _LIMIT_S), _LIMIT_S)
            except DaemonError:
                raise
            except PeersError as error:
                return str(error)
            finally:
                await asker.close()
        if limit == RELAY_LIMIT:
            return ""
        return f"it carries {limit.data_bytes} bytes and {limit.time_s} s a connection"

    async def _launch_once(self, environment: dict[str, str]) -> None:
        """Starts p2pd, with more in its environment. Raises `DaemonError`; nothing is left then."""
        if self._plan.port and self._plan.role is not Role.CLIENT:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ORPHAN_S):
                    await _no_orphans(self._identity)
            check_free(self._plan.host, self._plan.port)
        sweep()
        self._process = await self._spawn(self._plan.command(self._identity, self.sockets), environment)
        try:
            async with asyncio.timeout(_START_S):
                await self._settle()
                self._plan = self._plan.settled(await self._identify())
        except (TimeoutError, UnreachableError):  # the second: it runs, and does not answer us
            await self.close()
            raise DaemonError(f"p2pd did not start in {_START_S:g} s; its last words: {self._said()}") from None
        except BaseException:
            await self.close()
            raise

    async def _spawn(self, words: list[str], more: dict[str, str]) -> asyncio.subprocess.Process:
        """Starts the program. Cancelled meanwhile, it ends it: the process may be there before we have hold of it."""
        environment = dict(os.environ, GOLOG_LOG_LEVEL="warn", GOLOG_LOG_FMT="json") | more
        spawning = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        )
        try:
            return await asyncio.shield(spawning)
        except OSError as error:
            raise DaemonError(f"p2pd at {words[0]} cannot be run: {error.strerror}; reinstall hivemind") from None
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                self._process = await spawning
                await self.close()
            raise

    async def _settle(self) -> None:
        """Waits until p2pd says that it runs, and connects hivemind to it."""
        output = self._child.stdout
        assert output is not None
        while line := await output.readline():
            words = plain_line(line)
            self._words.append(words)
            if words.startswith("Peer ID:"):
                break
        else:
            await self._child.wait()
            raise DaemonError(port_trouble(self._plan.where, self._said("nothing")))
        if not words.endswith(self.peer_id):
            raise DaemonError(f"p2pd took another identity: it says '{words}', we are {self.peer_id}")
        self._log_task = asyncio.create_task(self._log_output(output))
        prefix = {"_UNIX_SOCKET_PREFIX": f"/unix{self.sockets.stem}-"}
        client: Any = type("Client", (P2P,), prefix)
        self.p2p = await client.replicate(Multiaddr(f"/unix{self.sockets.control}"))

    async def _identify(self) -> list[str]:
        """The multiaddresses that p2pd tells others, in no order."""
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY)
        response, _, writer = await self.ask(request, _ANSWER_S)
        writer.close()
        return [str(Multiaddr(raw)) for raw in response.identify.addrs]

    async def _log_output(self, output: asyncio.StreamReader) -> None:
        # p2pd would stop at a full pipe if nobody read it
        with contextlib.suppress(ValueError):  # a line over the reader's limit: the rest is of no use either
            while line := await output.readline():
                self._words.append(plain_line(line))
                _log.debug("p2pd: %s", self._words[-1])
        while await output.read(1 << 16):
            pass

    def _said(self, silent: str = "none") -> str:
        return self._words[-1] if self._words else silent


async def _knock(maddr: str, timeout_s: float) -> None:
    """Raises `UnreachableError` when a TCP address refuses us.

    p2pd does not dial an address again for seconds after a failure; this asks without its knowing, so that a
    peer that starts a moment later is found.
    """
    _, kind, host, transport, port, *_ = [*maddr.split("/"), "", ""]
    if transport != "tcp" or kind == "dnsaddr":
        return
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, int(port))
    except TimeoutError:
        raise UnreachableError(f"silent for {timeout_s:.2g} s") from None
    except OSError as error:
        raise UnreachableError(plain_reason(str(error), timeout_s)) from None
    writer.transport.abort()


async def _no_orphans(identity: Identity) -> None:
    """Waits until what a killed process of ours left has ended: it holds our port."""
    while True:
        if not orphans(identity):
            return
        await asyncio.sleep(0.1)


async def _quietly_shut(p2p: Any) -> None:
    """Ends hivemind's own tasks on the connection to p2pd, and waits for them."""
    control = p2p._client.control
    tasks = [task for task in (control._read_task, control._write_task) if task is not None]
    await p2p.shutdown()
    await asyncio.gather(*tasks, return_exceptions=True)
