"""Member records: what is taken, and that nothing else is, whatever the bytes."""

import json
import math
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hivemind.utils import MSGPackSerializer
from hypothesis import given
from hypothesis import strategies as st

from peers.dht import key_bytes
from peers.errors import ProtocolError
from peers.identity import Identity
from peers.record import (
    MAX_ADDRESSES,
    MAX_PARTNERS,
    MAX_RECORD_BYTES,
    Member,
    MemberState,
    RecordValidator,
    Status,
    seal,
    unseal,
)

KEY = key_bytes("gasloc/tiny/members")
NOW = 1_700_000_000.0
EXPIRES = NOW + 20

with tempfile.TemporaryDirectory() as folder:
    ME = Identity.load_or_create(Path(folder) / "me")
    OTHER = Identity.load_or_create(Path(folder) / "other")

STATUS = Status(7, MemberState.TRAINING, 0.25, 1.5, 123_456, 15, 2.5, (OTHER.peer_id,))
MEMBER = Member(ME.peer_id, STATUS, "d" * 64, True, (f"/ip4/203.0.113.5/tcp/31337/p2p/{ME.peer_id}",), EXPIRES)

counts = st.integers(0, 2**62)
seconds = st.floats(0, 1e9)
statuses = st.builds(
    Status,
    round=counts,
    state=st.sampled_from(MemberState),
    step_time_s=seconds,
    exchange_time_s=seconds,
    tokens=counts,
    local_steps=counts,
    loss=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    partners=st.lists(st.sampled_from([ME.peer_id, OTHER.peer_id]), max_size=MAX_PARTNERS).map(tuple),
    trade_every=st.integers(1, 2**62),
    trade_round=counts,
)
junk_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
)


@dataclass(frozen=True)
class Stored:
    """As a DHT node shows a record."""

    key: bytes
    subkey: bytes
    value: bytes
    expiration_time: float


def stored(record: bytes, *, peer_id: str = ME.peer_id, key: bytes = KEY, expires: float = EXPIRES) -> Stored:
    return Stored(key, MSGPackSerializer.dumps(peer_id), MSGPackSerializer.dumps(record), expires)


def validator() -> RecordValidator:
    made = RecordValidator(max_life_s=60, clock=lambda: NOW)
    made.key = KEY
    return made


def signed_body(body: bytes) -> bytes:
    """A record with our right signature over any body; made of a good record's own parts."""
    import struct

    parts = [b"gasloc member 1", KEY, ME.peer_id.encode(), struct.pack(">d", EXPIRES), body]
    return ME.sign(b"".join(len(part).to_bytes(4, "big") + part for part in parts)) + body


@given(statuses, st.booleans())
def test_what_was_sealed_is_read_back(status: Status, reachable: bool) -> None:
    member = replace(MEMBER, status=status, reachable=reachable)
    assert unseal(seal(member, KEY, ME), KEY, ME.peer_id, EXPIRES) == member


def test_a_relayed_address_is_read_back() -> None:
    relayed = f"/ip4/203.0.113.5/tcp/1/p2p/{OTHER.peer_id}/p2p-circuit/p2p/{ME.peer_id}"
    member = replace(MEMBER, addresses=(relayed,))
    assert unseal(seal(member, KEY, ME), KEY, ME.peer_id, EXPIRES).addresses == (relayed,)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_published_as_none(loss: float) -> None:
    member = replace(MEMBER, status=replace(STATUS, loss=loss))
    assert unseal(seal(member, KEY, ME), KEY, ME.peer_id, EXPIRES).status.loss is None


def test_a_long_list_is_cut_so_that_the_record_always_fits() -> None:
    address = f"/dns4/{'a' * 100}.example.org/tcp/31337/p2p/{ME.peer_id}"
    status = replace(STATUS, partners=(OTHER.peer_id,) * 50)
    record = seal(replace(MEMBER, status=status, addresses=(address,) * 50), KEY, ME)
    assert len(record) <= MAX_RECORD_BYTES
    read = unseal(record, KEY, ME.peer_id, EXPIRES)
    assert len(read.addresses) == MAX_ADDRESSES
    assert len(read.status.partners) == MAX_PARTNERS


@pytest.mark.parametrize(
    "status",
    [
        replace(STATUS, round=-1),
        replace(STATUS, tokens=2**63),
        replace(STATUS, step_time_s=math.nan),
        replace(STATUS, exchange_time_s=-1.0),
        replace(STATUS, partners=("nobody",)),
        replace(STATUS, trade_every=0),
        replace(STATUS, trade_round=-1),
    ],
)
def test_what_others_would_refuse_is_not_published(status: Status) -> None:
    with pytest.raises(ProtocolError, match="missing or out of range"):
        seal(replace(MEMBER, status=status), KEY, ME)


@given(st.binary(max_size=3000), st.text(max_size=60), st.floats())
def test_any_bytes_are_refused_and_nothing_else_is_raised(record: bytes, peer_id: str, expires: float) -> None:
    for who in (peer_id, ME.peer_id):
        with pytest.raises(ProtocolError):
            unseal(record, KEY, who, expires)


