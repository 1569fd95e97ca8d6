"""The syncer's rules under a virtual clock, which is just numbers."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gasloc import syncer_rules
from gasloc.errors import ModelError, RecipeError
from gasloc.syncer_rules import (
    Arrival,
    Merge,
    Nothing,
    SyncerOptions,
    SyncerState,
    Verdict,
    Wait,
    advance,
    decide,
    grace_s,
    merge,
    once_each,
    receive,
    start,
    token_shares,
)

# A busy machine may take any time for one example.
anytime = settings(deadline=None)

RUN = "a" * 64
FOUR = SyncerOptions(RUN, learners=4, quorum=2, grace_share=0.5, overlap_steps=2, step_time_s=1.0, sync_time_s=0.2)


def report(learner: str, at_s: float, tokens: float = 100.0, steps: float = 10.0, version: int = 0) -> Arrival:
    return Arrival(learner, at_s, tokens, steps, RUN, version)


@st.composite
def option_sets(draw: st.DrawFn) -> SyncerOptions:
    learners = draw(st.integers(1, 6))
    return SyncerOptions(
        RUN,
        learners=learners,
        quorum=draw(st.integers(1, learners)),
        grace_share=draw(st.floats(0, 0.99)),
        overlap_steps=draw(st.integers(0, 10)),
        step_time_s=draw(st.sampled_from([0.0, math.nan, 0.1, 1.0, 7.5])),
        sync_time_s=draw(st.sampled_from([0.0, math.nan, 0.05, 2.0])),
    )


report_lists = st.lists(
    st.builds(report, st.sampled_from("abcdef"), st.floats(0, 60), st.floats(1, 1e6), st.floats(1, 100)),
    max_size=25,
)


def test_nothing_is_decided_without_reports() -> None:
    assert decide(5.0, [], FOUR) == (Nothing(), "no learner has reported")
    assert decide(5.0, [report("a", 5.1)], FOUR)[0] == Nothing()


def test_below_the_quorum_it_waits_and_names_the_next_look() -> None:
    decision, reason = decide(1e6, [report("a", 0.0)], FOUR)
    assert decision == Wait(1e6 + 1.0)
    assert reason == "1 of the 2 learners of the quorum reported: look again at 1000001.000 s"


def test_grace_window_by_hand() -> None:
    arrivals = [report("b", 10.4), report("a", 10.0)]
    # Slack 2 * 1.0 - 0.4 - 0.2 = 1.4 s, half of it from the quorum at 10.4 s on.
    decision, reason = decide(10.4, arrivals, FOUR)
    assert isinstance(decision, Wait)
    assert decision.until_s == pytest.approx(11.1, abs=1e-12)
    assert reason == "2 of 4 learners reported, quorum 2: grace window of 0.700 s, look again at 11.100 s"
    assert decide(decision.until_s - 1e-6, arrivals, FOUR)[0] == decision
    merged, reason = decide(decision.until_s, [*arrivals, report("c", 11.0)], FOUR)
    assert isinstance(merged, Merge)
    assert [arrival.learner for arrival in merged.arrivals] == ["a", "b", "c"]
    assert reason == "3 of 4 learners reported, quorum 2: the grace window of 0.700 s has passed"


def test_all_learners_are_merged_at_once() -> None:
    decision, reason = decide(1.0, [report(learner, 1.0) for learner in "dcba"], FOUR)
    assert isinstance(decision, Merge)
    assert [arrival.learner for arrival in decision.arrivals] == list("abcd")
    assert reason == "all 4 learners reported"


@pytest.mark.parametrize(
    "options",
    [
        replace(FOUR, grace_share=0.0),
        replace(FOUR, overlap_steps=0),
        replace(FOUR, step_time_s=0.0),
        replace(FOUR, step_time_s=math.nan),
        replace(FOUR, sync_time_s=math.nan),
        replace(FOUR, step_time_s=math.inf),
        replace(FOUR, sync_time_s=2.0),
    ],
)
def test_without_slack_the_quorum_is_merged_at_once(options: SyncerOptions) -> None:
    decision, reason = decide(3.0, [report("a", 2.5), report("b", 3.0)], options)
    assert isinstance(decision, Merge)
    assert reason == "2 of 4 learners reported, quorum 2: no slack for a grace window"


def test_a_slow_quorum_leaves_less_of_the_window() -> None:
    assert grace_s(0.0, FOUR) == pytest.approx(0.9, abs=1e-12)
    assert grace_s(1.0, FOUR) == pytest.approx(0.4, abs=1e-12)
    assert grace_s(1.8, FOUR) == 0.0
    assert grace_s(1e9, FOUR) == 0.0


def test_a_learner_that_reports_twice_counts_once_with_its_latest() -> None:
    first, latest = report("a", 1.0, tokens=10), report("a", 2.0, tokens=70)
    assert isinstance(decide(2.0, [latest, first], FOUR)[0], Wait)
    assert once_each([latest, first]) == (replace(latest, at_s=1.0),)


def test_reporting_again_does_not_draw_the_window_out() -> None:
    arrivals = [report("a", 0.0), report("b", 0.1)]
    until = decide(0.1, arrivals, FOUR)[0]
    for time_s in (0.3, 0.5, 0.7):
        arrivals += [report("a", time_s), report("b", time_s)]
        assert decide(0.7, arrivals, FOUR)[0] == until


@pytest.mark.parametrize("quorum", [0, -1, 5])
def test_a_quorum_that_cannot_be_is_refused_naming_both(quorum: int) -> None:
    with pytest.raises(RecipeError, match=rf"quorum = {quorum} with 4 learners"):
        SyncerOptions(RUN, learners=4, quorum=quorum)


def test_other_options_out_of_range_are_refused() -> None:
    for share in (1.0, -0.1, math.nan):
        with pytest.raises(RecipeError, match="grace_share"):
            replace(FOUR, grace_share=share)
    with pytest.raises(RecipeError, match="overlap_steps = -1"):
        replace(FOUR, overlap_steps=-1)
    with pytest.raises(RecipeError, match="stale_versions = -1"):
        replace(FOUR, stale_versions=-1)
    for look_s in (0.0, math.inf, math.nan):
        with pytest.raises(RecipeError, match="look_s"):
            replace(FOUR, look_s=look_s)


@anytime
@given(st.floats(0, 100), report_lists, option_sets())
def test_decisions_keep_quorum_bound_and_one_report_a_learner(
    now_s: float, arrivals: list[Arrival], options: SyncerOptions
) -> None:
    decision, reason = decide(now_s, arrivals, options)
    assert reason
    come = once_each(arrival for arrival in arrivals if arrival.at_s <= now_s)
    learners = {arrival.learner for arrival in come}
    if len(learners) < options.quorum:
        assert isinstance(decision, Wait if learners else Nothing)
        if isinstance(decision, Wait):
            assert decision.until_s > now_s
        return
    times_s = sorted(arrival.at_s for arrival in come)
    quorum_at_s = times_s[options.quorum - 1]
    slack_s = options.overlap_steps * options.step_time_s - (quorum_at_s - times_s[0]) - options.sync_time_s
    bound_s = quorum_at_s + (options.grace_share * max(0.0, slack_s) if math.isfinite(slack_s) else 0.0)
    if isinstance(decision, Wait):
        assert now_s < decision.until_s <= bound_s
        assert len(learners) < options.learners
    else:
        assert isinstance(decision, Merge)
        assert decision.arrivals == come
        assert now_s >= bound_s or len(learners) >= options.learners


def play(arrivals: list[Arrival], options: SyncerOptions) -> tuple[SyncerState, list[tuple[float, Merge]]]:
    """Runs the state machine of one fragment on a virtual clock until nothing can change it."""
    state, looks, now_s = start([0]), 0, 0.0
    merges: list[tuple[float, Merge]] = []
    coming = sorted(arrivals, key=lambda arrival: arrival.at_s)
    while True:
        looks += 1
        assert looks <= 3 * len(arrivals) + 1, "every look but a few follows a report"
        state, decision, _ = advance(state, 0, now_s, options)
        if isinstance(decision, Merge):
            merges.append((now_s, decision))
            continue
        short = len(state.fragments[0].pending) < options.quorum
        if not coming and short:
            return state, merges
        until_s = decision.until_s if isinstance(decision, Wait) and not short else math.inf
        if coming and coming[0].at_s <= until_s:
            arrival = coming.pop(0)
            now_s = arrival.at_s
            # The learner has taken every merge until now.
            arrival = replace(arrival, version=state.fragments[0].version)
            state, verdict, _ = receive(state, 0, arrival, options)
            assert verdict in (Verdict.ACCEPTED, Verdict.AGAIN)
        else:
            assert until_s > now_s
            now_s = until_s


@anytime
@given(report_lists, option_sets())
def test_a_whole_run_ends_and_merges_each_report_at_most_once(arrivals: list[Arrival], options: SyncerOptions) -> None:
    state, merges = play(arrivals, options)
    assert state.fragments[0].version == len(merges)
    merged = [arrival for _, done in merges for arrival in done.arrivals]
    for now_s, done in merges:
        learners = [arrival.learner for arrival in done.arrivals]
        assert learners == sorted(set(learners))
        assert len(learners) >= options.quorum
        first_s = min(arrival.at_s for arrival in done.arrivals)
        quorum_at_s = sorted(arrival.at_s for arrival in done.arrivals)[options.quorum - 1]
        assert now_s <= quorum_at_s + grace_s(quorum_at_s - first_s, options)
    # Each report that counted is one of those sent, and no report counts twice.
    sent = [(arrival.learner, arrival.tokens, arrival.steps) for arrival in arrivals]
    counted = [(arrival.learner, arrival.tokens, arrival.steps) for arrival in (*merged, *state.fragments[0].pending)]
    for each in set(counted):
        assert counted.count(each) <= sent.count(each)
    assert {arrival.learner for arrival in arrivals} == {learner for learner, _, _ in counted}


def test_a_merge_clears_what_it_took_and_counts_up() -> None:
    state = start([7, 7])
    for arrival in (report("a", 1.0, version=7), report("b", 1.5, version=7)):
        state, verdict, reason = receive(state, 1, arrival, FOUR)
        assert verdict is Verdict.ACCEPTED
        assert reason == f"learner {arrival.learner} reported fragment 1 at version 7"
    before = state
    waited, decision, _ = advance(state, 1, 1.5, FOUR)
    assert waited is state
    assert isinstance(decision, Wait)
    state, decision, _ = advance(state, 1, decision.until_s, FOUR)
    assert isinstance(decision, Merge)
    done = state.fragments[1]
    assert (done.version, done.pending, done.merged) == (8, (), ("a", "b"))
    assert done.merged_at_s == pytest.approx(1.5 + 0.5 * (2 - 0.5 - 0.2), abs=1e-12)
    assert state.fragments[0] == before.fragments[0]
    assert before.fragments[1].version == 7, "transitions leave the old state as it was"
    assert isinstance(advance(state, 1, 100.0, FOUR)[1], Nothing)


def test_a_late_report_counts_in_the_next_merge() -> None:
    options = replace(FOUR, grace_share=0.0)
    state = start([3])
    for learner in "ab":
        state, _, _ = receive(state, 0, report(learner, 1.0, version=3), options)
    state, decision, _ = advance(state, 0, 1.0, options)
    assert isinstance(decision, Merge)
    state, verdict, reason = receive(state, 0, report("c", 1.2, version=3), options)
    assert verdict is Verdict.LATE
    assert reason == "learner c is 1 behind on fragment 0 at version 4: it counts in the next merge"
    state, _, _ = receive(state, 0, report("a", 5.0, version=4), options)
    state, decision, _ = advance(state, 0, 5.0, options)
    assert isinstance(decision, Merge)
    assert [arrival.learner for arrival in decision.arrivals] == ["a", "c"]


def test_a_report_that_comes_again_replaces_the_first() -> None:
    state, _, _ = receive(start([0]), 0, report("a", 1.0, tokens=10), FOUR)
    state, verdict, reason = receive(state, 0, report("a", 1.0, tokens=70), FOUR)
    assert verdict is Verdict.AGAIN
    assert reason == "learner a reported fragment 0 at version 0 again: its latest counts, once"
    assert state.fragments[0].pending == (report("a", 1.0, tokens=70),)
    state, _, _ = receive(state, 0, report("a", 8.0, tokens=90), FOUR)
    assert state.fragments[0].pending == (report("a", 1.0, tokens=90),), "the first one sets the time"


@pytest.mark.parametrize(
    ("arrival", "reason"),
    [
        (replace(report("a", 1.0, version=9), run="b" * 64), f"it is of run {'b' * 64}, this syncer of run {RUN}"),
        (report("a", 1.0, version=3), "fragment 0 is 6 merges behind, more than 5: take fresh state"),
        (report("a", 1.0, tokens=0.0, version=9), "tokens = 0.0 is not a number above 0"),
        (report("a", 1.0, tokens=math.inf, version=9), "tokens = inf is not a number above 0"),
        (report("a", 1.0, steps=-1.0, version=9), "steps = -1.0 is not a number above 0"),
        (report("a", 1.0, steps=math.nan, version=9), "steps = nan is not a number above 0"),
        (report("a", math.nan, version=9), "its time nan is not a number"),
    ],
)
def test_a_report_that_cannot_count_is_refused_by_reason(arrival: Arrival, reason: str) -> None:
    state = start([9])
    after, verdict, words = receive(state, 0, arrival, FOUR)
    assert after is state
    assert verdict is Verdict.REFUSED
    assert words == f"learner a refused: {reason}"


def test_a_report_just_within_the_limit_of_age_is_late_not_refused() -> None:
    state, verdict, _ = receive(start([9]), 0, report("a", 1.0, version=9 - FOUR.stale_versions), FOUR)
    assert verdict is Verdict.LATE
    assert len(state.fragments[0].pending) == 1


def test_a_fragment_that_is_not_there_is_refused() -> None:
    state = start([0, 0])
    for fragment in (-1, 2):
        after, verdict, words = receive(state, fragment, report("a", 1.0), FOUR)
        assert after is state
        assert verdict is Verdict.REFUSED
        assert words == f"learner a refused: there is no fragment {fragment}, they go from 0 to 1"
        with pytest.raises(IndexError, match=f"no fragment {fragment}"):
            advance(state, fragment, 1.0, FOUR)


def test_learners_ahead_of_a_restarted_syncer_are_taken() -> None:
    state, verdict, reason = receive(start([10]), 0, report("a", 1.0, version=14), FOUR)
    assert verdict is Verdict.ACCEPTED
    assert reason == "learner a is 4 ahead of fragment 0 at version 10: the syncer restarted from older state"
    assert len(state.fragments[0].pending) == 1


def test_a_start_that_cannot_be_is_refused() -> None:
    with pytest.raises(RecipeError, match="fragments = 0"):
        start([])
    with pytest.raises(ValueError, match="version -1 of fragment 1"):
        start([0, -1])


def test_learners_of_mixed_speed_contribute_by_tokens() -> None:
    # In one second at 1x, 3x and 10x speed, all with 50 tokens a step.
    arrivals = [report(str(speed), 1.0, tokens=50.0 * speed, steps=speed) for speed in (1, 3, 10)]
    weights = token_shares(arrivals)
    assert weights == {"1": 2_500.0, "3": 7_500.0, "10": 25_000.0}


# Merging tensors


def tensors(*values: float) -> dict[str, Tensor]:
    return {"weight": torch.tensor(values, dtype=torch.float64)}


def test_plain_mean_by_hand() -> None:
    delta = merge(tensors(1.0, 2.0), {"a": tensors(0.0, 2.0), "b": tensors(1.0, 6.0)}, {"a": 3.0, "b": 1.0}, "mean")
    torch.testing.assert_close(delta["weight"], torch.tensor([0.75, -1.0], dtype=torch.float64), rtol=0, atol=1e-12)


def test_radial_directional_averaging_by_hand_and_plain_embeddings() -> None:
    theta = {name: torch.zeros(2, dtype=torch.float64) for name in ("weight", "embedding")}
    phis = {
        "a": {name: torch.tensor([-3.0, 0.0], dtype=torch.float64) for name in theta},
        "b": {name: torch.tensor([0.0, -1.0], dtype=torch.float64) for name in theta},
    }
    delta = merge(theta, phis, {"a": 5.0, "b": 5.0}, embeddings={"embedding"})
    # Orthogonal differences (3, 0) and (0, 1): mean length 2 along the diagonal; plain mean (1.5, 0.5).
    expected = torch.tensor([math.sqrt(2), math.sqrt(2)], dtype=torch.float64)
    torch.testing.assert_close(delta["weight"], expected, rtol=0, atol=1e-12)
    expected = torch.tensor([1.5, 0.5], dtype=torch.float64)
    torch.testing.assert_close(delta["embedding"], expected, rtol=0, atol=1e-12)


@anytime
@given(st.integers(1, 6), st.integers(0, 2**32), st.floats(1e-3, 1e3))
def test_rda_of_equal_fragments_is_the_mean(learners: int, seed: int, weight: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    theta = {"w": torch.randn(3, 4, generator=generator, dtype=torch.float64)}
    phi = {"w": torch.randn(3, 4, generator=generator, dtype=torch.float64)}
    phis = {str(index): phi for index in range(learners)}
    weights = {name: weight * (1 + int(name)) for name in phis}
    radial, plain = merge(theta, phis, weights, "rda"), merge(theta, phis, weights, "mean")
    torch.testing.assert_close(radial["w"], plain["w"], rtol=0, atol=1e-12)
    torch.testing.assert_close(plain["w"], theta["w"] - phi["w"], rtol=0, atol=1e-12)


def test_equal_tokens_are_the_unweighted_mean_and_order_does_not_matter() -> None:
    theta = tensors(1.0, -2.0, 0.5)
    phis = {"a": tensors(0.3, 0.1, 0.7), "b": tensors(-1.0, 2.0, 3.0), "c": tensors(9.0, -4.0, 0.0)}
    weights = token_shares([report(learner, 1.0) for learner in phis])
    mean = torch.stack([theta["weight"] - phi["weight"] for phi in phis.values()]).mean(0)
    torch.testing.assert_close(merge(theta, phis, weights, "mean")["weight"], mean, rtol=0, atol=1e-12)
    backwards = dict(reversed(phis.items()))
    for rule in ("mean", "rda"):
        assert torch.equal(
            merge(theta, backwards, weights, rule)["weight"], merge(theta, phis, weights, rule)["weight"]
        )


def test_half_precision_fragments_are_widened_and_inputs_stay() -> None:
    theta = {"w": torch.tensor([1.0, 2.0])}
    phi = {"w": torch.tensor([0.5, 1.0], dtype=torch.bfloat16)}
    delta = merge(theta, {"a": phi}, {"a": 1.0}, "mean")
    assert delta["w"].dtype == torch.float32
    assert torch.equal(delta["w"], torch.tensor([0.5, 1.0]))
    assert torch.equal(theta["w"], torch.tensor([1.0, 2.0]))
    assert phi["w"].dtype == torch.bfloat16


def test_what_cannot_be_merged_is_refused() -> None:
    theta, phi = tensors(1.0, 2.0), tensors(0.0, 0.0)
    with pytest.raises(RecipeError, match="merge = 'median' is not one of: rda, mean"):
        merge(theta, {"a": phi}, {"a": 1.0}, "median")
    with pytest.raises(ModelError, match="learner a"):
        merge(theta, {"a": tensors(0.0)}, {"a": 1.0})
    with pytest.raises(ValueError, match="one weight a learner"):
        merge(theta, {"a": phi}, {"b": 1.0})
    for weight in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="weight"):
            merge(theta, {"a": phi}, {"a": weight})
    with pytest.raises(ValueError, match="no differences"):
        merge(theta, {}, {})


def test_quorum_of_all_with_one_fragment_is_diloco() -> None:
    """Five rounds of the syncer with K = M and equal weights against a plain DiLoCo, float64."""
    learners, rounds = ["a", "b", "c"], 5
    generator = torch.Generator().manual_seed(0)
    targets = {learner: torch.randn(6, generator=generator, dtype=torch.float64) for learner in learners}
    initial = torch.randn(6, generator=generator, dtype=torch.float64)

    def train(learner: str, theta: Tensor) -> Tensor:
        for _ in range(4):
            theta = theta - 0.1 * (theta - targets[learner])
        return theta

    plain, momentum = initial.clone(), torch.zeros(6, dtype=torch.float64)
    for _ in range(rounds):
        gradient = plain - torch.stack([train(learner, plain) for learner in learners]).mean(0)
        momentum = 0.9 * momentum + gradient
        plain = plain - 0.7 * (gradient + 0.9 * momentum)

    options = SyncerOptions(RUN, learners=3, quorum=3)
    state, theta = start([0]), torch.nn.Parameter(initial.clone())
    outer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)
    for now in range(rounds):
        phis = {learner: {"w": train(learner, theta.detach())} for learner in learners}
        decision: object = Nothing()
        for learner in learners:
            state, _, _ = receive(state, 0, report(learner, float(now), version=now), options)
            state, decision, _ = advance(state, 0, float(now), options)
        assert isinstance(decision, Merge)
        delta = merge({"w": theta.detach()}, phis, token_shares(decision.arrivals), "mean")
        theta.grad = delta["w"]
        outer.step()
    torch.testing.assert_close(theta.detach(), plain, rtol=0, atol=1e-12)


def test_a_slow_learner_may_be_further_behind_than_one_that_was_cut_off() -> None:
    limit = partial(syncer_rules.stale_versions, local_steps=10, stale_rounds=5)
    assert limit(50, 3) == 5 * 3 * syncer_rules.SLOWEST
    assert limit(51, 3) == 5 * 3
    assert limit(1, 0) == 5 * syncer_rules.SLOWEST
