"""A peer's whole state as chunks of bytes, and the manifest by which each chunk and the whole are verified.

The state is one row of bytes: its tensors in sorted order of names, each as it lies in memory, none padded. It is cut
into chunks of `CHUNK_BYTES`. The manifest holds round, meta, the tensors' table and a SHA-256 for each chunk; its root
is a SHA-256 over all of these. Two peers with the same root hold the same state, bit for bit.
"""

import bisect
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from peers import codec
from peers.body import Body
from peers.errors import LayoutError, ProtocolError, WireError
from peers.exchange import PeerId, Tensors
from peers.table import Entry, Packing, decode_table
from peers.wire import MAX_HEADER_BYTES, clean, encode_json

CHUNK_BYTES = 1024 * 1024
HASH_BYTES = 32
MAX_STATE_BYTES = 64 * 1024**3
_MAX_META = 256
_DOMAIN = b"gasloc state 2"

Meta = Mapping[str, int | float | str]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A peer's whole state at a round. Its tensors must not change once it was handed over."""

    round: int
    meta: Meta = field(default_factory=dict)
    tensors: Tensors = field(default_factory=dict)
    """Of any shape and any floating-point, integer or boolean dtype; they travel exactly."""
    donors: tuple[PeerId, ...] = ()
    """Who gave it, where it was downloaded."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a state is made of. Made by `decode` or `prepare`, never by hand: the root must fit the rest."""

    round: int
    meta: Meta
    entries: tuple[Entry, ...]
    """In sorted order of names."""
    hashes: bytes
    """The chunks' SHA-256, one after another."""
    root: str
    """SHA-256 over all the rest, in hex."""

    @property
    def size_bytes(self) -> int:
        """Of all tensors."""
        return sum(entry.size_bytes for entry in self.entries)

    @property
    def chunks(self) -> int:
        """How many there are; the last may be shorter."""
        return len(self.hashes) // HASH_BYTES

    def span(self, chunk: int) -> tuple[int, int]:
        """Where a chunk begins and ends in the state, in bytes."""
        return chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, self.size_bytes)

    def fits(self, chunk: int, data: memoryview) -> bool:
        """Whether these bytes are that chunk."""
        due = self.hashes[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES]
        return hashlib.sha256(data).digest() == due


