"""When lost peers are tried again, and who counts as lost."""

from hypothesis import given
from hypothesis import strategies as st

from peers.backoff import ALONE_LONGEST_S, FIRST_S, LONGEST_S, SHORT_LONGEST_S, SHORT_S, pause_s

jitters = st.floats(0, 1)
lost = st.floats(0, 1e9)


@given(st.integers(0, 10_000), lost, st.booleans(), jitters)
def test_pauses_grow_and_are_bounded(failures: int, lost_s: float, alone: bool, jitter: float) -> None:
    pause = pause_s(failures, lost_s=lost_s, alone=alone, jitter=jitter)
    assert 0.75 * FIRST_S <= pause <= (ALONE_LONGEST_S if alone else LONGEST_S)
    assert pause_s(failures + 1, lost_s=lost_s, alone=alone, jitter=jitter) >= pause
    assert pause_s(failures, lost_s=2 * lost_s, alone=alone, jitter=jitter) >= pause
    assert pause_s(failures, lost_s=lost_s, alone=True, jitter=jitter) <= pause_s(
        failures, lost_s=lost_s, alone=False, jitter=jitter
    )


@given(st.integers(0, 10_000), st.floats(0, SHORT_S), jitters)
def test_who_is_lost_for_a_short_while_is_tried_every_twenty_seconds(
    failures: int, lost_s: float, jitter: float
) -> None:
    assert pause_s(failures, lost_s=lost_s, alone=False, jitter=jitter) <= SHORT_LONGEST_S == 20.0


@given(st.floats(0, 86_400 * 7), st.lists(jitters, min_size=1))
def test_a_week_of_trying_is_bounded_work(lost_s: float, jitter: list[float]) -> None:
    tries, passed_s = 0, 0.0
    while passed_s < lost_s:
        passed_s += pause_s(tries, lost_s=passed_s, alone=False, jitter=jitter[tries % len(jitter)])
        tries += 1
    least_s = 0.75 * SHORT_LONGEST_S
    assert tries <= 5 + min(lost_s, 2 * 3600) / least_s + lost_s / (0.75 * LONGEST_S)
