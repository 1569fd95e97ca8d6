"""Ten thousand garbled inputs for every reader of a stranger's bytes.

Each either takes an input or raises the error that its docstring names: no other error, no hang, and no more memory
than its stated limit. hypothesis looks for odd forms; a seeded loop turns, cuts, repeats and inserts bytes of good
ones, which passes more of the first checks.
"""

import asyncio
import contextlib
import json
import random
import shutil
import struct
import tempfile
import time
import tomllib
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from gasloc import checkpoint, recipe
from gasloc.card import read_card
from gasloc.errors import CheckpointError, RecipeError, RunError
from gasloc.recipe import Recipe
from peers.access import Access, GuardedTransport
from peers.body import NoDigest, receive_table
from peers.donor import CARD_PROTOCOL, STATE_PROTOCOL, Donor, RunCard, fetch_card
from peers.donor_streams import Newcomer, receive_manifest
from peers.download import fetch_state
from peers.errors import LayoutError, PeersError, ProtocolError
from peers.exchange import Slot
from peers.hello import Hello
from peers.identity import Identity, peer_id_of
from peers.manifest import CHUNK_BYTES, Snapshot, decode, prepare, read_entries
from peers.pipes import PipeNetwork
from peers.record import MAX_RECORD_BYTES, Member, MemberState, Status, seal, unseal
from peers.wire import MAX_HEADER_BYTES, Kind, Wire, decode_json, encode_json

INPUTS = 10_000
FORMS = settings(max_examples=300, deadline=None)
LONGEST_S = 2.0
"""Of the processor, for one input; a hang is ended by the test's time-out."""
KEY = b"k" * 20
EXPIRES = 1_700_000_020.0
A, B = (peer_id_of(bytes([number] * 32)) for number in (1, 2))
SECRET = Access(b"correct horse battery staple")
CARD = RunCard("tiny-1", Recipe().digest, Recipe().model_dump_json().encode())

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def mutations(good: bytes, count: int, *, seed: int = 1) -> Iterator[bytes]:
    """Good bytes with one to four faults each."""
    source = random.Random(seed)
    for _ in range(count):
        data = bytearray(good)
        for _ in range(source.choice((1, 1, 1, 2, 4))):
            at = source.randrange(len(data) + 1)
            match source.randrange(6):
                case 0:
                    data[at : at + 1] = bytes([source.randrange(256)])
                case 1:
                    del data[at:]
                case 2:
                    data[at:at] = source.randbytes(source.randrange(1, 9))
                case 3:
                    del data[at : at + source.randrange(1, 9)]
                case 4:
                    data[at:at] = data[: source.randrange(1, 40)]
                case _:
                    data[at : at + 4] = source.choice(
                        (b"\xff\xff\xff\xff", b"\0\0\0\0", b"99999999", b"[[[[", b"-1e9", b"null")
                    )
        yield bytes(data)


def check_all(take: Callable[[bytes], object], good: bytes, allowed: type[Exception], count: int = INPUTS) -> int:
    """Feeds mutations; returns how many were taken. Fails for another error, and for one that takes too long."""
    take(good)
    taken, words = 0, set()
    for data in mutations(good, count):
        began = time.thread_time()
        try:
            take(data)
            taken += 1
        except allowed as error:
            words.add(str(error))
        assert time.thread_time() - began < LONGEST_S, data
    assert taken < count
    assert all(line and "\n" not in line for line in words)
    return taken


@contextlib.contextmanager
def at_most(limit_bytes: int) -> Iterator[None]:
    """Fails where Python allocates more than that at any moment."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield
        assert tracemalloc.get_traced_memory()[1] - before <= limit_bytes
    finally:
        tracemalloc.stop()


def frame(kind: int, payload: bytes, *, length: int | None = None) -> bytes:
    said = len(payload) if length is None else length
    checksum = xxhash.xxh3_64_intdigest(payload, seed=kind | said << 8) & 0xFFFFFFFF
    return struct.pack("<BII", kind, said, checksum) + payload


class Sink(asyncio.Transport):
    """Takes what is written, and forgets it."""

    def write(self, data: bytes | bytearray | memoryview) -> None: ...

    def is_closing(self) -> bool:
        return True  # nothing is held open

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


class Frames:
    """Reads frames out of bytes, as a wire does out of a stream that ends after them."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def read(self, data: bytes) -> object:
        return self.loop.run_until_complete(self._read(data))

    async def _read(self, data: bytes) -> object:
        reader = asyncio.StreamReader()
        writer = asyncio.StreamWriter(Sink(), asyncio.StreamReaderProtocol(reader), reader, self.loop)
        reader.feed_data(data)
        reader.feed_eof()
        wire = Wire(reader, writer, "fuzz")
        header = await wire.receive_header(Kind.HEADER)
        entries = await receive_table(wire, NoDigest())
        await wire.receive_block(memoryview(bytearray(8)))
        return header, entries


