"""p2pd, the libp2p daemon: started with our identity, connected with plain reasons, and ended with us.

p2pd is a child process in a session of its own, so that Ctrl-C in a terminal reaches us and not it. It ends by
itself within seconds when our connection to it breaks, however we end. We talk to it through a unix socket,
one connection a request; hivemind's DHT has its own connection.
"""

import asyncio
import contextlib
import importlib.resources
import json
import logging
import os
import re
import signal
import socket
from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import Any, Self

import hivemind.hivemind_cli
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr

from peers.address import Address, Reach, announced, best_first, listening, reach
from peers.direct import open_stream
from peers.errors import DaemonError, UnreachableError
from peers.exchange import PeerId
from peers.identity import Identity
from peers.sockets import Sockets, sweep

REFUSED = "connection refused"
"""The reason when nobody listens at an address."""

_START_S = 15.0
_END_S = 3.0
_IDLE_S = 15  # p2pd ends when nobody holds a connection to it for this long after its start
_ANSWER_S = 5.0  # for what p2pd answers by itself, without the network

_P2P_CODE = bytes.fromhex("a503")  # "p2p" and "p2p-circuit" in a binary multiaddress
_CIRCUIT_CODE = bytes.fromhex("a202")
_CIRCUIT = "/p2p-circuit"
_RELAY_DATA_BYTES = 1 << 40
_RELAY_TIME_S = 24 * 3600

_log = logging.getLogger(__name__)


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


# hivemind's warnings are about its own inner life: they go where ours go, and no further than debug
use_hivemind_log_handler("nowhere")
logging.getLogger("hivemind").setLevel(logging.ERROR)


class Daemon:
    """A running p2pd. Made by `start`."""

    def __init__(self, child: asyncio.subprocess.Process, sockets: Sockets, identity: Identity) -> None:
        self._child = child
        self.sockets = sockets
        self._log_task: asyncio.Task[None] | None = None
        self._words: deque[str] = deque(maxlen=20)
        self.peer_id: PeerId = identity.peer_id
        self.p2p: Any = None
        """hivemind's view of this p2pd, for its DHT."""

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
        where = listening(host, port)
        told = [announced(entry, port) for entry in announce]
        if port and role is not Role.CLIENT:
            check_free(host, port)
        sweep()
        sockets = Sockets()
        words = _command(identity, sockets, where, told, role, relays)
        environment = dict(os.environ, GOLOG_LOG_LEVEL="warn", GOLOG_LOG_FMT="json")
        try:
            child = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise DaemonError(f"p2pd at {words[0]} cannot be run: {error.strerror}; reinstall hivemind") from None
        daemon = cls(child, sockets, identity)
        try:
            async with asyncio.timeout(_START_S):
                await daemon._settle(where)
        except TimeoutError:
            await daemon.close()
            raise DaemonError(f"p2pd did not start in {_START_S:g} s; its last words: {daemon._said()}") from None
        except BaseException:
            await daemon.close()
            raise
        return daemon

    @property
    def pid(self) -> int:
        """Of the p2pd process."""
        return self._child.pid

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
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY)
        response, _, writer = await self.ask(request, _ANSWER_S)
        writer.close()
        found = [str(Multiaddr(raw)) for raw in response.identify.addrs]
        return [f"{maddr}/p2p/{self.peer_id}" for maddr in best_first(found)]

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
        self.sockets.remove()

    def abandon(self) -> None:
        """Kills p2pd and removes its sockets, at once and from any thread: for a process that exits now."""
        with contextlib.suppress(ProcessLookupError):
            if self._child.returncode is None:
                os.kill(self._child.pid, signal.SIGKILL)
        self.sockets.remove()

    async def _settle(self, where: str) -> None:
        """Waits until p2pd says that it runs, and connects hivemind to it."""
        output = self._child.stdout
        assert output is not None
        while line := await output.readline():
            words = _plain(line)
            self._words.append(words)
            if words.startswith("Peer ID:"):
                break
        else:
            await self._child.wait()
            raise DaemonError(_why_not(where, self._words))
        if not words.endswith(self.peer_id):
            raise DaemonError(f"p2pd took another identity: it says '{words}', we are {self.peer_id}")
        self._log_task = asyncio.create_task(self._log_output(output))
        prefix = {"_UNIX_SOCKET_PREFIX": f"/unix{self.sockets.stem}-"}
        client: Any = type("Client", (P2P,), prefix)
        self.p2p = await client.replicate(Multiaddr(f"/unix{self.sockets.control}"))

    async def _log_output(self, output: asyncio.StreamReader) -> None:
        # p2pd would stop at a full pipe if nobody read it
        with contextlib.suppress(ValueError):  # a line over the reader's limit: the rest is of no use either
            while line := await output.readline():
                self._words.append(_plain(line))
                _log.debug("p2pd: %s", self._words[-1])
        while await output.read(1 << 16):
            pass

    def _said(self) -> str:
        return self._words[-1] if self._words else "none"


