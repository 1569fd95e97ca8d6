"""One process of a measured pair: `python -m benchmarks.exchange_child KIND RANK PARAMETERS FOLDER`.

Reads one JSON object a line from stdin and answers each with one on stdout, until stdin ends. "meet" hands over what
the other side's first line said, "prepare" makes everything ready that is not to be timed, "go" does the work.
"""

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import hivemind
import numpy as np
import torch
from hivemind.averaging.control import AveragingStage
from hivemind.compression import NoCompression, Quantile8BitQuantization, Uniform8BitQuantization
from hivemind.compression.quantization import Quantization
from hivemind.p2p import PeerID

from gasloc import mixing
from peers.address import parse
from peers.codec import CODECS
from peers.daemon import Daemon
from peers.exchange import Offer, PeerId, Slot
from peers.identity import Identity
from peers.libp2p import Libp2pTransport
from peers.stream_exchange import StreamExchange
from peers.thread import NetworkThread
from peers.transport import Handler, Transport

T = TypeVar("T")
Words = dict[str, Any]

MATRIX = 1024
PIECE_BYTES = 1 << 20
BARE = "/gasloc/benchmark/bare/1"
MOVEMENT = 1e-3
"""Standard deviation of what each side's parameters moved by in the round."""
APART = 3e-4
"""Standard deviation of how far the two sides were apart before it."""
FAR = ((0.005, 0.02), (0.012, 0.004))
"""Share of blocks in which the sides are further apart, and by how much: as many are sent again as in real runs."""
AVERAGED_WITHIN = 4e-4
"""Root mean square of the error of hivemind's averages; not to average at all is worse by far."""
LIMIT_S = 120.0


class Side(Protocol):
    """What is measured, as one of the two processes sees it."""

    def hello(self) -> Words:
        """What the other side must know."""

    def meet(self, other: Words) -> None:
        """Connects with the other side."""

    def prepare(self, what: str) -> None:
        """Makes ready for one measurement."""

    def go(self) -> Words:
        """Does it, and returns figures; `seconds` among them."""

    def close(self) -> None:
        """Leaves nothing behind."""