@pytest.fixture
def frames() -> Iterator[Frames]:
    made = Frames()
    yield made
    made.loop.close()


CONVERSATION = b"".join(
    (
        frame(Kind.HEADER, encode_json({"answer": "accept", "reason": ""})),
        frame(Kind.TABLE, encode_json({"tensors": [["w", "float32", "float32", [2]]]})),
        frame(Kind.BLOCK, bytes(8)),
    )
)


def test_frames(frames: Frames) -> None:
    check_all(frames.read, CONVERSATION, PeersError)


def test_payloads_of_well_formed_frames(frames: Frames) -> None:
    """With right checksums, so that what is behind them is reached."""
    table = encode_json({"tensors": [["a", "int8", "int8", [2, 3]], ["w", "float32", "float16", [2]]]})
    head = CONVERSATION[: len(CONVERSATION) - len(frame(Kind.BLOCK, bytes(8)))]
    start = head[: head.index(b"}") + 1]
    check_all(
        lambda payload: frames.read(start + frame(Kind.TABLE, payload) + frame(Kind.BLOCK, bytes(8))), table, PeersError
    )


def test_a_frame_that_claims_four_gigabytes_costs_nothing(frames: Frames) -> None:
    for kind in Kind:
        data = frame(kind, b"x", length=2**32 - 1)
        with at_most(256 * 1024), pytest.raises(PeersError):
            frames.read(data)


def test_the_largest_header_takes_fifty_times_its_size_at_most() -> None:
    for payload in (
        b'{"a":[' + b"[]," * 21_000 + b"[]]}",
        b'{"a":[' + b"0," * 32_000 + b"0]}",
        b"[" * MAX_HEADER_BYTES,
        b'{"a":' * 13_000,
        b"{" + b",".join(b'"%d":1' % number for number in range(7_000)) + b"}",
    ):
        assert len(payload) <= MAX_HEADER_BYTES + 1
        with at_most(50 * MAX_HEADER_BYTES), contextlib.suppress(ProtocolError):
            decode_json(payload)


HELLO = Hello("tiny-1", "d" * 64, Slot(7, 1, "scatter"), 3.0, {"steps": 15.0})


def test_hellos() -> None:
    check_all(lambda data: Hello.from_json(decode_json(data)), encode_json(HELLO.to_json()), ProtocolError)


@FORMS
@given(st.sampled_from(sorted(HELLO.to_json())), json_values)
def test_hellos_of_any_form(key: str, value: object) -> None:
    with contextlib.suppress(ProtocolError):
        Hello.from_json(HELLO.to_json() | {key: value})


def identity() -> Identity:
    with tempfile.TemporaryDirectory() as folder:
        return Identity.load_or_create(Path(folder) / "me")


ME = identity()
MEMBER = Member(
    ME.peer_id,
    Status(7, MemberState.TRAINING, loss=2.5),
    "d" * 64,
    True,
    (f"/ip4/203.0.113.5/tcp/1/p2p/{ME.peer_id}",),
    EXPIRES,
)


def signed(body: bytes) -> bytes:
    """A record with the owner's right signature over any body."""
    parts = [b"gasloc member 1", KEY, ME.peer_id.encode(), struct.pack(">d", EXPIRES), body]
    return ME.sign(b"".join(len(part).to_bytes(4, "big") + part for part in parts)) + body


def test_records() -> None:
    record = seal(MEMBER, KEY, ME)
    taken = check_all(lambda data: unseal(data, KEY, ME.peer_id, EXPIRES), record, ProtocolError)
    assert taken <= INPUTS // 20, "only where a fault changed nothing"
    check_all(lambda data: unseal(signed(data), KEY, ME.peer_id, EXPIRES), record[64:], ProtocolError)


def test_a_record_of_a_megabyte_costs_nothing() -> None:
    record = bytes(1_000_000)
    with at_most(64 * 1024), pytest.raises(ProtocolError):
        unseal(record, KEY, ME.peer_id, EXPIRES)
    deep = signed(b"[" * (MAX_RECORD_BYTES - 64))
    with at_most(256 * 1024), pytest.raises(ProtocolError):
        unseal(deep, KEY, ME.peer_id, EXPIRES)


def test_recipes_as_json() -> None:
    def take(data: bytes) -> Recipe:
        try:
            values = json.loads(data)
        except (ValueError, RecursionError):
            raise RecipeError("not JSON, which is not for the recipe to say") from None
        return recipe.parse(values)

    check_all(take, CARD.document, RecipeError)


