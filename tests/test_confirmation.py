"""A state that was downloaded is doubted until partners have confirmed it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gasloc.confirmation import LEAST_PARTNERS, Confirmation, Opinion


def told(*far: bool) -> Confirmation:
    confirmation = Confirmation()
    confirmation.begin(["donor"])
    for number, each in enumerate(far):
        confirmation.hear(f"peer-{number}", far=each)
    return confirmation


@pytest.mark.parametrize(
    ("far", "opinion"),
    [
        ((), Opinion.OPEN),
        ((True, True), Opinion.OPEN),
        ((True, True, True), Opinion.APART),
        ((True, True, False), Opinion.APART),
        ((True, False, False), Opinion.LIKE_OTHERS),
        ((True, True, False, False), Opinion.OPEN),
    ],
)
def test_most_partners_decide_once_there_are_enough(far: tuple[bool, ...], opinion: Opinion) -> None:
    assert told(*far).conclude()[0] is opinion


def test_nothing_downloaded_is_nothing_to_doubt() -> None:
    confirmation = Confirmation()
    confirmation.hear("a", far=True)
    assert not confirmation.open
    assert confirmation.conclude()[0] is Opinion.LIKE_OTHERS
    assert confirmation.doubtful() == set()


def test_one_partner_counts_once_by_its_last_word() -> None:
    confirmation = told(True, False)
    for _ in range(9):
        confirmation.hear("peer-0", far=True)
    assert confirmation.conclude()[0] is Opinion.OPEN
    confirmation.hear("peer-2", far=False)
    assert confirmation.conclude()[0] is Opinion.LIKE_OTHERS


@given(far=st.lists(st.booleans(), min_size=LEAST_PARTNERS, max_size=30))
def test_what_was_confirmed_is_never_doubted_again_whoever_comes(far: list[bool]) -> None:
    confirmation = told(False, False, False)
    assert confirmation.conclude()[0] is Opinion.LIKE_OTHERS
    for number, each in enumerate(far):
        confirmation.hear(f"sybil-{number}", far=each)
        assert confirmation.conclude()[0] is Opinion.LIKE_OTHERS


def test_who_gave_it_and_who_is_near_it_are_not_asked_next() -> None:
    assert told(True, False, True, True).doubtful() == {"donor", "peer-1"}


def test_a_new_download_begins_anew() -> None:
    confirmation = told(True, True, True)
    confirmation.begin(["another"])
    assert confirmation.open
    assert confirmation.conclude()[0] is Opinion.OPEN
    assert confirmation.doubtful() == {"another"}
