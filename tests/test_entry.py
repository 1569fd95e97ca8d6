"""Whose state a peer goes on from: in every order of coming back, nobody steps back and nobody begins anew."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gasloc.entry import Source, decide
from peers.membership import MemberState, Status

STALE = 5
rounds_ = st.integers(0, 40)
statuses = st.lists(
    st.builds(Status, rounds_, st.sampled_from([MemberState.JOINING, MemberState.TRAINING, MemberState.WAITING])),
    max_size=6,
)


@given(st.integers(1, 40), statuses, st.booleans())
def test_with_a_checkpoint_a_peer_never_takes_an_older_state(mine: int, others: list[Status], first: bool) -> None:
    source, reason = decide(mine, others, first=first, stale_rounds=STALE)
    assert source in (Source.CHECKPOINT, Source.DONOR)
    assert reason
    if source is Source.DONOR:
        training = sorted(other.round for other in others if other.state is not MemberState.JOINING)
        assert training[(len(training) - 1) // 2] > mine + STALE


@given(statuses, st.booleans())
def test_without_one_it_never_begins_anew_where_anybody_has_trained(others: list[Status], first: bool) -> None:
    source, _ = decide(0, others, first=first, stale_rounds=STALE)
    if any(other.round for other in others):
        assert source in (Source.DONOR, Source.WAIT)
    if not others:
        assert source is (Source.INITIAL if first else Source.WAIT)


@given(st.integers(0, 40), statuses)
def test_where_there_is_a_syncer_it_has_the_state(mine: int, others: list[Status]) -> None:
    merging = Status(3, MemberState.MERGING)
    assert decide(mine, [*others, merging], first=False, stale_rounds=STALE)[0] is Source.DONOR


@pytest.mark.parametrize("saved", [(10, 11, 12), (10, 12, 14), (2, 11, 20)], ids=str)
def test_all_come_back_at_different_rounds_in_every_order(saved: tuple[int, ...]) -> None:
    """Each sees those that came before it; where all stopped within `stale_rounds`, each goes on from its own."""
    for order in permutations(saved):
        back: list[Status] = []
        for number, mine in enumerate(order):
            source, _ = decide(mine, back, first=number == 0, stale_rounds=STALE)
            donor = max((other.round for other in back), default=0)
            now = donor if source is Source.DONOR else mine
            assert now >= mine, "never backwards"
            if max(saved) - min(saved) <= STALE:
                assert source is Source.CHECKPOINT
            back.append(Status(now, MemberState.TRAINING))