class FlatState:
    """A state's tensors seen as one row of bytes, to be read or to be filled. Shares their memory."""

    def __init__(self, rows: Sequence[torch.Tensor]) -> None:
        """`rows`: flat, contiguous CPU tensors in sorted order of names."""
        self._views = [codec.view(row) for row in rows]
        self._ends = list(itertools.accumulate(len(view) for view in self._views))

    def pieces(self, start: int, end: int) -> list[memoryview]:
        """The memory that holds bytes `start` to `end`, in order."""
        found = []
        at = bisect.bisect_right(self._ends, start)
        while start < end:
            view, view_end = self._views[at], self._ends[at]
            stop = min(end, view_end)
            offset = view_end - len(view)
            if stop > start:
                found.append(view[start - offset : stop - offset])
            start, at = max(start, stop), at + 1
        return found

    def read(self, start: int, end: int) -> memoryview:
        """The bytes themselves; copied only where they lie in several tensors."""
        pieces = self.pieces(start, end)
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    def write(self, start: int, data: memoryview) -> None:
        """Fills in `data` from byte `start` on."""
        at = 0
        for piece in self.pieces(start, start + len(data)):
            piece[:] = data[at : at + len(piece)]
            at += len(piece)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A state that is ready to be served."""

    manifest: Manifest
    table: bytes
    flat: FlatState


def prepare(snapshot: Snapshot) -> Prepared:
    """Reads every value twice: is it finite, and its hash. For a worker thread; hashing lets other threads run.

    Raises `LayoutError` for a dtype that cannot travel, and `ProtocolError` for values that are not finite and
    for a round or a meta that a newcomer would refuse.
    """
    check_round(snapshot.round)
    meta = read_meta(dict(snapshot.meta))
    if len(encode_json({"meta": meta})) > MAX_HEADER_BYTES - 512:
        raise ProtocolError(f"the state's meta is over the limit of {MAX_HEADER_BYTES - 512} bytes")
    body = Body(snapshot.tensors, "fp32")
    size_bytes = sum(entry.size_bytes for entry in body.entries)
    if size_bytes > MAX_STATE_BYTES:
        raise LayoutError(f"a state of {size_bytes} bytes is over the limit of {MAX_STATE_BYTES}")
    flat = FlatState([body.rows[entry.name] for entry in body.entries])
    hashes = bytearray()
    for start in range(0, size_bytes, CHUNK_BYTES):
        digest = hashlib.sha256()
        for piece in flat.pieces(start, min(start + CHUNK_BYTES, size_bytes)):
            digest.update(piece)
        hashes += digest.digest()
    root = _root(snapshot.round, meta, body.table, bytes(hashes))
    manifest = Manifest(snapshot.round, meta, tuple(body.entries), bytes(hashes), root)
    return Prepared(manifest, body.table, flat)


def read_entries(table: bytes, *, limit_bytes: int, prefixes: tuple[str, ...]) -> list[Entry]:
    """The tensors that a stranger's table announces, checked before anything is allocated for them.

    Raises `ProtocolError` for what is not a table of a state, and `LayoutError` where all together are over
    `limit_bytes`, or a name starts with none of `prefixes`.
    """
    entries = decode_table(table)
    for entry in entries:
        if entry.packing is not Packing.PLAIN or entry.wire_dtype is not entry.dtype:
            raise ProtocolError(f"tensor '{entry.name}' of a state does not travel as it is")
        if not entry.name.startswith(prefixes):
            raise LayoutError(f"tensor '{clean(entry.name)}' does not belong to a state")
    total_bytes = sum(entry.size_bytes for entry in entries)
    if total_bytes > limit_bytes:
        raise LayoutError(f"a state of {total_bytes} bytes is over the limit of {limit_bytes}")
    return entries


def hashes_bytes(entries: Sequence[Entry]) -> int:
    """How long the hashes of a state are."""
    return HASH_BYTES * math.ceil(sum(entry.size_bytes for entry in entries) / CHUNK_BYTES)


def decode(header: Mapping[str, object], table: bytes, entries: Sequence[Entry], hashes: bytes) -> Manifest:
    """The manifest out of a stranger's header, table, the entries read from it, and hashes.

    Raises `ProtocolError` for a round or a meta that is none, or where the hashes are too few or too many.
    """
    round_, meta = check_round(header.get("round")), read_meta(header.get("meta"))
    if len(hashes) != hashes_bytes(entries):
        raise ProtocolError(f"{len(hashes)} bytes of hashes where {hashes_bytes(entries)} are due")
    return Manifest(round_, meta, tuple(entries), hashes, _root(round_, meta, table, hashes))


def allocate(entries: Sequence[Entry]) -> list[torch.Tensor]:
    """Fresh flat rows for a manifest's tensors. Raises `WireError` where memory is short."""
    rows = []
    for entry in entries:
        try:
            rows.append(torch.empty(entry.count, dtype=entry.dtype))
        except RuntimeError:
            raise WireError(f"no memory for tensor '{entry.name}' of {entry.size_bytes} bytes") from None
    return rows


def _root(round_: int, meta: Meta, table: bytes, hashes: bytes) -> str:
    digest = hashlib.sha256(_DOMAIN)
    for part in (encode_json({"round": round_, "meta": dict(sorted(meta.items()))}), table, hashes):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def check_round(value: object) -> int:
    """The round, if it is one. Raises `ProtocolError`."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ProtocolError("the state's round is not a whole number from 0 to 2^63")
    return value


def read_meta(value: object) -> dict[str, int | float | str]:
    """Plain values out of a stranger's JSON. Raises `ProtocolError` for anything else."""
    if not isinstance(value, dict) or len(value) > _MAX_META:
        raise ProtocolError(f"the state's meta is not an object of at most {_MAX_META} entries")
    for name, item in value.items():
        if type(item) not in (int, float, str) or (type(item) is float and not math.isfinite(item)):
            raise ProtocolError(f"the state's meta {clean(repr(name))} is neither a finite number nor a text")
    return value
