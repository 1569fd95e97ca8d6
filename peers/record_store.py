"""`RecordStore`: what a DHT node holds, and what it answers to those who ask for what is new."""

import secrets
from collections.abc import Callable
from dataclasses import replace

from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage
from hivemind.utils import MSGPackSerializer

from peers.exchange import PeerId
from peers.record import SIGNATURE_BYTES, RecordValidator
from peers.record_log import Change, Page, RecordLog
from peers.record_wire import Ask

_MOST_KEYS = 16
"""Logs of so many runs are kept: a relay that has not entered its run yet takes any run's records."""


class RecordStore:
    """The records that our DHT node holds, those that strangers stored through hivemind included.

    What comes through hivemind was let through by the validator before; what comes with a question is checked here.
    """

    def __init__(self, validator: RecordValidator, *, clock: Callable[[], float]) -> None:
        """`clock` gives unix seconds."""
        self.validator = validator
        self._clock = clock
        self.storage = LoggedStorage(self._note)
        """In place of hivemind's own."""
        self._epoch = secrets.token_bytes(8)
        self._logs: dict[bytes, RecordLog] = {}

    def _note(self, key: DHTID, peer: object, packed: bytes, expires: float) -> None:
        """A record that the storage took, after the validator let it through."""
        record = MSGPackSerializer.loads(packed)
        raw = key.to_bytes()
        if not isinstance(peer, str) or not isinstance(record, bytes):
            return
        if raw not in self._logs and len(self._logs) >= _MOST_KEYS:
            return
        self._logs.setdefault(raw, RecordLog(self._epoch)).note(peer, record, expires, self._clock())

    def answer(self, ask: Ask) -> Page:
        """Takes the record that the question brings, where it is good; then tells what is new."""
        held = ask.change is not None and self._take(ask.key, ask.change)
        log = self._logs.get(ask.key)
        page = log.since(ask.epoch, ask.number, self._clock()) if log else Page(self._epoch, 0)
        return replace(page, held=held)

    def _take(self, key: bytes, change: Change) -> bool:
        """Whether we hold that record now."""
        log = self._logs.get(key)
        latest = log.latest(change.peer) if log else None
        if latest is not None and latest[1] == change.expires:
            return True
        body = change.body or (latest[0][SIGNATURE_BYTES:] if latest else b"")
        record = change.signature + body
        if not body or not self.validator.admit(record, key, change.peer, change.expires):
            return False
        return self.hold(key, change.peer, record, change.expires)

    def hold(self, key: bytes, peer: PeerId, record: bytes, expires: float) -> bool:
        """Keeps a record that was checked. False where a later one is held, or this one has expired."""
        packed = MSGPackSerializer.dumps(record)
        stored: bool = self.storage.store(DHTID.from_bytes(key), packed, expires, subkey=peer)
        return stored


class LoggedStorage(DHTLocalStorage):  # type: ignore[misc]  # hivemind has no types
    """hivemind's storage, which tells of each record that it took."""

    def __init__(self, note: Callable[[DHTID, object, bytes, float], None]) -> None:
        super().__init__()
        self._note = note

    def store_subkey(self, key: DHTID, subkey: object, value: bytes, expiration_time: float) -> bool:
        stored: bool = super().store_subkey(key, subkey, value, expiration_time)
        if stored:
            self._note(key, subkey, value, expiration_time)
        return stored
