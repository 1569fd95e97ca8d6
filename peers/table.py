"""The table that precedes tensors on the wire: names, dtypes, the dtype they travel in, shapes."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from peers.errors import LayoutError, ProtocolError
from peers.exchange import Layout, TensorSpec
from peers.quantize import BLOCK, Bits
from peers.wire import clean, decode_json, encode_json

FLOATING = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
WHOLE = {
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
DTYPES: dict[str, torch.dtype] = FLOATING | WHOLE
NAMES = {dtype: name for name, dtype in DTYPES.items()}

MAX_TABLE_BYTES = 4 * 1024 * 1024
_MAX_NAME_CHARACTERS = 512
_MAX_DIMENSIONS = 16
_MAX_EXTENT = 2**48


class Packing(StrEnum):
    """What is made of a tensor's values on the wire."""

    PLAIN = "plain"
    """The values, in the entry's wire dtype."""
    INT8 = "block-int8"
    """See `quantize.int8_encode`."""
    MODULAR8 = "modular8"
    MODULAR4 = "modular4"
    """See `quantize.encode`."""


PACKABLE = (torch.float32, torch.float64)
MODULAR_BITS: dict[Packing, Bits] = {Packing.MODULAR8: 8, Packing.MODULAR4: 4}
_PACKED = {packing.value: packing for packing in Packing if packing is not Packing.PLAIN}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor as it travels."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    wire_dtype: torch.dtype
    packing: Packing = Packing.PLAIN
    """Packed tensors have their own dtype as wire dtype."""

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes in memory, once decoded."""
        return self.count * self.dtype.itemsize


def encode_table(entries: Sequence[Entry]) -> bytes:
    """The table as JSON. Raises `LayoutError` when it is over `MAX_TABLE_BYTES`."""
    rows = [[e.name, NAMES[e.dtype], _form(e), list(e.shape)] for e in entries]
    payload = encode_json({"tensors": rows})
    if len(payload) > MAX_TABLE_BYTES:
        raise LayoutError(f"{len(rows)} tensors need a table of {len(payload)} bytes, over {MAX_TABLE_BYTES}")
    return payload


def decode_table(payload: bytes) -> list[Entry]:
    """The table out of a stranger's bytes. Raises `ProtocolError`, and nothing else."""
    rows = decode_json(payload).get("tensors")
    if not isinstance(rows, list):
        raise ProtocolError("a table without a list of tensors")
    entries = [_entry(row) for row in rows]
    for previous, entry in itertools.pairwise(entries):
        if previous.name >= entry.name:
            raise ProtocolError(f"tensor '{entry.name}' is out of order in the table")
    return entries


def _entry(row: object) -> Entry:
    if not (isinstance(row, list) and len(row) == 4):
        raise ProtocolError("a table's row is not [name, dtype, wire dtype, shape]")
    name, dtype, wire_dtype, shape = row
    if not (isinstance(name, str) and 0 < len(name) <= _MAX_NAME_CHARACTERS and name.isprintable()):
        raise ProtocolError("a tensor's name is not a printable text of 1 to 512 characters")
    if not (isinstance(shape, list) and len(shape) <= _MAX_DIMENSIONS and all(map(_is_extent, shape))):
        raise ProtocolError(f"tensor '{name}' has an impossible shape")
    packing = _PACKED.get(wire_dtype) if isinstance(wire_dtype, str) else None
    if packing is None:
        return Entry(name, tuple(shape), _dtype(name, dtype), _dtype(name, wire_dtype))
    own = _dtype(name, dtype)
    if not packable(tuple(shape), own):
        raise ProtocolError(f"tensor '{name}' of {own} {shape} cannot travel as {packing.value}")
    return Entry(name, tuple(shape), own, own, packing)


def packable(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a tensor may be quantized: not gains, biases and scalars, nor what is shorter than a block."""
    return dtype in PACKABLE and len(shape) >= 2 and math.prod(shape) >= BLOCK


def _form(entry: Entry) -> str:
    return NAMES[entry.wire_dtype] if entry.packing is Packing.PLAIN else entry.packing.value


def _dtype(name: str, text: object) -> torch.dtype:
    if not (isinstance(text, str) and text in DTYPES):
        raise ProtocolError(f"tensor '{name}' has the unknown dtype {clean(repr(text))}")
    return DTYPES[text]


def _is_extent(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_EXTENT


def layout(entries: Sequence[Entry]) -> dict[str, TensorSpec]:
    """What the tensors will be once received."""
    return {entry.name: TensorSpec(entry.shape, entry.dtype) for entry in entries}


def first_difference(expected: Layout, announced: Layout) -> str | None:
    """Where two layouts first differ, in sorted order of names, in words; None where they are equal."""
    return next(_differences(expected, announced), None)


def _differences(expected: Layout, announced: Layout) -> Iterator[str]:
    for name in sorted(expected.keys() | announced.keys()):
        if name not in announced:
            yield f"tensor '{name}' is missing"
        elif name not in expected:
            yield f"tensor '{name}' is not expected"
        elif expected[name] != announced[name]:
            due, got = expected[name], announced[name]
            yield f"tensor '{name}' is {_words(got)} where {_words(due)} is expected"


def _words(spec: TensorSpec) -> str:
    return f"{str(spec.dtype).removeprefix('torch.')} {list(spec.shape)}"
