"""Hellos, replies and the decisions behind them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.errors import ProtocolError
from peers.exchange import Answer, Slot
from peers.hello import Hello, Place, Reply, Stage, dials, judge, whereabouts
from peers.wire import decode_json, encode_json

words = st.text(st.characters(categories=["L", "N", "P", "Zs"], include_characters=" "), max_size=20).filter(
    str.isprintable
)
numbers = st.floats(allow_nan=False, allow_infinity=False)
notes = st.dictionaries(words.filter(bool), numbers, max_size=16)
slots = st.builds(Slot, st.integers(0, 2**40), st.integers(0, 100), words)
hellos = st.builds(Hello, words, words, slots, st.floats(0, 86_400), notes, st.integers(0, 9), st.booleans())
replies = st.builds(
    Reply,
    st.sampled_from([Answer.ACCEPT, Answer.BEHIND, Answer.AHEAD, Answer.PAIRED_ELSEWHERE, Answer.BUSY, Answer.REFUSED]),
    words.map(str.strip).filter(bool),
    st.none() | st.integers(0, 2**40),
    notes,
    st.none() | st.floats(0, 1e9),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


@given(hellos)
def test_a_hello_survives_the_wire(hello: Hello) -> None:
    assert Hello.from_json(decode_json(encode_json(hello.to_json()))) == hello


@given(replies)
def test_a_reply_survives_the_wire(reply: Reply) -> None:
    assert Reply.from_json(decode_json(encode_json(reply.to_json()))) == reply


@given(hellos, st.data())
def test_a_mutated_hello_is_a_hello_or_a_protocol_error(hello: Hello, data: st.DataObject) -> None:
    value: dict[str, Any] = hello.to_json()
    key = data.draw(st.sampled_from(sorted(value)))
    value[key] = data.draw(json_values)
    check_total(Hello.from_json, json.dumps(value).encode())
    payload = bytearray(encode_json(hello.to_json()))
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    check_total(Hello.from_json, bytes(payload))


@given(replies, st.data())
def test_a_mutated_reply_is_a_reply_or_a_protocol_error(reply: Reply, data: st.DataObject) -> None:
    value: dict[str, Any] = reply.to_json()
    value[data.draw(st.sampled_from(sorted(value)))] = data.draw(json_values)
    check_total(Reply.from_json, json.dumps(value).encode())


@given(st.binary(max_size=300) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_refused_with_a_protocol_error(payload: bytes) -> None:
    check_total(Hello.from_json, payload)
    check_total(Reply.from_json, payload)


def check_total(parse: Any, payload: bytes) -> None:
    """Parses, or raises `ProtocolError` with one printable line."""
    try:
        parsed = parse(decode_json(payload))
    except ProtocolError as error:
        reason = str(error)
    else:
        reason = ""
        encode_json(parsed.to_json())
    assert reason.isprintable()


@given(words, words, st.booleans(), st.booleans())
def test_exactly_one_of_two_dials(one: str, other: str, one_reachable: bool, other_reachable: bool) -> None:
    if one == other:
        return
    first = dials(one, other, one_reachable, other_reachable)
    assert first != dials(other, one, other_reachable, one_reachable)
    if one_reachable != other_reachable:
        assert first == other_reachable
    else:
        assert first == (one < other)


def hello(**changes: Any) -> Hello:
    values: dict[str, Any] = {"run": "r", "digest": "d" * 64, "slot": Slot(5), "patience_s": 1.0}
    return Hello(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 2}, "protocol version 2 against 1"),
        ({"run": "other"}, "run 'other' against 'r'"),
        ({"digest": "e" * 64}, "recipe digest eeeeeeeeeeee against dddddddddddd"),
        ({"version": 3, "run": "other"}, "protocol version 3 against 1"),
    ],
)
def test_strangers_are_refused_with_the_first_difference(changes: dict[str, Any], reason: str) -> None:
    answer = judge(hello(**changes), run="r", digest="d" * 64, place=Place(), waiting=True)
    assert answer == (Answer.REFUSED, reason)


def test_a_hello_is_judged_by_where_we_are() -> None:
    place = Place()

    def ask(slot: Slot, *, waiting: bool = False) -> Answer:
        return judge(hello(slot=slot), run="r", digest="d" * 64, place=place, waiting=waiting)[0]

    assert ask(Slot(0)) is Answer.BEHIND
    place.reach(Slot(5, 0, "scatter"), 1.0)
    assert ask(Slot(5, 0, "scatter")) is Answer.PAIRED_ELSEWHERE
    assert ask(Slot(5, 0, "scatter"), waiting=True) is Answer.ACCEPT
    assert ask(Slot(5, 0, "gather")) is Answer.BEHIND
    assert ask(Slot(5, 1)) is Answer.BEHIND
    assert ask(Slot(4, 9)) is Answer.AHEAD
    place.reach(Slot(5, 0, "gather"), 2.0)
    assert ask(Slot(5, 0, "gather")) is Answer.PAIRED_ELSEWHERE
    place.reach(Slot(5, 1), 3.0)
    assert ask(Slot(5, 0, "gather")) is Answer.AHEAD
    assert place.round == 5


@given(st.lists(st.builds(Slot, st.integers(0, 3), st.integers(0, 2), st.sampled_from(["", "a", "b"])), max_size=8))
def test_a_place_only_moves_on(path: list[Slot]) -> None:
    place = Place()
    for slot in sorted(path, key=lambda slot: (slot.round, slot.mix)):
        place.reach(slot, 0.0)
        assert place.has_reached(slot)
        assert whereabouts(slot, place)[0] is Answer.PAIRED_ELSEWHERE
        assert whereabouts(Slot(slot.round + 1), place)[0] is Answer.BEHIND
        if slot.round:
            with pytest.raises(ValueError, match="comes before"):
                place.reach(Slot(slot.round - 1, 99), 0.0)
            assert whereabouts(Slot(slot.round - 1, 99), place)[0] is Answer.AHEAD


def test_one_that_is_left_over_is_answered_by_how_far_we_are_in_its_slot() -> None:
    place = Place()

    def ask(slot: Slot) -> Answer:
        question = hello(slot=slot, left_over=True)
        return judge(question, run="r", digest="d" * 64, place=place, waiting=True)[0]

    assert ask(Slot(5)) is Answer.BEHIND
    place.reach(Slot(5), 0.0)
    for stage, answer in [
        (Stage.WAITING, Answer.BEHIND),
        (Stage.LEFT, Answer.BEHIND),
        (Stage.OPEN, Answer.ACCEPT),
        (Stage.ASKING, Answer.BUSY),
        (Stage.TAKEN, Answer.PAIRED_ELSEWHERE),
        (Stage.OVER, Answer.PAIRED_ELSEWHERE),
    ]:
        place.enter(Slot(5), stage)
        assert ask(Slot(5)) is answer
    assert ask(Slot(4)) is Answer.AHEAD
    assert ask(Slot(6)) is Answer.BEHIND
    place.reach(Slot(6), 1.0)
    place.enter(Slot(5), Stage.OPEN)  # too late: it is passed
    assert ask(Slot(5)) is Answer.AHEAD
    assert judge(hello(slot=Slot(6), run="s", left_over=True), run="r", digest="d" * 64, place=place, waiting=True) == (
        Answer.REFUSED,
        "run 's' against 'r'",
    )


def test_the_next_round_is_foretold_by_the_last() -> None:
    place = Place()
    assert place.next_slot_s(0.0) is None
    place.reach(Slot(3), 10.0)
    assert place.next_slot_s(11.0) is None
    place.reach(Slot(3, 1), 12.0)
    place.reach(Slot(5), 30.0)  # two rounds in 20 s
    assert place.next_slot_s(34.0) == pytest.approx(6.0)
    assert place.next_slot_s(99.0) == 0.0