def matrices(parameters: int, seed: int, scale: float) -> dict[str, torch.Tensor]:
    """Random normal matrices of 2^20 elements, (1024, 1024) each."""
    noise = torch.Generator().manual_seed(seed)
    shape = MATRIX, MATRIX
    count = max(1, parameters // MATRIX**2)
    return {f"layers.{number:03}.weight": torch.randn(shape, generator=noise) * scale for number in range(count)}


def near_consensus(parameters: int, rank: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A peer's parameters at the start of a round, and after it: what two peers hold that are about to mix."""
    theta = matrices(parameters, seed=0, scale=0.02)
    apart, moved = matrices(parameters, 10 + rank, APART), matrices(parameters, 20 + rank, MOVEMENT)
    for number, (name, tensor) in enumerate(theta.items()):
        tensor += apart[name]
        if rank:
            blocks = tensor.view(-1, 512)
            places = torch.rand(len(blocks), generator=torch.Generator().manual_seed(number))
            least = 0.0
            for share, by in FAR:
                blocks[(places >= least) & (places < least + share)] += by
                least += share
    return theta, {name: tensor + moved[name] for name, tensor in theta.items()}


class Renamed:
    """A transport under whose protocols several exchanges may serve beside each other."""

    def __init__(self, transport: Transport, suffix: str) -> None:
        self._transport = transport
        self._suffix = suffix

    @property
    def me(self) -> PeerId:
        """Our own id."""
        return self._transport.me

    async def serve(self, protocol: str, handler: Handler) -> None:
        """See `Transport.serve`."""
        await self._transport.serve(protocol + self._suffix, handler)

    async def dial(self, peer: PeerId, protocol: str, *, timeout_s: float) -> Any:
        """See `Transport.dial`."""
        return await self._transport.dial(peer, protocol + self._suffix, timeout_s=timeout_s)


class Gasloc:
    """Our own exchange, and a bare stream of hivemind's over the same p2pd."""

    def __init__(self, rank: int, parameters: int, folder: Path) -> None:
        self._theta, self._phi = near_consensus(parameters, rank)
        self._thread = NetworkThread()
        identity = Identity.load_or_create(folder / f"gasloc-{rank}.key")
        self._daemon = self._call(Daemon.start(identity, host="127.0.0.1", port=0))
        self._transport = Libp2pTransport(self._daemon)
        self._dials = rank == 0
        self._partner = ""
        self._exchanges: dict[str, StreamExchange] = {}
        self._what = ""
        self._round = 0
        self._bare: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
        self._bare_done: asyncio.Future[None]

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return self._thread.call(work)

    def hello(self) -> Words:
        """Id and address."""
        return {"peer": self._daemon.peer_id, "address": self._call(self._daemon.addresses())[0]}

    def meet(self, other: Words) -> None:
        """Connects the two p2pd."""
        self._partner = other["peer"]
        if self._dials:
            self._call(self._daemon.connect(parse(other["address"]), 10.0))
        self._call(self._serve())

    async def _serve(self) -> None:
        for codec in CODECS:
            transport = Renamed(self._transport, f"/{codec}")
            exchange = StreamExchange(transport, run="benchmark", digest="d", codec=codec)
            await exchange.start()
            self._exchanges[codec] = exchange
        await self._daemon.p2p.add_binary_stream_handler(BARE, self._on_bare)

    def prepare(self, what: str) -> None:
        """`what`: "bare", or a codec."""
        self._what = what
        self._round += 1
        self._call(self._prepare_bare())

    async def _prepare_bare(self) -> None:
        loop = asyncio.get_running_loop()
        self._bare, self._bare_done = loop.create_future(), loop.create_future()

    async def _on_bare(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._bare.set_result((reader, writer))
        await self._bare_done

    def go(self) -> Words:
        """Trades with the other side and mixes, or moves as many bytes."""
        began = time.perf_counter()
        if self._what == "bare":
            self._call(self._move())
            return {"seconds": time.perf_counter() - began}
        return self._swap()

    def _swap(self) -> Words:
        began = time.perf_counter()
        offers = {self._partner: Offer(self._phi, start=self._theta)}
        swaps = self._call(self._exchanges[self._what].swap(Slot(self._round), offers, timeout_s=LIMIT_S))
        swap = swaps[self._partner]
        seconds = time.perf_counter() - began
        if swap.tensors is None:
            raise RuntimeError(f"a trade failed: {swap.reason}")
        weights = {self._daemon.peer_id: 0.5, self._partner: 0.5}
        mixing.mix(self._phi, {self._partner: swap.tensors}, weights, self._daemon.peer_id)
        mixed_s = time.perf_counter() - began
        return {"seconds": seconds, "mixed_seconds": mixed_s, "sent_bytes": swap.bytes_sent}

    async def _move(self) -> None:
        if self._dials:
            partner = PeerID.from_base58(self._partner)
            _, reader, writer = await self._daemon.p2p.call_binary_stream_handler(partner, BARE)
        else:
            reader, writer = await self._bare
        await asyncio.gather(self._write(writer), self._read(reader))
        writer.close()
        if not self._dials:
            self._bare_done.set_result(None)

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        for tensor in self._phi.values():
            data = tensor.view(-1).view(torch.uint8).numpy().data
            for start in range(0, len(data), PIECE_BYTES):
                writer.write(data[start : start + PIECE_BYTES])
                await writer.drain()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        left = sum(4 * tensor.numel() for tensor in self._phi.values())
        while left:
            piece = await reader.read(min(left, PIECE_BYTES))
            if not piece:
                raise RuntimeError(f"the bare stream ended with {left} bytes to come")
            left -= len(piece)

    def close(self) -> None:
        """Ends p2pd and the network thread."""
        self._call(self._transport.close())
        self._call(self._daemon.close())
        self._thread.close()


def extract(self: Quantization, serialized: Any) -> torch.Tensor:
    """`Quantization.extract` of hivemind 1.1.12, for its three codebooks; its own fails under numpy 2.4.

    `int()` of an array of one element raises there, upon which an averager goes on as if its partner had failed.
    """
    count = int(np.frombuffer(serialized.buffer, count=1, dtype=np.int64)[0])
    codebook = torch.as_tensor(np.frombuffer(serialized.buffer, offset=8, count=count, dtype=self.codebook_dtype))
    raw = np.frombuffer(serialized.buffer, offset=8 + codebook.nbytes, dtype=self.indices_dtype)
    indices = torch.as_tensor(raw, dtype=torch.int64).reshape(tuple(serialized.size))
    return codebook.to(getattr(torch, serialized.dtype))[indices].requires_grad_(serialized.requires_grad)


class Averager:
    """`hivemind.DecentralizedAverager`, one for each compression, timed from the trigger: a group stands by then."""

    def __init__(self, rank: int, parameters: int, folder: Path) -> None:
        self._compressions = {
            "averager": NoCompression(),
            "averager_uniform8": Uniform8BitQuantization(),
            "averager_quantile8": Quantile8BitQuantization(),
        }
        Quantization.extract = extract
        self._tensors = list(near_consensus(parameters, rank)[1].values())
        theirs = near_consensus(parameters, 1 - rank)[1].values()
        self._means = [(own + other).div_(2) for own, other in zip(self._tensors, theirs, strict=True)]
        self._what = ""
        self._rank = rank
        self._dht: Any = hivemind.DHT(start=True) if rank == 0 else None
        self._averagers: dict[str, Any] = {}
        self._control: Any = None

    def hello(self) -> Words:
        """The address of the first one's DHT."""
        return {"addresses": [str(maddr) for maddr in self._dht.get_visible_maddrs()]} if self._dht else {}

    def meet(self, other: Words) -> None:
        """Joins the DHT and starts the averagers."""
        if self._dht is None:
            self._dht = hivemind.DHT(initial_peers=other["addresses"], start=True)
        for name, compression in self._compressions.items():
            self._averagers[name] = hivemind.DecentralizedAverager(
                averaged_tensors=[tensor.clone() for tensor in self._tensors],
                dht=self._dht,
                prefix=name,
                target_group_size=2,
                min_group_size=2,
                min_matchmaking_time=2.0,
                request_timeout=1.0,
                compression=compression,
                start=True,
            )

    def prepare(self, what: str) -> None:
        """Finds the group, with the parameters as they were at first."""
        self._what = what
        with self._averagers[what].get_tensors() as tensors:
            for tensor, first in zip(tensors, self._tensors, strict=True):
                tensor.copy_(first)
        self._control = self._averagers[what].step(wait=False, require_trigger=True, timeout=LIMIT_S)
        deadline = time.monotonic() + LIMIT_S
        while self._control.stage is not AveragingStage.AWAITING_TRIGGER:
            if time.monotonic() > deadline:
                raise RuntimeError("hivemind's averager found no group")
            time.sleep(0.01)

    def go(self) -> Words:
        """Averages; raises `RuntimeError` where the result is not the mean, as a failed part is left out silently."""
        began = time.perf_counter()
        self._control.allow_allreduce()
        group = self._control.result()
        seconds = time.perf_counter() - began
        if len(group) != 2:
            raise RuntimeError(f"hivemind's averager averaged {len(group)} peers")
        self._check()
        return {"seconds": seconds}

    def _check(self) -> None:
        with self._averagers[self._what].get_tensors() as averaged:
            squares = [float((got - mean).square().mean()) for got, mean in zip(averaged, self._means, strict=True)]
        error = statistics.fmean(squares) ** 0.5
        if error > AVERAGED_WITHIN:
            raise RuntimeError(f"hivemind's average under {self._what} is off by {error:.2g}")

    def close(self) -> None:
        """Ends hivemind's processes."""
        for averager in self._averagers.values():
            averager.shutdown()
        if self._dht is not None:
            self._dht.shutdown()


class Gloo:
    """`torch.distributed` all-reduce over gloo, on loopback, of one flat tensor."""

    def __init__(self, rank: int, parameters: int, folder: Path) -> None:
        self._rank = rank
        self._store = folder / "gloo"
        self._row = torch.cat([tensor.view(-1) for tensor in near_consensus(parameters, rank)[1].values()])

    def hello(self) -> Words:
        """Nothing: both know the file."""
        return {}

    def meet(self, other: Words) -> None:
        """Joins the group."""
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.distributed.init_process_group("gloo", init_method=f"file://{self._store}", rank=self._rank, world_size=2)

    def prepare(self, what: str) -> None:
        """Nothing to do."""

    def go(self) -> Words:
        """Sums and halves, in place."""
        began = time.perf_counter()
        torch.distributed.all_reduce(self._row)
        self._row.div_(2)
        return {"seconds": time.perf_counter() - began}

    def close(self) -> None:
        """Leaves the group."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def serve(side: Side, requests: IO[str], answers: IO[str]) -> None:
    """Answers requests until they end."""

    def answer(words: Words) -> None:
        answers.write(json.dumps(words) + "\n")
        answers.flush()

    answer(side.hello())
    for line in requests:
        request: Words = json.loads(line)
        if request["do"] == "meet":
            side.meet(request["other"])
            answer({})
        elif request["do"] == "prepare":
            side.prepare(request["what"])
            answer({})
        else:
            answer(side.go())


def main() -> None:
    """Runs one side; what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    kind, rank, parameters, folder = sys.argv[1:]
    torch.set_num_threads(1)
    sides: dict[str, type[Gasloc] | type[Averager] | type[Gloo]] = {
        "gasloc": Gasloc,
        "averager": Averager,
        "gloo": Gloo,
    }
    side = sides[kind](int(rank), int(parameters), Path(folder))
    try:
        serve(side, sys.stdin, answers)
    finally:
        side.close()


if __name__ == "__main__":
    main()
