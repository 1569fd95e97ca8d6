"""Reasons are told when they change."""

from hypothesis import given
from hypothesis import strategies as st

from gasloc.reasons import Reasons, kind

PEER = "12D3KooWJ3idPzkMkUzHsjqxYdZDpwTJ51L3Hqmagze89ZemzwGW"
OTHER = "12D3KooWQYhTNQdmr3ArTeUHRYzFg94BKyTkoWBDWez9kSCVe2Xo"


def behind(peer: str, round: int) -> str:
    return f"mixed with 0 of 1; {peer}: asked for round {round}; the partner is at round {round - 1}"


def test_the_same_reason_is_told_once_whoever_and_whichever_round_it_is_of() -> None:
    reasons = Reasons()
    assert reasons.changed(behind(PEER, 5))
    assert not reasons.changed(behind(PEER, 6))
    assert not reasons.changed(behind(OTHER, 17))
    assert reasons.changed(f"mixed with 0 of 1; {PEER}: did not answer in time")
    assert reasons.changed("")
    assert not reasons.changed("")
    assert reasons.changed(behind(PEER, 5))


def test_two_partners_that_fail_alike_are_no_other_reason_than_one() -> None:
    assert kind("a; p1: gone; p2: gone") == kind("a; p2: gone")
    assert kind("clipped at 1.5e-07") == kind("clipped at 12")


@given(st.lists(st.text(), max_size=6))
def test_what_is_repeated_at_once_is_never_told_again(told: list[str]) -> None:
    reasons = Reasons()
    for reason in told:
        reasons.changed(reason)
        assert not reasons.changed(reason)
