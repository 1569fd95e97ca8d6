"""A question about members' records and its answer, as bytes; little-endian.

question  key (20) | epoch (8) | number (8) | at most one change
answer    epoch (8) | number (8) | flags (1): 1 there is more, 2 the change is held | changes
change    public key (32) | expiration (8, float) | signature (64) | length of the body (2) | body
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from peers.errors import ProtocolError
from peers.exchange import PeerId
from peers.identity import peer_id_of, public_key_of
from peers.record import MAX_RECORD_BYTES
from peers.record_log import MOST_BYTES, MOST_CHANGES, MOST_MEMBERS, Change, Page

KEY_BYTES = 20
_ASK = struct.Struct(f"<{KEY_BYTES}s8sQ")
_PAGE = struct.Struct("<8sQB")
_CHANGE = struct.Struct("<32sd64sH")
_MORE = 1
_HELD = 2

MAX_ASK_BYTES = _ASK.size + _CHANGE.size + MAX_RECORD_BYTES
MAX_PAGE_BYTES = _PAGE.size + MOST_BYTES + MAX_RECORD_BYTES + MOST_CHANGES * _CHANGE.size


@dataclass(frozen=True, slots=True)
class Ask:
    """What came under `key` behind `number` of the log `epoch`?"""

    key: bytes
    epoch: bytes
    number: int
    change: Change | None = None
    """A record to hold."""


def encode_ask(ask: Ask) -> bytes:
    """The question as bytes."""
    return _ASK.pack(ask.key, ask.epoch, ask.number) + (_encode(ask.change) if ask.change else b"")


def decode_ask(payload: bytes) -> Ask:
    """Raises `ProtocolError` for what is no question, and nothing else."""
    if len(payload) < _ASK.size:
        raise ProtocolError(f"a question about members of {len(payload)} bytes")
    changes = list(_decode(payload, _ASK.size))
    if len(changes) > 1:
        raise ProtocolError("a question about members that brings several records")
    return Ask(*_ASK.unpack_from(payload), *changes)


def encode_page(page: Page) -> bytes:
    """The answer as bytes."""
    head = _PAGE.pack(page.epoch, page.number, _MORE * page.more | _HELD * page.held)
    return head + b"".join(map(_encode, page.changes))


def decode_page(payload: bytes) -> Page:
    """Raises `ProtocolError` for what is no answer, and nothing else. The records are not checked."""
    if len(payload) < _PAGE.size:
        raise ProtocolError(f"an answer about members of {len(payload)} bytes")
    epoch, number, flags = _PAGE.unpack_from(payload)
    changes = tuple(_decode(payload, _PAGE.size))
    if len(changes) > MOST_CHANGES:
        raise ProtocolError(f"an answer about {len(changes)} members, over the limit of {MOST_CHANGES}")
    return Page(epoch, number, changes, more=bool(flags & _MORE), held=bool(flags & _HELD))


def _encode(change: Change) -> bytes:
    return _CHANGE.pack(_key_of(change.peer), change.expires, change.signature, len(change.body)) + change.body


def _decode(payload: bytes, start: int) -> Iterator[Change]:
    while start < len(payload):
        if len(payload) - start < _CHANGE.size:
            raise ProtocolError("a member's record that is cut off")
        key, expires, signature, length = _CHANGE.unpack_from(payload, start)
        start += _CHANGE.size
        if length > len(payload) - start:
            raise ProtocolError("a member's record that is cut off")
        yield Change(_peer_of(key), expires, signature, payload[start : start + length])
        start += length


@lru_cache(maxsize=MOST_MEMBERS)
def _key_of(peer: PeerId) -> bytes:
    key = public_key_of(peer)
    assert key is not None, "a record that was checked is of an Ed25519 id"
    return key


_peer_of = lru_cache(maxsize=MOST_MEMBERS)(peer_id_of)
