"""Donors and newcomers in memory, for the tests of both."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import torch

from peers.donor import Donor, RunCard
from peers.download import OnProgress, fetch_state
from peers.manifest import CHUNK_BYTES, Snapshot
from peers.meter import Meter
from peers.pipes import PipeNetwork
from peers.shelf import ShelfLimits
from peers.wire import Kind, Wire
from tests.virtual_time import run

CARD = RunCard("tiny", "d" * 64, b'{"name":"tiny"}')
CHUNKS = 6
FLOATS = CHUNKS * CHUNK_BYTES // 4
STATE_BYTES = 4 * FLOATS + 4 + 16 + 6 + 2
"""So 7 chunks, the last one short and of several tensors."""
PREFIXES = ("theta/", "momentum/", "steps", "half", "mask")


def snapshot(round: int = 7) -> Snapshot:
    tensors = {
        "theta/w": torch.arange(float(FLOATS)),
        "theta/scale": torch.tensor(1.5),
        "momentum/w": torch.zeros(2, 0),
        "steps": torch.tensor([3, 4]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "mask": torch.tensor([True, False]),
    }
    return Snapshot(round, {"step": 105, "learning_rate": 3e-3, "name": "tiny"}, tensors)


def assert_same(left: Snapshot, right: Snapshot) -> None:
    assert left.round == right.round
    assert dict(left.meta) == dict(right.meta)
    assert left.tensors.keys() == right.tensors.keys()
    for name, tensor in left.tensors.items():
        assert tensor.dtype == right.tensors[name].dtype
        assert torch.equal(tensor, right.tensors[name])


async def donor(
    network: PipeNetwork,
    peer: str,
    provide: Callable[[], Snapshot | None] = snapshot,
    *,
    card: RunCard = CARD,
    max_downloads: int = 3,
    rate_bytes_per_s: int = 0,
    limits: ShelfLimits | None = None,
    meter: Meter | None = None,
) -> Donor:
    made = Donor(
        network.join(peer),
        card,
        provide,
        max_downloads=max_downloads,
        rate_bytes_per_s=rate_bytes_per_s,
        limits=limits or ShelfLimits(),
        meter=meter,
    )
    await made.start()
    return made


async def fetch(
    network: PipeNetwork,
    *donors: str,
    me: str = "N",
    ask: int = 4,
    busy_s: float = 300.0,
    limit_bytes: int = 2**30,
    meter: Meter | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> Snapshot:
    """As a newcomer, of the run that the card describes. Leaves no stream open."""
    transport = network.find(me) or network.join(me)
    try:
        return await fetch_state(
            transport,
            donors,
            run=CARD.run,
            digest=CARD.digest,
            ask=ask,
            busy_s=busy_s,
            limit_bytes=limit_bytes,
            prefixes=PREFIXES,
            meter=meter,
            on_progress=on_progress,
        )
    finally:
        assert transport.open_streams == 0


def play(scenario: Callable[[PipeNetwork], Coroutine[Any, Any, None]]) -> None:
    async def in_network() -> None:
        await scenario(PipeNetwork())

    run(in_network())


def speaks(*frames: Callable[[Wire], Awaitable[object]]) -> Callable[..., Coroutine[Any, Any, None]]:
    """A donor that says what it is told, whatever it is asked."""

    async def handler(peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer, "state")
        await wire.receive_header(Kind.HEADER)
        for send in frames:
            await send(wire)
        await wire.linger(60.0)

    return handler


def header(**fields: object) -> Callable[[Wire], Awaitable[object]]:
    return lambda wire: wire.send_header(Kind.HEADER, {"answer": "accept", "reason": ""} | fields)