@given(junk_json)
def test_a_well_signed_body_of_any_form_is_refused(body: object) -> None:
    with pytest.raises(ProtocolError):
        unseal(signed_body(json.dumps(body).encode()), KEY, ME.peer_id, EXPIRES)


@given(st.sampled_from(sorted(json.loads(seal(MEMBER, KEY, ME)[64:]))), junk_json)
def test_a_well_signed_body_with_one_field_of_any_form_is_good_or_refused(name: str, value: object) -> None:
    body = json.loads(seal(MEMBER, KEY, ME)[64:]) | {name: value}
    try:
        member = unseal(signed_body(json.dumps(body).encode()), KEY, ME.peer_id, EXPIRES)
    except ProtocolError:
        return
    seal(member, KEY, ME)  # what was taken can be published again: it is within all ranges


@pytest.mark.parametrize("body", [b"[" * 1900, b'{"round":' * 200, b"1" * 1900, b"\xff\xfe", b"NaN", b""])
def test_bodies_that_upset_parsers_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        unseal(signed_body(body), KEY, ME.peer_id, EXPIRES)


def test_a_validator_takes_a_good_record_and_counts_the_rest() -> None:
    good = seal(MEMBER, KEY, ME)
    judge = validator()
    assert judge.validate(stored(good))
    assert judge.validate(stored(good))
    assert not judge.rejected
    bad = {
        "another's subkey": stored(good, peer_id=OTHER.peer_id),
        "another key": stored(good, key=key_bytes("elsewhere")),
        "another expiration": stored(good, expires=EXPIRES + 1),
        "junk": stored(b"junk" * 30),
        "too large": stored(bytes(1_000_000)),
        "far future": stored(seal(replace(MEMBER, expires=NOW + 1e6), KEY, ME), expires=NOW + 1e6),
        "never expires": stored(good, expires=math.inf),
        "not a time": stored(good, expires=math.nan),
        "no subkey": Stored(KEY, MSGPackSerializer.dumps(None), MSGPackSerializer.dumps(good), EXPIRES),
        "a subkey of bytes": Stored(KEY, ME.peer_id.encode(), MSGPackSerializer.dumps(good), EXPIRES),
        "a bare value": Stored(KEY, MSGPackSerializer.dumps(ME.peer_id), good, EXPIRES),
    }
    for count, (name, record) in enumerate(bad.items(), 1):
        assert not judge.validate(record), name
        assert judge.rejected.total() == count
    assert all(len(reason) < 100 for reason in judge.rejected)


def test_a_record_cannot_be_moved_to_another_run() -> None:
    elsewhere = key_bytes("gasloc/other/members")
    judge = RecordValidator(max_life_s=60, clock=lambda: NOW)
    judge.key = elsewhere
    assert not judge.validate(stored(seal(MEMBER, KEY, ME), key=elsewhere))


@pytest.mark.parametrize("offset_s", [-2.0, 2.0, -60.0, 30.0])
def test_clocks_that_differ_a_little_do_not_matter(offset_s: float) -> None:
    expires = NOW + offset_s + 20
    assert validator().validate(stored(seal(replace(MEMBER, expires=expires), KEY, ME), expires=expires))


@given(st.binary(max_size=80), st.binary(max_size=300), st.floats())
def test_the_validator_never_raises(subkey: bytes, value: bytes, expires: float) -> None:
    assert not validator().validate(Stored(KEY, subkey, value, expires))


@given(st.binary(max_size=2100))
def test_values_and_subkeys_are_read_as_hivemind_writes_them(data: bytes) -> None:
    judge = validator()
    judge.validate(stored(data))
    wrapped = "not bytes" in str(judge.rejected)
    assert not wrapped


def test_a_record_that_was_checked_is_read_without_another_check_and_nothing_like_it_is() -> None:
    judge = validator()
    good = seal(MEMBER, KEY, ME)
    first = judge.read(good, KEY, ME.peer_id, EXPIRES)
    assert first == MEMBER
    assert judge.read(good, KEY, ME.peer_id, EXPIRES) is first
    for record, key, peer, expires in (
        (good[:-1] + b" ", KEY, ME.peer_id, EXPIRES),
        (good, key_bytes("elsewhere"), ME.peer_id, EXPIRES),
        (good, KEY, OTHER.peer_id, EXPIRES),
        (good, KEY, ME.peer_id, EXPIRES + 1),
    ):
        with pytest.raises(ProtocolError):
            judge.read(record, key, peer, expires)


def test_an_older_record_does_not_replace_a_newer_one() -> None:
    judge = validator()
    newer = seal(replace(MEMBER, expires=EXPIRES + 1), KEY, ME)
    read = judge.read(newer, KEY, ME.peer_id, EXPIRES + 1)
    assert judge.read(seal(MEMBER, KEY, ME), KEY, ME.peer_id, EXPIRES) == MEMBER
    assert judge.read(newer, KEY, ME.peer_id, EXPIRES + 1) is read
