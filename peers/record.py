"""A member's signed record in the DHT: its schema, its signature, and the check that every DHT node makes.

value    signature (64 bytes), then the JSON of `Body`, at most 2 KiB together
signed   "gasloc member 1", key, peer id, expiration, JSON
subkey   the peer id, so nobody can write another's record: the id holds the key that the signature needs
"""

import json
import math
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from peers.errors import ProtocolError
from peers.exchange import PeerId
from peers.identity import Identity, public_key_of, verify

MAX_RECORD_BYTES = 2048
MAX_PARTNERS = 8
MAX_ADDRESSES = 6
SIGNATURE_BYTES = 64
_MAX_TEXT = 128
_MAX_COUNT = 2**62
_MAX_SECONDS = 1e9
_DOMAIN = b"gasloc member 1"
_MAX_REMEMBERED = 1 << 17
_EVERY_ROUND = 1, 0
"""Who trades in every round."""


class MemberState(StrEnum):
    """What a member does now."""

    JOINING = "joining"
    """It has no trained state of this run yet."""
    TRAINING = "training"
    WAITING = "waiting"
    """It waits for a partner."""
    MERGING = "merging"
    """It is the run's syncer: it trains nothing, merges what learners send, and has the newest state."""
    LEAVING = "leaving"
    """It has said goodbye."""


@dataclass(frozen=True, slots=True)
class Status:
    """What a trainer tells the swarm about itself."""

    round: int
    state: MemberState
    step_time_s: float = 0.0
    """Moving average; 0 where it is not known yet."""
    exchange_time_s: float = 0.0
    """Moving average of what training could not hide; 0 where it is not known yet."""
    tokens: int = 0
    """Seen since the peer first joined."""
    local_steps: int = 0
    """In the current round."""
    loss: float | None = None
    """Training loss, nats per token; None where there is none, or it is not finite."""
    partners: tuple[PeerId, ...] = ()
    """Those of the last round that mixed; at most 8 are published."""
    trade_every: int = 1
    """It trades in every so many rounds, and is not to be paired in the others."""
    trade_round: int = 0
    """One of the rounds in which it trades."""


@dataclass(frozen=True, slots=True)
class Member:
    """A member of the run, as its own record shows it."""

    peer_id: PeerId
    status: Status
    digest: str
    """Of its recipe."""
    reachable: bool
    """Whether others can dial it."""
    addresses: tuple[str, ...]
    """Full multiaddresses, best first."""
    expires: float
    """Unix time, seconds. Without a renewal the member counts as gone then."""


def seal(member: Member, key: bytes, identity: Identity) -> bytes:
    """The signed record, as it is stored under `key`. At most 6 addresses and 8 partners are taken along.

    Raises `ProtocolError` for a value that other peers would refuse.
    """
    body = _encode(member)
    _decode(body, member.peer_id, member.expires)
    signature = identity.sign(_signed(key, member.peer_id, member.expires, body))
    if len(signature) + len(body) > MAX_RECORD_BYTES:
        raise ProtocolError(f"a member record of {len(body)} bytes, over the limit of {MAX_RECORD_BYTES}")
    return signature + body


@dataclass(frozen=True, slots=True)
class Checked:
    """A record whose signature and schema are good, and what it says."""

    record: bytes
    member: Member

    @property
    def body(self) -> bytes:
        """All but the signature."""
        return self.record[SIGNATURE_BYTES:]


def unseal(record: bytes, key: bytes, peer_id: PeerId, expires: float, latest: Checked | None = None) -> Member:
    """Checks and reads a record that was found under `key`, `peer_id` and `expires`.

    `latest`: an earlier record of that peer; a body that it had, too, is not read again, only the signature is checked.
    Raises `ProtocolError` with the reason, and nothing else, whatever the bytes.
    """
    if not SIGNATURE_BYTES < len(record) <= MAX_RECORD_BYTES:
        raise ProtocolError(f"a member record of {len(record)} bytes")
    if not math.isfinite(expires):
        raise ProtocolError("a member record that never expires")
    signature, body = record[:SIGNATURE_BYTES], record[SIGNATURE_BYTES:]
    if not verify(peer_id, _signed(key, peer_id, expires, body), signature):
        raise ProtocolError("a member record with a wrong signature")
    if latest is not None and latest.member.peer_id == peer_id and latest.body == body:
        return replace(latest.member, expires=expires)
    return _decode(body, peer_id, expires)