def _command(
    identity: Identity, sockets: Sockets, where: str, told: list[str], role: Role, relays: Sequence[Address]
) -> list[str]:
    local = reach(where) is Reach.LOOPBACK
    with importlib.resources.as_file(importlib.resources.files(hivemind.hivemind_cli) / "p2pd") as program:
        words = [str(program)]
    words += [f"-id={identity.path}", f"-listen=/unix{sockets.control}", f"-idleTimeout={_IDLE_S}s"]
    words += ["-connManager=1", "-tls=1", "-relay=1"]
    if role is Role.CLIENT:
        return [*words, "-dhtClient=1", "-noListenAddrs=1", "-natPortMap=0", "-autonat=0", "-relayService=0"]
    words += ["-dhtServer=1" if role in (Role.MEMBER, Role.RELAY) else "-dhtClient=1", f"-hostAddrs={where}"]
    if told:
        words.append(f"-announceAddrs={','.join(told)}")
    if role is Role.RELAY:
        words += ["-forceReachabilityPublic=1", "-relayService=1", f"-relayTimeLimit={_RELAY_TIME_S}s"]
        words += [f"-relayDataLimit={_RELAY_DATA_BYTES}", "-autonat=1"]
        return [*words, "-natPortMap=0" if local else "-natPortMap=1"]
    if role is Role.HIDDEN:
        words += ["-forceReachabilityPrivate=1", "-relayService=0", "-autonat=0", "-natPortMap=0"]
        if relays:
            words += ["-autoRelay=1", f"-trustedRelays={','.join(str(relay) for relay in relays)}"]
        return words
    if local:  # nothing of ours may leave this machine
        return [*words, "-natPortMap=0", "-autonat=0", "-relayService=0"]
    if role is Role.VISITOR:
        return [*words, "-natPortMap=1", "-autonat=0", "-relayService=0"]
    return [*words, "-natPortMap=1", "-autonat=1", "-autoRelay=1"]


def to_binary(maddr: str) -> bytes:
    """A multiaddress as p2pd takes it; hivemind writes a relay's peer id in a form that p2pd cannot read."""
    direct, relay, relayed = maddr.partition("/p2p/")
    raw: bytes = Multiaddr(direct).to_bytes()
    if relay:
        peer = raw_peer_id(relayed.removesuffix(_CIRCUIT))
        raw += _P2P_CODE + bytes([len(peer)]) + peer + (_CIRCUIT_CODE if relayed.endswith(_CIRCUIT) else b"")
    return raw


def check_free(host: str, port: int) -> None:
    """Raises `DaemonError` where another process listens. p2pd itself would share the port with another p2pd."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port we had a moment ago is free
        try:
            probe.bind((host, port))
        except OSError as error:
            raise DaemonError(_port_trouble(f"{host} port {port}", str(error))) from None


def _why_not(where: str, words: deque[str]) -> str:
    said = words[-1] if words else "nothing"
    return _port_trouble(where, said)


def _port_trouble(where: str, said: str) -> str:
    lower = said.lower()
    if "address already in use" in lower:
        return f"{where} is already in use; choose another port, or 0 for any free one"
    if "permission denied" in lower:
        return f"{where} may not be used by this user; choose a port from 1024 up"
    if "cannot assign requested address" in lower:
        return f"{where} is not an address of this machine; use 0.0.0.0 for every interface"
    return f"p2pd did not start on {where}; it said: {said[:300]}"


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


def plain_reason(message: str, timeout_s: float) -> str:
    """A short reason in words, out of libp2p's or the system's long one."""
    lower = message.lower()
    other = re.search(r"peer id mismatch:.*?remote key matches (\w+)", message)
    if other:
        return f"answers with another id: {other[1]}"
    for part, reason in _REASONS:
        if part in lower:
            return reason.format(timeout_s=timeout_s)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no reason given"


_REASONS = (
    ("connection refused", REFUSED),
    ("connect call failed", REFUSED),
    ("dial to self", "it is this peer itself"),
    ("no route to host", "no route to host"),
    ("network is unreachable", "network is unreachable"),
    ("name or service not known", "no such host name"),
    ("no such host", "no such host name"),
    ("temporary failure in name resolution", "the host name cannot be looked up now"),
    ("protocols not supported", "it does not speak this protocol"),
    ("protocol not supported", "it does not speak this protocol"),
    ("dial backoff", "it did not answer a moment ago"),
    ("context deadline exceeded", "silent for {timeout_s:.2g} s"),
    ("i/o timeout", "silent for {timeout_s:.2g} s"),
    ("failed to negotiate security protocol", "what listens there is not a peer"),
    ("failed to find any peer in table", "no address of it is known"),
    ("routing: not found", "no address of it is known"),
    ("no addresses", "no address of it is known"),
    ("no good addresses", "no address of it can be dialled from here"),
    ("connection reset", "closed the connection"),
    ("stream reset", "closed the stream"),
)


def raw_peer_id(peer_id: PeerId) -> bytes:
    """A peer id as p2pd takes it. Raises `UnreachableError` for text that is none."""
    try:
        raw: bytes = PeerID.from_base58(peer_id).to_bytes()
    except ValueError:
        raw = b""
    if len(raw) < 4 or raw[1] != len(raw) - 2:
        raise UnreachableError(f"'{peer_id[:80]}' is not a peer id")
    return raw


def _plain(line: bytes) -> str:
    """One line of p2pd's output; of its JSON lines, the message and the error."""
    text = line.decode(errors="replace").strip()
    if not text.startswith("{"):
        return text
    try:
        entry = json.loads(text)
        return ": ".join(str(entry[key]) for key in ("msg", "error") if key in entry)
    except (ValueError, RecursionError):
        return text


async def _quietly_shut(p2p: Any) -> None:
    """Ends hivemind's own tasks on the connection to p2pd, and waits for them."""
    control = p2p._client.control
    tasks = [task for task in (control._read_task, control._write_task) if task is not None]
    await p2p.shutdown()
    await asyncio.gather(*tasks, return_exceptions=True)
