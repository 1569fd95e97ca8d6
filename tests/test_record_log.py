"""The log of records: whoever reads it on from where it was has what it holds. Its questions and answers as bytes."""

import contextlib
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.errors import ProtocolError
from peers.identity import peer_id_of
from peers.record import SIGNATURE_BYTES
from peers.record_log import MOST_CHANGES, Change, Page, RecordLog
from peers.record_wire import MAX_ASK_BYTES, MAX_PAGE_BYTES, Ask, decode_ask, decode_page, encode_ask, encode_page

EPOCH = b"epoch..1"
PEERS = [peer_id_of(bytes([number]) * 32) for number in range(5)]

signatures = st.binary(min_size=64, max_size=64)
changes = st.builds(
    Change,
    peer=st.binary(min_size=32, max_size=32).map(peer_id_of),
    expires=st.floats(allow_nan=False),
    signature=signatures,
    body=st.binary(max_size=300),
)
epochs = st.binary(min_size=8, max_size=8)
numbers = st.integers(0, 2**64 - 1)
asks = st.builds(Ask, st.binary(min_size=20, max_size=20), epochs, numbers, st.none() | changes)
pages = st.builds(
    Page, epochs, numbers, st.lists(changes, max_size=5).map(tuple), more=st.booleans(), held=st.booleans()
)


@dataclass
class Reader:
    """One who reads on from time to time, and knows bodies from this log alone."""

    number: int = 0
    epoch: bytes = bytes(8)
    records: dict[str, tuple[bytes, float]] = field(default_factory=dict)

    def read(self, log: RecordLog, now: float) -> int:
        """Reads all there is; returns how many bodies came."""
        bodies = 0
        while True:
            page = log.since(self.epoch, self.number, now)
            self.epoch, self.number = page.epoch, page.number
            for change in page.changes:
                body = change.body or self.records[change.peer][0][SIGNATURE_BYTES:]
                bodies += bool(change.body)
                self.records[change.peer] = change.signature + body, change.expires
            if not page.more:
                return bodies

    def alive(self, now: float) -> dict[str, tuple[bytes, float]]:
        return {peer: known for peer, known in self.records.items() if known[1] > now}


steps = st.lists(
    st.tuples(
        st.sampled_from(PEERS), st.sampled_from([b"a", b"b"]), st.integers(1, 9), st.integers(0, 3), st.booleans()
    ),
    max_size=120,
)


@given(steps)
def test_one_who_reads_on_has_all_that_is_alive(steps: list[tuple[str, bytes, int, int, bool]]) -> None:
    log, often, seldom, now = RecordLog(EPOCH), Reader(), Reader(), 0.0
    held: dict[str, tuple[bytes, float]] = {}
    for number, (peer, body, life_s, passed_s, looks) in enumerate(steps):
        now += passed_s
        if peer in held and held[peer][1] >= now + life_s:
            continue  # a store takes only what lives longer
        record = number.to_bytes(64, "big") + body
        log.note(peer, record, now + life_s, now)
        held[peer] = record, now + life_s
        often.read(log, now)
        if looks:
            seldom.read(log, now)
    seldom.read(log, now)
    alive = {peer: known for peer, known in held.items() if known[1] > now}
    newcomer = Reader()
    newcomer.read(log, now)
    assert often.alive(now) == seldom.alive(now) == newcomer.records == alive


def test_a_renewal_comes_without_its_body_and_a_long_log_in_pages() -> None:
    log, reader = RecordLog(EPOCH), Reader()
    peers = [peer_id_of(number.to_bytes(32, "big")) for number in range(1000)]
    for renewal in range(3):
        for number, peer in enumerate(peers):
            log.note(peer, bytes([renewal]) * 64 + b"body %d" % number, 10.0 + renewal, 0.0)
        assert reader.read(log, 0.0) == (0 if renewal else 1000)
    assert len(reader.records) == 1000
    page = log.since(bytes(8), 77, 0.0)
    assert page.more
    assert len(page.changes) == MOST_CHANGES
    assert all(change.body for change in page.changes), "of another log, a place is worth nothing"
    assert log.since(EPOCH, 2**63, 0.0).changes == ()


@given(asks, pages)
def test_questions_and_answers_are_read_back(ask: Ask, page: Page) -> None:
    assert decode_ask(encode_ask(ask)) == ask
    assert decode_page(encode_page(page)) == page
    assert len(encode_ask(ask)) <= MAX_ASK_BYTES


def test_the_longest_page_is_within_the_limit() -> None:
    log = RecordLog(EPOCH)
    for number in range(2 * MOST_CHANGES):
        log.note(peer_id_of(number.to_bytes(32, "big")), bytes(64) + b"x" * (1984 if number % 8 == 0 else 1), 9.0, 0.0)
    assert len(encode_page(log.since(EPOCH, 0, 0.0))) <= MAX_PAGE_BYTES


@given(st.one_of(st.binary(max_size=400), pages.map(encode_page), asks.map(encode_ask)), st.data())
def test_any_bytes_are_read_or_refused(payload: bytes, data: st.DataObject) -> None:
    if payload:
        at = data.draw(st.integers(0, len(payload) - 1))
        payload = payload[:at] + bytes([payload[at] ^ data.draw(st.integers(0, 255))]) + payload[at + 1 :]
        payload = payload[: data.draw(st.integers(0, len(payload)))]
    for decode in (decode_ask, decode_page):
        with contextlib.suppress(ProtocolError):
            decode(payload)


def test_a_question_brings_one_record_at_most() -> None:
    change = Change(PEERS[0], 1.0, bytes(64), b"x")
    twice = encode_page(Page(EPOCH, 0, (change, change)))[17:]
    with pytest.raises(ProtocolError, match="several"):
        decode_ask(encode_ask(Ask(bytes(20), EPOCH, 0)) + twice)