@FORMS
@given(json_values)
def test_recipes_of_any_form(value: Any) -> None:
    with contextlib.suppress(RecipeError):
        recipe.parse(value)
    whole = Recipe().model_dump(mode="json")
    for key in whole:
        with contextlib.suppress(RecipeError):
            recipe.parse(whole | {key: value})


def test_recipes_as_toml(tmp_path: Path) -> None:
    good = (
        b'name = "x"\nrounds = 3\n[model]\ndim = 32\nheads = 2\n[inner]\nclip_norm = 1e-2\n[exchange]\ngrace_s = 3.0\n'
    )
    path = tmp_path / "x.toml"

    def take(data: bytes) -> Recipe:
        path.write_bytes(data)
        return recipe.load(str(path))

    check_all(take, good, RecipeError, INPUTS // 5)  # through files; the rest without

    def parse(data: bytes) -> Recipe:
        try:
            return recipe.parse(tomllib.loads(data.decode()))
        except (UnicodeDecodeError, tomllib.TOMLDecodeError):
            raise RecipeError("not TOML, as told by `load`") from None

    check_all(parse, good, RecipeError, INPUTS - INPUTS // 5)


def test_run_cards() -> None:
    def take(data: bytes) -> Recipe:
        return read_card(RunCard("tiny-1", CARD.digest, data))

    check_all(take, CARD.document, RunError)


def test_checkpoints(tmp_path: Path) -> None:
    """Each of its two files garbled; another checkpoint beside it, so that there is something to fall back on."""
    whole = checkpoint.save(tmp_path, {"w": torch.arange(6.0), "b": torch.ones(2)}, {"digest": "d", "round": 3})
    names = sorted(path.name for path in whole.iterdir())
    for name in names:
        good = (whole / name).read_bytes()

        def take(data: bytes, file: Path = whole / name) -> object:
            file.write_bytes(data)
            return checkpoint.load_latest(tmp_path, digest="d")

        check_all(take, good, CheckpointError, INPUTS // len(names))
        (whole / name).write_bytes(good)
    shutil.rmtree(whole)


class Guarded:
    """B, whose run is private, and A, who dials it; one of the two speaks as the input says."""

    def __init__(self) -> None:
        self.heard = 0

    async def _handler(self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heard += 1

    async def to_acceptor(self, inputs: Iterator[bytes]) -> None:
        network = PipeNetwork()
        served = network.join(B)
        await GuardedTransport(served, SECRET).serve("/t", self._handler)
        dialler = network.join(A)
        for data in inputs:
            _, writer = await dialler.dial(B, "/t", timeout_s=1.0)
            writer.write(data)
            writer.close()
            async with asyncio.timeout(10):
                await served.finished()

    async def to_dialler(self, inputs: Iterator[bytes]) -> None:
        network = PipeNetwork()
        served = network.join(B)
        answers = iter(inputs)
        ended = False

        async def answer(peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal ended
            data = next(answers, None)
            ended = data is None
            writer.write(data or b"")

        await served.serve("/t", answer)
        dialler = GuardedTransport(network.join(A), SECRET)
        while not ended:
            with pytest.raises(PeersError):
                await dialler.dial(B, "/t", timeout_s=1.0)


def test_proofs_heard_by_the_one_that_accepts() -> None:
    nonce = bytes(32).hex()
    good = frame(Kind.HEADER, encode_json({"access": 1, "nonce": nonce})) + frame(
        Kind.HEADER, encode_json({"proof": nonce})
    )
    guarded = Guarded()
    asyncio.run(guarded.to_acceptor(mutations(good, INPUTS // 2)))
    payloads = mutations(encode_json({"access": 1, "nonce": nonce}), INPUTS // 2)
    asyncio.run(guarded.to_acceptor(frame(Kind.HEADER, payload) for payload in payloads))
    assert guarded.heard == 0


def test_proofs_heard_by_the_one_that_dials() -> None:
    good = encode_json({"nonce": bytes(32).hex(), "proof": bytes(32).hex()})
    asyncio.run(Guarded().to_dialler(mutations(frame(Kind.HEADER, good), INPUTS // 2)))
    asyncio.run(Guarded().to_dialler(frame(Kind.HEADER, data) for data in mutations(good, INPUTS // 2)))


def test_cards_from_a_stranger() -> None:
    """What a newcomer is sent as the run's card, before it knows anybody."""

    async def play() -> None:
        network = PipeNetwork()
        header = encode_json({"answer": "accept", "reason": "", "run": "r", "digest": "d", "size_bytes": 5})
        good = frame(Kind.HEADER, header) + frame(Kind.BLOCK, b"hello")
        inputs = [good, *mutations(good, INPUTS // 2)]
        inputs += [frame(Kind.HEADER, data) + frame(Kind.BLOCK, b"hello") for data in mutations(header, INPUTS // 2)]
        answers = iter(inputs)

        async def answer(peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(next(answers))

        await network.join(B).serve(CARD_PROTOCOL, answer)
        dialler = network.join(A)
        assert await fetch_card(dialler, B, timeout_s=1.0) == RunCard("r", "d", b"hello")
        for _ in inputs[1:]:
            with contextlib.suppress(PeersError):
                assert len((await fetch_card(dialler, B, timeout_s=1.0)).document) <= 1024 * 1024

    asyncio.run(play())


STATE = Snapshot(3, {"note": "x"}, {"b": torch.ones(2, 3), "w": torch.arange(4)})


def test_manifests() -> None:
    """Whole streams garbled; then headers and tables in frames whose checksums are right."""

    async def play() -> None:
        network = PipeNetwork()
        made = prepare(STATE)
        header = encode_json({"answer": "accept", "reason": "", "round": 3, "meta": {"note": "x"}})

        def stream(header: bytes, table: bytes) -> bytes:
            parts = frame(Kind.PROGRESS, b"{}"), frame(Kind.HEADER, header), frame(Kind.TABLE, table)
            return b"".join((*parts, frame(Kind.BLOCK, made.manifest.hashes)))

        good = stream(header, made.table)
        inputs = [good, *mutations(good, INPUTS // 2)]
        inputs += [stream(data, made.table) for data in mutations(header, INPUTS // 4)]
        inputs += [stream(header, data) for data in mutations(made.table, INPUTS // 4)]
        answers = iter(inputs)

        async def answer(peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(next(answers))

        await network.join(B).serve(STATE_PROTOCOL, answer)
        newcomer = Newcomer(network.join(A), "r", "d", 5.0, 5.0, 2**20, ("",), None)
        assert await receive_manifest(newcomer, B) == made.manifest
        for _ in inputs[1:]:
            with contextlib.suppress(PeersError):
                taken = await receive_manifest(newcomer, B)
                assert taken.size_bytes <= 2**20
                assert taken.chunks == -(-taken.size_bytes // CHUNK_BYTES)

    asyncio.run(play())


@FORMS
@given(json_values, json_values)
def test_manifests_of_any_form(round: object, meta: object) -> None:
    made = prepare(STATE)
    with contextlib.suppress(ProtocolError):
        decode({"round": round, "meta": meta}, made.table, made.manifest.entries, made.manifest.hashes)


def test_a_table_of_petabytes_costs_nothing() -> None:
    table = encode_json({"tensors": [["w", "float32", "float32", [2**47, 2**47]]]})
    with at_most(64 * 1024), pytest.raises(LayoutError):
        read_entries(table, limit_bytes=2**36, prefixes=("",))


def test_a_request_for_chunks_of_any_form() -> None:
    """Each is answered, refused or let go, and none takes the donor's place for good."""

    async def play() -> None:
        network = PipeNetwork()
        served, dialler = network.join(B), network.join(A)
        donor = Donor(served, CARD, lambda: STATE, max_downloads=1)
        await donor.start()
        found = await donor.shelf.newest()
        assert not isinstance(found, tuple)
        root = found.manifest.root
        head = encode_json({"run": CARD.run, "digest": CARD.digest, "root": root})
        ask = encode_json({"first": 0, "count": 1})
        inputs = [*mutations(frame(Kind.HEADER, head) + frame(Kind.HEADER, ask), 1_000)]
        inputs += [frame(Kind.HEADER, head) + frame(Kind.HEADER, data) for data in mutations(ask, 1_000)]
        inputs += [frame(Kind.HEADER, data) + frame(Kind.HEADER, ask) for data in mutations(head, 500)]
        for data in inputs:
            _, writer = await dialler.dial(B, STATE_PROTOCOL, timeout_s=1.0)
            writer.write(data)
            writer.close()
            async with asyncio.timeout(10):
                await served.finished()
        state = await fetch_state(dialler, [B], run=CARD.run, digest=CARD.digest)
        assert torch.equal(state.tensors["b"], STATE.tensors["b"])

    asyncio.run(play())


def test_requests_to_a_donor() -> None:
    """None makes it give up serving."""

    async def play() -> None:
        network = PipeNetwork()
        served, dialler = network.join(B), network.join(A)
        await Donor(served, CARD, lambda: None).start()
        for data in mutations(frame(Kind.HEADER, b"{}"), 2_000):
            _, writer = await dialler.dial(B, CARD_PROTOCOL, timeout_s=1.0)
            writer.write(data)
            writer.close()
            async with asyncio.timeout(10):
                await served.finished()
        assert await fetch_card(dialler, B, timeout_s=5.0) == CARD

    asyncio.run(play())
