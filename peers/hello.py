"""What the dialler says first, what it is answered, and the decisions behind both. No I/O."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from peers.errors import ProtocolError
from peers.exchange import Answer, PeerId, Slot
from peers.wire import clean, reason_of

PROTOCOL_VERSION = 1
MAX_NOTES = 16
_MAX_TEXT_CHARACTERS = 128
_MAX_ROUND = 2**62
MAX_PATIENCE_S = 86_400.0
_REPLIES = (
    Answer.ACCEPT,
    Answer.BEHIND,
    Answer.AHEAD,
    Answer.PAIRED_ELSEWHERE,
    Answer.BUSY,
    Answer.REFUSED,
)


@dataclass(frozen=True, slots=True)
class Hello:
    """The dialler's first words: who it thinks we train with, and at which slot it is."""

    run: str
    digest: str
    slot: Slot
    patience_s: float
    """How long the dialler will wait for an answer."""
    note: Mapping[str, float] = field(default_factory=dict)
    version: int = PROTOCOL_VERSION
    left_over: bool = False
    """The dialler's own partners are not to be had: it asks whether we are left over in its slot, too."""

    def to_json(self) -> dict[str, object]:
        """As plain data."""
        return {
            "version": self.version,
            "run": self.run,
            "digest": self.digest,
            "slot": [self.slot.round, self.slot.mix, self.slot.phase],
            "patience_s": self.patience_s,
            "note": dict(self.note),
            "left_over": self.left_over,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> "Hello":
        """Out of a stranger's words. Raises `ProtocolError` that names the field, and nothing else."""
        return cls(
            run=_text(value, "run"),
            digest=_text(value, "digest"),
            slot=_slot(value.get("slot")),
            patience_s=min(_number("patience_s", value.get("patience_s")), MAX_PATIENCE_S),
            note=read_note(value.get("note")),
            version=_whole("version", value.get("version")),
            left_over=_flag("left_over", value.get("left_over", False)),
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a hello, or to a probe."""

    answer: Answer
    reason: str
    round: int | None = None
    """The round that the answering peer is at; None before its first."""
    note: Mapping[str, float] = field(default_factory=dict)
    next_slot_s: float | None = None
    """In how many seconds it will be at its next round, if that takes as long as the last; None: not known."""

    def to_json(self) -> dict[str, object]:
        """As plain data."""
        return {
            "answer": self.answer.value,
            "reason": self.reason,
            "round": self.round,
            "note": dict(self.note),
            "next_slot_s": self.next_slot_s,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> "Reply":
        """Out of a stranger's words. Raises `ProtocolError` that names the field, and nothing else."""
        answer = value.get("answer")
        if not (isinstance(answer, str) and answer in _REPLIES):
            raise ProtocolError(f"a reply with the unknown answer {clean(repr(answer))}")
        round_, next_slot_s = value.get("round"), value.get("next_slot_s")
        return cls(
            answer=Answer(answer),
            reason=reason_of(value),
            round=None if round_ is None else _whole("round", round_),
            note=read_note(value.get("note")),
            next_slot_s=None if next_slot_s is None else _number("next_slot_s", next_slot_s),
        )


def read_note(value: object) -> dict[str, float]:
    """A note: at most 16 short names with finite numbers. Raises `ProtocolError`."""
    if not isinstance(value, Mapping):
        raise ProtocolError("the note is not an object")
    if len(value) > MAX_NOTES:
        raise ProtocolError(f"the note has {len(value)} entries, over {MAX_NOTES}")
    return {_name(name): _number(f"note {clean(repr(name))}", number) for name, number in value.items()}


def _name(name: object) -> str:
    if not (isinstance(name, str) and 0 < len(name) <= _MAX_TEXT_CHARACTERS and name.isprintable()):
        raise ProtocolError("a note's name is not a printable text of 1 to 128 characters")
    return name


def _text(value: Mapping[str, object], key: str) -> str:
    text = value.get(key)
    if not (isinstance(text, str) and len(text) <= _MAX_TEXT_CHARACTERS and (text.isprintable())):
        raise ProtocolError(f"'{key}' is not a printable text of at most {_MAX_TEXT_CHARACTERS} characters")
    return text


def _whole(key: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_ROUND:
        raise ProtocolError(f"'{key}' is not a whole number from 0 to 2^62")
    return value


def _number(key: str, value: object) -> float:
    if type(value) is int and abs(value) <= _MAX_ROUND:
        return float(value)
    if type(value) is float and math.isfinite(value):
        return value
    raise ProtocolError(f"'{key}' is not a finite number")


def _flag(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ProtocolError(f"'{key}' is neither true nor false")
    return value


def _slot(value: object) -> Slot:
    if not (isinstance(value, list) and len(value) == 3):
        raise ProtocolError("'slot' is not [round, mix, phase]")
    phase = value[2]
    if not (isinstance(phase, str) and len(phase) <= _MAX_TEXT_CHARACTERS and phase.isprintable()):
        raise ProtocolError("the slot's phase is not a printable text of at most 128 characters")
    return Slot(_whole("round", value[0]), _whole("mix", value[1]), phase)


def dials(me: PeerId, partner: PeerId, me_reachable: bool, partner_reachable: bool) -> bool:
    """Whether I am the one of two partners that opens the stream.

    A peer that cannot be dialled dials the one that can; otherwise the lower id dials.
    """
    if me_reachable != partner_reachable:
        return partner_reachable
    return me < partner


def mismatch(hello: Hello, *, run: str, digest: str) -> str | None:
    """The first difference that makes two peers strangers, theirs against ours; None where there is none."""
    if hello.version != PROTOCOL_VERSION:
        return f"protocol version {hello.version} against {PROTOCOL_VERSION}"
    if hello.run != run:
        return f"run '{hello.run}' against '{run}'"
    if hello.digest != digest:
        return f"recipe digest {hello.digest[:12]} against {digest[:12]}"
    return None


class Stage(Enum):
    """How far a peer is in a slot, to others that are left over in it."""

    WAITING = auto()
    """It waits for its own partners."""
    LEFT = auto()
    """None of them came to trade; it has not said yet whether it looks for another."""
    OPEN = auto()
    """It looks for anybody."""
    ASKING = auto()
    """It has asked one, and waits for the answer."""
    TAKEN = auto()
    """A trade has begun."""
    OVER = auto()
    """It goes on alone."""


class Place:
    """Which slots a peer has reached, and its stage in each that is not passed.

    Rounds and mixes only grow until `step_back`; phases of one mix come in any order.
    """

    def __init__(self) -> None:
        self.latest: Slot | None = None
        self._stages: dict[str, Stage] = {}
        self._began_s = 0.0
        self._round_s: float | None = None

    def reach(self, slot: Slot, now_s: float) -> None:
        """Moves on to `slot`; `now_s` by any clock that does not go back.

        Raises `ValueError` when its round and mix are before the latest.
        """
        if self._compare(slot) < 0:
            raise ValueError(f"{words(slot)} comes before {words(slot if not self.latest else self.latest)}")
        if self._compare(slot) > 0:
            self._stages.clear()
        if self.latest is None or slot.round > self.latest.round:
            self._round_s = None if self.latest is None else (now_s - self._began_s) / (slot.round - self.latest.round)
            self._began_s = now_s
        self._stages.setdefault(slot.phase, Stage.WAITING)
        self.latest = slot

    def step_back(self) -> None:
        """Forgets where it was: the state of an earlier round was taken, and that round is gone through again.

        What was traded in it before went over streams that have ended, so none of it can be taken for new.
        """
        self.latest = None
        self._stages.clear()
        self._round_s = None

    def enter(self, slot: Slot, stage: Stage) -> None:
        """Tells the stage in a slot that was reached; without effect once it is passed."""
        if self._compare(slot) == 0 and slot.phase in self._stages:
            self._stages[slot.phase] = stage

    def stage(self, slot: Slot) -> Stage | None:
        """The stage in a slot; None where it is not reached, or passed."""
        return self._stages.get(slot.phase) if self._compare(slot) == 0 else None

    def next_slot_s(self, now_s: float) -> float | None:
        """In how many seconds the next round is reached, if it takes as long as the last; None: not known."""
        return None if self._round_s is None else max(self._began_s + self._round_s - now_s, 0.0)

    def is_ahead_of(self, slot: Slot) -> bool:
        """Whether `slot` can no longer be reached."""
        return self._compare(slot) < 0

    def has_reached(self, slot: Slot) -> bool:
        """Whether `slot` was begun, or passed."""
        return self._compare(slot) < 0 or (self._compare(slot) == 0 and slot.phase in self._stages)

    @property
    def round(self) -> int | None:
        """The latest round; None before the first."""
        return self.latest.round if self.latest else None

    def _compare(self, slot: Slot) -> int:
        """1 when `slot` is later than the latest, -1 when earlier, 0 within the same mix."""
        if self.latest is None:
            return 1
        theirs, ours = (slot.round, slot.mix), (self.latest.round, self.latest.mix)
        return (theirs > ours) - (theirs < ours)


def judge(hello: Hello, *, run: str, digest: str, place: Place, waiting: bool) -> tuple[Answer, str]:
    """What a hello is answered, and why.

    `place` is where this peer is; `waiting`, whether it waits for the dialler in the dialler's slot.
    `BEHIND` and `AHEAD` say where this peer is, seen from the dialler.
    """
    different = mismatch(hello, run=run, digest=digest)
    if different:
        return Answer.REFUSED, different
    if hello.left_over:
        return whereabouts_left_over(hello.slot, place)
    if waiting:
        return Answer.ACCEPT, "expected"
    return whereabouts(hello.slot, place)


def whereabouts(slot: Slot, place: Place) -> tuple[Answer, str]:
    """How a peer at `place` that does not wait for the asker in `slot` answers it."""
    if place.latest is None:
        return Answer.BEHIND, f"asked for {words(slot)}; the partner has not begun"
    if place.is_ahead_of(slot):
        return Answer.AHEAD, f"asked for {words(slot)}; the partner is already at {words(place.latest)}"
    if place.has_reached(slot):
        return Answer.PAIRED_ELSEWHERE, f"the partner does not wait for us in {words(slot)}, or no longer does"
    return Answer.BEHIND, f"asked for {words(slot)}; the partner is at {words(place.latest)}"


def whereabouts_left_over(slot: Slot, place: Place) -> tuple[Answer, str]:
    """How a peer at `place` answers one that is left over in `slot` and looks for any other."""
    stage = place.stage(slot)
    if stage is None:
        return whereabouts(slot, place)
    return _TO_THE_LEFT_OVER[stage]


_TO_THE_LEFT_OVER = {
    Stage.WAITING: (Answer.BEHIND, "it still waits for its own partners"),
    Stage.LEFT: (Answer.BEHIND, "its own partners did not come, and it does not look for others yet"),
    Stage.OPEN: (Answer.ACCEPT, "left over too"),
    Stage.ASKING: (Answer.BUSY, "it asks another just now"),
    Stage.TAKEN: (Answer.PAIRED_ELSEWHERE, "it mixes with another"),
    Stage.OVER: (Answer.PAIRED_ELSEWHERE, "it went on alone"),
}


def words(slot: Slot) -> str:
    """A slot in words."""
    mix = f", mix {slot.mix}" if slot.mix else ""
    phase = f", {slot.phase}" if slot.phase else ""
    return f"round {slot.round}{mix}{phase}"