def _signed(key: bytes, peer_id: PeerId, expires: float, body: bytes) -> bytes:
    parts = [_DOMAIN, key, peer_id.encode(), struct.pack(">d", expires), body]
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _encode(member: Member) -> bytes:
    status = member.status
    loss = status.loss
    values: dict[str, object] = {
        "round": status.round,
        "state": status.state.value,
        "step_time_s": status.step_time_s,
        "exchange_time_s": status.exchange_time_s,
        "tokens": status.tokens,
        "local_steps": status.local_steps,
        "loss": loss if loss is not None and math.isfinite(loss) else None,
        "partners": status.partners[:MAX_PARTNERS],
        "digest": member.digest,
        "reachable": member.reachable,
        "addresses": [address.removesuffix(f"/p2p/{member.peer_id}") for address in member.addresses[:MAX_ADDRESSES]],
    }
    if (status.trade_every, status.trade_round) != _EVERY_ROUND:
        values["turns"] = [status.trade_every, status.trade_round]
    return json.dumps(values, separators=(",", ":")).encode()


def _decode(body: bytes, peer_id: PeerId, expires: float) -> Member:
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):  # a UnicodeDecodeError is a ValueError too
        raise ProtocolError("a member record that is not JSON") from None
    if not isinstance(values, dict):
        raise ProtocolError("a member record that is not an object")
    state = values.get("state")
    if not (isinstance(state, str) and state in tuple(MemberState)):
        raise _bad("state")
    reachable = values.get("reachable")
    if not isinstance(reachable, bool):
        raise _bad("reachable")
    trade_every, trade_round = _turns(values)
    status = Status(
        round=_count(values, "round"),
        state=MemberState(state),
        step_time_s=_seconds(values, "step_time_s"),
        exchange_time_s=_seconds(values, "exchange_time_s"),
        tokens=_count(values, "tokens"),
        local_steps=_count(values, "local_steps"),
        loss=_loss(values),
        partners=_partners(values),
        trade_every=trade_every,
        trade_round=trade_round,
    )
    addresses = tuple(f"{maddr}/p2p/{peer_id}" for maddr in _texts(values, "addresses", MAX_ADDRESSES))
    return Member(peer_id, status, _text(values.get("digest"), "digest"), reachable, addresses, expires)


def _count(values: Mapping[str, object], name: str) -> int:
    value = values.get(name)
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise _bad(name)
    return value


def _number(value: object, name: str) -> float:
    if type(value) is int and abs(value) <= _MAX_COUNT:
        return float(value)
    if type(value) is not float or not math.isfinite(value):
        raise _bad(name)
    return value


def _seconds(values: Mapping[str, object], name: str) -> float:
    value = _number(values.get(name), name)
    if not 0 <= value <= _MAX_SECONDS:
        raise _bad(name)
    return value


def _loss(values: Mapping[str, object]) -> float | None:
    value = values.get("loss")
    return None if value is None else _number(value, "loss")


def _turns(values: Mapping[str, object]) -> tuple[int, int]:
    """Every how many rounds it trades, and in which; a record of one that always does, or of old, has none."""
    turns = values.get("turns", list(_EVERY_ROUND))
    if not isinstance(turns, list) or len(turns) != len(_EVERY_ROUND):
        raise _bad("turns")
    every, round = (_count({"turns": value}, "turns") for value in turns)
    if every < 1:
        raise _bad("turns")
    return every, round


def _partners(values: Mapping[str, object]) -> tuple[PeerId, ...]:
    partners = _texts(values, "partners", MAX_PARTNERS)
    if not all(public_key_of(partner) for partner in partners):
        raise _bad("partners")
    return partners


def _texts(values: Mapping[str, object], name: str, limit: int) -> tuple[str, ...]:
    value = values.get(name)
    if not isinstance(value, list) or len(value) > limit:
        raise _bad(name)
    return tuple(_text(item, name) for item in value)


def _text(value: object, name: str) -> str:
    if not (isinstance(value, str) and 0 < len(value) <= _MAX_TEXT and value.isascii() and value.isprintable()):
        raise _bad(name)
    return value


def _bad(name: str) -> ProtocolError:
    return ProtocolError(f"a member record whose '{name}' is missing or out of range")


class StoredRecord(Protocol):
    """What a DHT node shows of a record: hivemind's `DHTRecord`."""

    @property
    def key(self) -> bytes: ...

    @property
    def subkey(self) -> bytes: ...

    @property
    def value(self) -> bytes: ...

    @property
    def expiration_time(self) -> float: ...


