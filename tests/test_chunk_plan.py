"""Which donor is asked for which chunks, and when one is given up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.chunk_plan import MOST_CHUNKS, Patience, Trouble, groups, next_request
from peers.manifest import CHUNK_BYTES, Manifest


def manifest(round: int, root: str) -> Manifest:
    return Manifest(round, {}, (), b"", root)


@given(
    pending=st.sets(st.integers(0, 300), min_size=1).map(sorted),
    donors=st.integers(1, 9),
    rate=st.floats(0, 1e12),
)
def test_a_request_is_a_bounded_unbroken_run_of_what_is_pending(pending: list[int], donors: int, rate: float) -> None:
    chosen = next_request(pending, donors, rate)
    assert 1 <= len(chosen) <= MOST_CHUNKS
    assert list(chosen) == pending[: len(chosen)]
    assert len(chosen) == 1 or len(chosen) * CHUNK_BYTES <= 4 * rate
    assert len(chosen) == 1 or (len(chosen) - 1) * 2 * donors < len(pending)


@given(
    chunks=st.integers(1, 200),
    rates=st.lists(st.floats(0, 1e9), min_size=1, max_size=5),
    faults=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 16)), max_size=30),
)
def test_every_chunk_comes_once_whoever_fails(chunks: int, rates: list[float], faults: list[tuple[int, int]]) -> None:
    """Donors take turns; in a fault only the first few chunks of a request come, and the rest is given back."""
    pending, came = list(range(chunks)), list[int]()
    turn = 0
    while pending:
        chosen = next_request(pending, len(rates), rates[turn % len(rates)])
        del pending[: len(chosen)]
        kept = len(chosen)
        if faults and faults[-1][0] == turn % len(rates):
            kept = min(faults.pop()[1], len(chosen))
        elif turn % 7 == 6 and faults:
            faults.pop()
        came += chosen[:kept]
        pending = sorted([*pending, *chosen[kept:]])
        turn += 1
    assert sorted(came) == list(range(chunks))


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.tuples(st.integers(0, 3), st.sampled_from("abc"))))
def test_groups_hold_every_donor_once_by_root(offers: dict[str, tuple[int, str]]) -> None:
    rounds = {root: round for round, root in offers.values()}
    made = groups({donor: manifest(rounds[root], root) for donor, (_, root) in offers.items()})
    assert sorted(donor for group in made for donor in group.donors) == sorted(offers)
    assert len({group.manifest.root for group in made}) == len(made)
    for group in made:
        assert all(offers[donor][1] == group.manifest.root for donor in group.donors)
    found = [group.manifest.round for group in made]
    assert found == sorted(found, reverse=True)


def test_of_one_round_the_most_donors_come_first_then_the_most_preferred() -> None:
    made = groups({"p": manifest(5, "x"), "q": manifest(5, "y"), "r": manifest(5, "y"), "s": manifest(4, "z")})
    assert [group.donors for group in made] == [("q", "r"), ("p",), ("s",)]
    made = groups({"q": manifest(5, "y"), "p": manifest(5, "x")})
    assert [group.donors for group in made] == [("q",), ("p",)]


def outcomes(trouble: Trouble, *, progressed: bool, count: int) -> list[float | None]:
    account, pauses = Patience(), list[float | None]()
    for number in range(count):
        account, pause_s = account.after(trouble, progressed=progressed, now=10.0 * number, most_busy_s=25.0)
        pauses.append(pause_s)
    return pauses


@pytest.mark.parametrize(
    ("trouble", "progressed", "pauses"),
    [
        (Trouble.BROKE, False, [1.0, 2.0, None]),
        (Trouble.STALLED, False, [2.0, None]),
        (Trouble.BROKE, True, [0.0] * 9),
        (Trouble.STALLED, True, [0.0] * 9),
        (Trouble.BUSY, False, [0.5, 1.0, 2.0, None]),
        (Trouble.SAID_NO, True, [None]),
        (Trouble.LIED, True, [None]),
    ],
)
def test_what_each_trouble_costs(trouble: Trouble, progressed: bool, pauses: list[float | None]) -> None:
    assert outcomes(trouble, progressed=progressed, count=len(pauses)) == pauses


@given(st.lists(st.sampled_from(Trouble), min_size=1, max_size=400))
def test_a_donor_that_gives_nothing_is_given_up_in_bounded_time(troubles: list[Trouble]) -> None:
    """Whatever it does: each stream takes up to 15 s here."""
    account, now = Patience(), 0.0
    for trouble in troubles:
        account, pause_s = account.after(trouble, progressed=False, now=now, most_busy_s=300.0)
        if pause_s is None:
            break
        assert 0 <= pause_s <= 8.0
        now += pause_s + 15.0
    assert now < 1000.0
