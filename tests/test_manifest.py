"""A state as chunks: what is cut apart fits together again, and the root tells any two states apart."""

import hashlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peers.errors import LayoutError, ProtocolError
from peers.manifest import (
    CHUNK_BYTES,
    FlatState,
    Snapshot,
    allocate,
    decode,
    hashes_bytes,
    prepare,
    read_entries,
)


@given(
    sizes=st.lists(st.integers(0, 40), max_size=6),
    start=st.integers(0, 250),
    length=st.integers(0, 250),
)
def test_a_flat_state_reads_and_writes_any_span(sizes: list[int], start: int, length: int) -> None:
    counts = iter(range(1000))
    rows = [torch.tensor([next(counts) % 251 for _ in range(size)], dtype=torch.uint8) for size in sizes]
    whole = b"".join(bytes(row.tolist()) for row in rows)
    end = min(start + length, len(whole))
    start = min(start, end)
    flat = FlatState(rows)
    assert bytes(flat.read(start, end)) == whole[start:end]
    flat.write(start, memoryview(bytes(end - start)))
    assert b"".join(bytes(row.tolist()) for row in rows) == whole[:start] + bytes(end - start) + whole[end:]


def test_a_long_tensor_is_read_without_a_copy() -> None:
    row = torch.arange(3 * CHUNK_BYTES // 4, dtype=torch.float32)
    data = FlatState([torch.zeros(1), row]).read(CHUNK_BYTES, 2 * CHUNK_BYTES)
    row[CHUNK_BYTES // 4] = -7.0
    assert torch.frombuffer(data, dtype=torch.float32)[1] == -7.0


def test_a_state_goes_through_its_manifest_and_chunks() -> None:
    state = Snapshot(
        3, {"x": 1.5, "a": "b"}, {"w": torch.randn(700, 900), "b": torch.tensor([True]), "c": torch.ones(3)}
    )
    made = prepare(state)
    manifest = made.manifest
    assert manifest.chunks == 3
    entries = read_entries(made.table, limit_bytes=manifest.size_bytes, prefixes=("w", "b", "c"))
    header = {"round": 3, "meta": {"a": "b", "x": 1.5}}  # in another order
    assert decode(header, made.table, entries, manifest.hashes) == manifest
    rows = allocate(entries)
    flat = FlatState(rows)
    for chunk in range(manifest.chunks):
        start, end = manifest.span(chunk)
        data = made.flat.read(start, end)
        assert manifest.fits(chunk, data)
        assert not manifest.fits((chunk + 1) % 3, data)
        flat.write(start, data)
    for entry, row in zip(entries, rows, strict=True):
        assert torch.equal(row.reshape(entry.shape), state.tensors[entry.name])


def test_any_difference_makes_another_root() -> None:
    ones = torch.ones(2, 3)
    states = [
        Snapshot(1, {}, {"a": ones}),
        Snapshot(2, {}, {"a": ones}),
        Snapshot(1, {"x": 1}, {"a": ones}),
        Snapshot(1, {"x": 1.0}, {"a": ones}),
        Snapshot(1, {"x": "1"}, {"a": ones}),
        Snapshot(1, {}, {"b": ones}),
        Snapshot(1, {}, {"a": ones.reshape(3, 2)}),
        Snapshot(1, {}, {"a": torch.tensor([[1.0, 1, 1], [1, 1, 1 + 2**-23]])}),
        Snapshot(1, {}, {"a": ones.view(torch.int32)}),
        Snapshot(1, {}, {"a": ones, "b": torch.zeros(0)}),
    ]
    assert len({prepare(state).manifest.root for state in states}) == len(states)
    assert prepare(states[0]).manifest.root == prepare(Snapshot(1, {}, {"a": ones.clone()})).manifest.root


@pytest.mark.parametrize(
    ("state", "error", "reason"),
    [
        (Snapshot(-1), ProtocolError, "round"),
        (Snapshot(1, {"x": float("nan")}), ProtocolError, "meta 'x'"),
        (Snapshot(1, {"x": "y" * 70_000}), ProtocolError, "over the limit"),
        (Snapshot(1, {}, {"w": torch.tensor([float("inf")])}), ProtocolError, "tensor 'w' holds NaN"),
        (Snapshot(1, {}, {"w": torch.zeros(2, dtype=torch.complex64)}), LayoutError, "cannot be sent"),
    ],
)
def test_a_state_that_nobody_would_take_is_not_prepared(state: Snapshot, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        prepare(state)


def test_hashes_of_a_wrong_number_are_refused() -> None:
    made = prepare(Snapshot(1, {}, {"a": torch.ones(5)}))
    for hashes in (b"", bytes(31), bytes(64)):
        with pytest.raises(ProtocolError, match=f"{len(hashes)} bytes of hashes where 32 are due"):
            decode({"round": 1, "meta": {}}, made.table, made.manifest.entries, hashes)
    assert made.manifest.hashes == hashlib.sha256(bytes(made.flat.read(0, 20))).digest()
    assert hashes_bytes(()) == 0
