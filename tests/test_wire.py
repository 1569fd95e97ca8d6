"""Frames, tables and bodies: whole or refused, within limits, whatever the bytes."""

import asyncio
import itertools
import json
import struct
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.body import Body, NoDigest, check_layout, new_digest, receive_table, receive_tensors
from peers.errors import LayoutError, ProtocolError, RefusedError, WireError
from peers.exchange import TensorSpec, layout_of
from peers.pipes import Fault, FaultKind, PipeNetwork
from peers.table import Entry, decode_table, encode_table, first_difference
from peers.wire import BLOCK_BYTES, MAX_HEADER_BYTES, Kind, Wire, clean, decode_json
from tests.virtual_time import run

T = TypeVar("T")
Talk = Callable[[Wire], Awaitable[T]]


def talk(speak: Talk[object], listen: Talk[T], *faults: Fault) -> T:
    """What `listen` returns or raises at the accepting end of a stream on which the dialler speaks."""

    async def both() -> T:
        network = PipeNetwork()
        heard: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def handler(peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                heard.set_result(await listen(Wire(reader, writer, "exchange")))
            except Exception as error:
                heard.set_exception(error)

        await network.join("B").serve("/t", handler)
        network.order("/t", *faults)
        wire = Wire(*await network.join("A").dial("B", "/t", timeout_s=1.0), "exchange")
        speaking = asyncio.ensure_future(speak(wire))
        try:
            return await heard
        finally:
            speaking.cancel()
            await asyncio.gather(speaking, return_exceptions=True)
            wire.cut()

    return run(both(), limit_s=600.0)


def raw(data: bytes, listen: Talk[T]) -> T:
    """What `listen` makes of a stream that carries just these bytes, and then ends."""

    async def fed() -> T:
        network = PipeNetwork()
        await network.join("B").serve("/t", _nothing)
        _, writer = await network.join("A").dial("B", "/t", timeout_s=1.0)
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        try:
            return await listen(Wire(reader, writer, "exchange"))
        finally:
            writer.transport.abort()

    return run(fed())


async def _nothing(peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    return


def frame(kind: int, payload: bytes, *, length: int | None = None) -> bytes:
    said = len(payload) if length is None else length
    checksum = xxhash.xxh3_64_intdigest(payload, seed=kind | said << 8) & 0xFFFFFFFF
    return struct.pack("<BII", kind, said, checksum) + payload


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "big": torch.randn(3, BLOCK_BYTES // 8, generator=generator),  # one and a half blocks
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(2, 0),
        "counts": torch.arange(5),
        "flags": torch.tensor([True, False]),
        "half": torch.ones(3, dtype=torch.bfloat16),
    }


def sends(body: Body) -> Talk[None]:
    return lambda wire: body.send(wire, NoDigest())


async def take(wire: Wire) -> dict[str, torch.Tensor]:
    entries = await receive_table(wire, NoDigest())
    check_layout(entries, layout_of(tensors()))
    return await receive_tensors(wire, entries, NoDigest())


def test_a_body_arrives_whole() -> None:
    received = talk(sends(Body(tensors(), "fp32")), take)
    for name, tensor in tensors().items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor)


@pytest.mark.parametrize("codec", ["fp16", "bf16"])
def test_a_narrow_codec_halves_the_bytes(codec: str) -> None:
    sent = {"w": torch.linspace(-3, 3, 1_000_000), "large": torch.tensor([1e38])}

    async def count(wire: Wire) -> tuple[int, dict[str, torch.Tensor]]:
        entries = await receive_table(wire, NoDigest())
        return wire.received_bytes, await receive_tensors(wire, entries, NoDigest())

    body = Body(sent, "fp16" if codec == "fp16" else "bf16")
    size_bytes = sum(len(block) for block in body.blocks())
    assert size_bytes == 2_000_000 + (4 if codec == "fp16" else 2)
    _, received = talk(sends(body), count)
    assert torch.allclose(received["w"], sent["w"], rtol=2**-8, atol=2**-24)
    assert torch.allclose(received["large"], sent["large"], rtol=2**-8)


def test_both_sides_compute_the_same_digest() -> None:
    ours, theirs = new_digest(), new_digest()

    async def listen(wire: Wire) -> None:
        await receive_tensors(wire, await receive_table(wire, theirs), theirs)

    body = Body(tensors(), "fp16")
    talk(lambda wire: body.send(wire, ours), listen)
    assert ours.hexdigest() == theirs.hexdigest()


def test_every_garbled_byte_of_a_small_body_is_noticed() -> None:
    body = Body({"w": torch.arange(4.0)}, "fp32")
    size_bytes = 9 + len(body.table) + 9 + 16

    async def listen(wire: Wire) -> None:
        await receive_tensors(wire, await receive_table(wire, NoDigest()), NoDigest())

    async def speak(wire: Wire) -> None:
        await body.send(wire, NoDigest())
        await wire.close(1.0)

    talk(speak, listen)
    for at in range(size_bytes):
        with pytest.raises((WireError, RefusedError, ProtocolError)):
            talk(speak, listen, Fault(FaultKind.GARBLE, after_bytes=at))
        with pytest.raises(WireError):
            talk(speak, listen, Fault(FaultKind.CUT, after_bytes=at))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "ended"),
        (b"\x01\x02", "ended"),
        (frame(Kind.HEADER, b"{}")[:-1], "ended"),
        (frame(99, b"{}"), "unknown kind 99"),
        (frame(Kind.BLOCK, b"{}"), "a BLOCK frame where HEADER was due"),
        (frame(Kind.HEADER, b"", length=MAX_HEADER_BYTES + 1), "over the limit of 65536"),
        (frame(Kind.HEADER, b"", length=2**32 - 1), "over the limit of 65536"),
        (frame(Kind.HEADER, b"{}")[:-1] + b"]", "checksum"),
        (frame(Kind.HEADER, b"[]"), "a JSON list"),
        (frame(Kind.HEADER, b"{" * 60_000), "not JSON"),
        (frame(Kind.HEADER, b'{"a":' * 10_000), "not JSON"),
        (frame(Kind.HEADER, b"[" * 60_000), "not JSON"),
        (frame(Kind.HEADER, b'{"a":1,"a":2}'), "twice"),
        (frame(Kind.HEADER, b'{"a":NaN}'), "NaN is not JSON"),
        (frame(Kind.HEADER, b'{"a":' + b"9" * 5000 + b"}"), "not JSON"),
        (frame(Kind.HEADER, b'{"a":"\xff"}'), "not JSON"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_a_header(data: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        raw(data, lambda wire: wire.receive_header(Kind.HEADER))


def test_an_abort_anywhere_carries_its_reason() -> None:
    data = frame(Kind.ABORT, b'{"reason":"no\\nroom\\u0007"}')
    with pytest.raises(RefusedError, match=r"^no room$"):
        raw(data, lambda wire: wire.receive_header(Kind.HEADER))
    with pytest.raises(RefusedError, match="no reason given"):
        raw(frame(Kind.ABORT, b"{}"), lambda wire: wire.receive_block(memoryview(bytearray(4))))


def test_a_block_of_another_length_is_not_read() -> None:
    data = frame(Kind.BLOCK, b"12345678")
    with pytest.raises(WireError, match="a block of 8 bytes where 4 were due"):
        raw(data, lambda wire: wire.receive_block(memoryview(bytearray(4))))


@given(st.binary(max_size=400))
def test_any_bytes_are_a_header_or_a_protocol_error(data: bytes) -> None:
    for bytes_ in (data, frame(Kind.HEADER, data), frame(Kind.TABLE, data)):
        with pytest.raises((ProtocolError, RefusedError)):
            raw(bytes_, _header_then_table)


async def _header_then_table(wire: Wire) -> None:
    await wire.receive_header(Kind.HEADER)
    await receive_table(wire, NoDigest())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
rows = st.lists(
    json_values
    | st.tuples(
        st.text(max_size=3),
        st.sampled_from(["float32", "int64", "float16", "complex64"]),
        st.sampled_from(["float32", "float16"]),
        st.lists(st.integers(-1, 2**50), max_size=3),
    ).map(list),
    max_size=4,
)


@given(rows | json_values)
def test_any_json_is_a_table_or_a_protocol_error(value: object) -> None:
    payload = json.dumps({"tensors": value}).encode()
    try:
        entries = decode_table(payload)
    except ProtocolError:
        return
    assert decode_table(encode_table(entries)) == entries


@settings(max_examples=200)
@given(st.data())
def test_a_mutated_stream_is_refused_and_never_taken_for_another(data: st.DataObject) -> None:
    body = Body({"a": torch.arange(6.0), "b": torch.ones(2, 2)}, "fp16")
    stream = frame(Kind.TABLE, body.table) + b"".join(frame(Kind.BLOCK, bytes(block)) for block in body.blocks())
    at = data.draw(st.integers(0, len(stream) - 1))
    removed = data.draw(st.integers(0, 8))
    added = data.draw(st.binary(max_size=8))
    mutated = stream[:at] + added + stream[at + removed :]

    async def listen(wire: Wire) -> dict[str, torch.Tensor]:
        entries = await receive_table(wire, NoDigest())
        check_layout(entries, {"a": TensorSpec((6,), torch.float32), "b": TensorSpec((2, 2), torch.float32)})
        return await receive_tensors(wire, entries, NoDigest())

    try:
        received = raw(mutated, listen)
    except (ProtocolError, RefusedError):
        return
    assert torch.equal(received["a"], torch.arange(6.0))
    assert torch.equal(received["b"], torch.ones(2, 2))


def table(*rows: list[object]) -> bytes:
    return json.dumps({"tensors": list(rows)}).encode()


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"{}", "without a list"),
        (table(["w", "float32", "float32"]), "row"),
        (table(["w", "float32", "float32", [-1]]), "impossible shape"),
        (table(["w", "float32", "float32", [True]]), "impossible shape"),
        (table(["w", "float32", "float32", [2.0]]), "impossible shape"),
        (table(["w", "float32", "float32", [1] * 17]), "impossible shape"),
        (table(["w", "float32", "float32", [2**60]]), "impossible shape"),
        (table(["w", "complex64", "float32", []]), "unknown dtype"),
        (table(["w", ["float32"], "float32", []]), "unknown dtype"),
        (table(["", "float32", "float32", []]), "name"),
        (table(["a\n", "float32", "float32", []]), "name"),
        (table(["\ud800", "float32", "float32", []]), "name"),
        (table(["b", "float32", "float32", []], ["a", "float32", "float32", []]), "out of order"),
        (table(["a", "float32", "float32", []], ["a", "float32", "float32", []]), "out of order"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_a_table(payload: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        decode_table(payload)


@pytest.mark.parametrize(("dtype", "wire_dtype"), [("int64", "float16"), ("float32", "float64"), ("bool", "int8")])
def test_a_conversion_that_no_codec_makes_is_refused(dtype: str, wire_dtype: str) -> None:
    payload = table(["w", dtype, wire_dtype, [2]])
    with pytest.raises(ProtocolError, match="cannot travel as"):
        raw(frame(Kind.TABLE, payload), lambda wire: receive_table(wire, NoDigest()))


def test_a_table_of_the_largest_sizes_allocates_nothing() -> None:
    entries = decode_table(table(["w", "float32", "float32", [2**47] * 16]))
    with pytest.raises(LayoutError, match="'w' is float32"):
        check_layout(entries, {"w": TensorSpec((2,), torch.float32)})

    async def believe(wire: Wire) -> object:
        return await receive_tensors(wire, [Entry("w", (2**47,), torch.float32, torch.float32)], NoDigest())

    with pytest.raises(WireError, match="no memory for tensor 'w'"):
        raw(b"", believe)


def test_the_first_difference_is_named() -> None:
    one = {"a": TensorSpec((2,), torch.float32), "b": TensorSpec((), torch.float64)}
    assert first_difference(one, dict(reversed(one.items()))) is None
    assert first_difference(one, {"a": one["a"]}) == "tensor 'b' is missing"
    assert first_difference({"b": one["b"]}, one) == "tensor 'a' is not expected"
    other = one | {"b": TensorSpec((1,), torch.float64)}
    assert first_difference(one, other) == "tensor 'b' is float64 [1] where float64 [] is expected"


@given(st.text())
def test_clean_makes_one_printable_line(text: str) -> None:
    line = clean(text)
    assert line.isprintable()
    assert len(line) <= 400
    line.encode()


@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_json_is_an_object_or_a_protocol_error(payload: bytes) -> None:
    try:
        assert isinstance(decode_json(payload), dict)
    except ProtocolError as error:
        reason = str(error)
    else:
        reason = ""
    assert "\n" not in reason


def test_a_slow_stream_shows_progress_within_a_block() -> None:
    """Whoever waits for progress sees some long before ten seconds, in which a block goes out; and each byte once."""
    told: list[tuple[float, int]] = []

    async def speak(wire: Wire) -> None:
        loop = asyncio.get_running_loop()
        wire.on_moved(lambda size_bytes: told.append((loop.time(), size_bytes)))
        for _ in range(2):
            await wire.send_block(memoryview(bytes(BLOCK_BYTES)))

    async def listen(wire: Wire) -> int:
        for _ in range(2):
            await wire.receive_block(memoryview(bytearray(BLOCK_BYTES)))
        return wire.received_bytes

    received_bytes = talk(speak, listen, Fault(FaultKind.SLOW, bytes_per_s=BLOCK_BYTES / 10))
    assert sum(size_bytes for _, size_bytes in told) == received_bytes
    assert all(size_bytes > 0 for _, size_bytes in told)
    assert max(later - earlier for (earlier, _), (later, _) in itertools.pairwise(told)) < 2
    assert told[-1][0] - told[0][0] > 15
