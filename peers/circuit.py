"""What a relay carries before it cuts, asked of the relay itself: libp2p's circuit relay, version 2, as far as that.

p2pd starts two relay services that answer for the same protocol. One has the limits that we tell it; the other, p2pd's
own, has libp2p's defaults: 128 KiB each way and 2 minutes a connection. They start at the same time, and the one that
is ready last answers from then on. Nothing tells which it was but the answer to a peer that asks for a place.

Source: https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md (messages in protobuf).
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from peers.errors import ProtocolError, RefusedError, UnreachableError

HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
MAX_MESSAGE_BYTES = 4096

_RESERVE = bytes([2, 1 << 3, 0])  # a message of 2 bytes: its field 1, the type, is RESERVE
_TYPE, _LIMIT, _STATUS = 1, 4, 5  # fields of the answer
_TIME, _DATA = 1, 2  # fields of its limit
_IS_STATUS, _OK = 2, 100
_WIDTHS = {1: 8, 5: 4}  # bytes of what protobuf writes at a fixed width


@dataclass(frozen=True, slots=True)
class Limit:
    """What a relay carries in one connection before it cuts it; 0: no limit."""

    time_s: int
    data_bytes: int
    """Each way."""


async def ask_limit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout_s: float) -> Limit:
    """Takes a place at a relay and returns the limit that it states; closes the stream.

    `reader` and `writer` are a stream of `HOP_PROTOCOL` to it. The place is ours until our connection to it ends.
    Raises `UnreachableError` where no answer comes within `timeout_s`, `RefusedError` where the relay gives us no
    place, and `ProtocolError` for an answer that is none.
    """
    try:
        async with asyncio.timeout(timeout_s):
            writer.write(_RESERVE)
            return read_answer(await _receive(reader))
    except TimeoutError:
        raise UnreachableError(f"silent for {timeout_s:g} s") from None
    except (OSError, EOFError):
        raise UnreachableError("the relay closed the stream without an answer") from None
    finally:
        writer.transport.abort()


def read_answer(message: bytes) -> Limit:
    """Out of a relay's answer. Raises `RefusedError` where it gives no place, and `ProtocolError` for anything else."""
    answer = dict(_fields(message))
    status = answer.get(_STATUS)
    if answer.get(_TYPE, 0) != _IS_STATUS or not isinstance(status, int):
        raise ProtocolError("what a relay answered is not a status")
    if status != _OK:
        raise RefusedError(f"the relay gives no place: status {status}")
    limit = answer.get(_LIMIT, b"")
    stated = dict(_fields(limit)) if isinstance(limit, bytes) else {_TIME: limit}
    time_s, data_bytes = stated.get(_TIME, 0), stated.get(_DATA, 0)
    if not (isinstance(limit, bytes) and isinstance(time_s, int) and isinstance(data_bytes, int)):
        raise ProtocolError("the limit that a relay states is not two numbers")
    return Limit(time_s, data_bytes)


async def _receive(reader: asyncio.StreamReader) -> bytes:
    head = bytearray()
    while not head or head[-1] >= 0x80:
        if len(head) == 2:
            raise ProtocolError(f"a relay's answer is over the limit of {MAX_MESSAGE_BYTES} bytes")
        head += await reader.readexactly(1)
    size_bytes, _ = _number(head, 0)
    if size_bytes > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a relay's answer of {size_bytes} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return await reader.readexactly(size_bytes)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message, by number, in their order. Raises `ProtocolError`."""
    at = 0
    while at < len(message):
        key, at = _number(message, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, at = _number(message, at)
            yield number, value
            continue
        if wire_type == 2:
            size_bytes, at = _number(message, at)
        elif wire_type in _WIDTHS:
            size_bytes = _WIDTHS[wire_type]
        else:
            raise ProtocolError(f"a relay's answer holds a field of unknown type {wire_type}")
        if size_bytes > len(message) - at:
            raise ProtocolError("a relay's answer ends in the middle of a field")
        yield number, bytes(message[at : at + size_bytes])
        at += size_bytes


def _number(message: bytes | bytearray, at: int) -> tuple[int, int]:
    """The number that begins there, seven bits a byte, lowest first; and where it ends. Raises `ProtocolError`."""
    number = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise ProtocolError("a relay's answer ends in the middle of a number")
        number |= (message[at] & 0x7F) << shift
        at += 1
        if message[at - 1] < 0x80:
            return number, at
    raise ProtocolError("a relay's answer holds a number of more than 70 bits")