class RecordValidator:
    """Lets only well-formed, well-signed member records into a DHT node; one of hivemind's record validators.

    Every node checks what it is asked to store and what it is told, so junk does not spread. `rejected` counts
    what was refused, by reason.
    """

    priority = 0

    def __init__(self, *, max_life_s: float, clock: Callable[[], float]) -> None:
        """`clock` gives unix seconds; a record that lives longer than `max_life_s` from now is refused."""
        self._max_life_s = max_life_s
        self._clock = clock
        self._good: dict[tuple[bytes, PeerId], Checked] = {}
        """The latest good record of each peer under each key."""
        self.key: bytes | None = None
        """The one key that is ours; None while the run is not known yet: then any run's records are taken."""
        self.rejected: Counter[str] = Counter()

    def validate(self, record: StoredRecord) -> bool:
        """Whether a record may be kept. Never raises, whatever the bytes."""
        try:
            value, peer = _packed_bytes(record.value), _packed_text(record.subkey)
        except ProtocolError as error:
            self.refuse(error)
            return False
        return self.admit(value, record.key, peer, record.expiration_time)

    def admit(self, record: bytes, key: bytes, peer_id: PeerId, expires: float) -> bool:
        """`validate` for a record that is not packed as hivemind does it."""
        try:
            self.check_place(key, expires)
            self.read(record, key, peer_id, expires)
        except ProtocolError as error:
            self.refuse(error)
            return False
        return True

    def refuse(self, error: ProtocolError) -> None:
        """Counts a record that was refused."""
        self.rejected[str(error)] += 1

    def sign_value(self, record: StoredRecord) -> bytes:
        """The value unchanged: records are signed before they reach the DHT."""
        return record.value

    def strip_value(self, record: StoredRecord) -> bytes:
        """The value unchanged."""
        return record.value

    def merge_with(self, other: object) -> bool:
        """Never merges with another validator."""
        return False

    def check_place(self, key: bytes, expires: float) -> None:
        """Raises `ProtocolError` where nothing may be kept under `key` that lives until `expires`."""
        if self.key is not None and key != self.key:
            raise ProtocolError("a record under another key")
        if not expires <= self._clock() + self._max_life_s:
            raise ProtocolError("a member record that expires too far in the future")

    def read(self, record: bytes, key: bytes, peer_id: PeerId, expires: float) -> Member:
        """As `unseal`, and raises as it does; a record that came by before is not checked again.

        *Measured*, a signature takes twice as long to check as all else, and each record comes from several nodes.
        """
        latest = self._good.get((key, peer_id))
        if latest is not None and latest.member.expires == expires and latest.record == record:
            return latest.member
        member = unseal(record, key, peer_id, expires, latest)
        self.keep(key, Checked(record, member))
        return member

    def latest(self, key: bytes, peer_id: PeerId) -> Checked | None:
        """The latest good record of a peer that came by; None where there was none. It may have expired."""
        return self._good.get((key, peer_id))

    def keep(self, key: bytes, checked: Checked) -> None:
        """Remembers a good record, unless a later one of that peer came by before."""
        place = key, checked.member.peer_id
        latest = self._good.get(place)
        if latest is not None and latest.member.expires >= checked.member.expires:
            return
        if latest is None and len(self._good) >= _MAX_REMEMBERED:
            del self._good[next(iter(self._good))]
        self._good[place] = checked


def _packed_text(packed: bytes) -> str:
    """The peer id in a DHT subkey: a msgpack str, in its one shortest spelling."""
    text = packed[2:]
    if packed[:2] != bytes([0xD9, len(text) & 0xFF]) or not (32 <= len(text) <= _MAX_TEXT and text.isascii()):
        raise ProtocolError("a record that is not under a peer id")
    return text.decode()


def _packed_bytes(packed: bytes) -> bytes:
    """The record in a DHT value: a msgpack bin, in its one shortest spelling."""
    if len(packed) > MAX_RECORD_BYTES + 3:
        raise ProtocolError("a member record over the limit of 2 KiB")
    short, long = packed[2:], packed[3:]
    if packed[:2] == bytes([0xC4, len(short) & 0xFF]) and len(short) < 256:
        return short
    if packed[:3] == b"\xc5" + (len(long) & 0xFFFF).to_bytes(2, "big") and len(long) >= 256:
        return long
    raise ProtocolError("a member record that is not bytes")
