"""Training during an exchange: what is kept, when it pays, and what becomes of it when something fails meanwhile."""

import functools
import itertools
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gasloc import checkpoint, mixing, overlap
from gasloc.errors import RecipeError, RunError
from gasloc.events import Round
from gasloc.lane import Lane
from gasloc.optimizer import GaslocOptimizer, RoundResult
from gasloc.overlap import Overlap, resolved
from gasloc.pacing import Pace, local_steps, smooth
from gasloc.recipe import parse
from gasloc.simulation.conditions import Conditions
from gasloc.simulation.quadratic import QuadraticProblem
from gasloc.simulation.run import Result, Variant
from peers.errors import DaemonError
from peers.exchange import Answer, Offer, PeerId, Slot, Swap
from tests.meeting import at_once, seats
from tests.simulations import assert_equal, play

anytime = settings(deadline=None)
DEADLINE_S = 60.0

times_s = st.floats(1e-4, 1e3)


# --- the decision -----------------------------------------------------------------------------------------------


@anytime
@given(times_s, times_s, st.integers(1, 300), st.integers(1, 8), st.none() | st.integers(0, 300))
def test_what_is_chosen_makes_at_least_as_much_progress_as_any_other(
    exchange_s: float, step_s: float, steps: int, fragments: int, previous: int | None
) -> None:
    chosen, reason = overlap.choose(exchange_s, step_s, steps, fragments=fragments, previous=previous)
    assert reason
    assert chosen >= 0
    hiding = min(math.ceil(exchange_s / step_s), steps)
    if previous is None:
        assert chosen <= hiding

    def progress(tau: int) -> float:
        waited_s = fragments * max(0.0, exchange_s - tau * step_s)
        return (1 - overlap.cost(tau / steps)) / (steps * step_s + waited_s)

    ours = progress(min(chosen, hiding))
    assert all(ours >= progress(tau) * (1 - overlap.MARGIN) * (1 - 1e-9) for tau in range(hiding + 1))


@anytime
@given(times_s, times_s, st.integers(1, 300), st.none() | st.integers(0, 300))
def test_a_choice_repeats_itself(exchange_s: float, step_s: float, steps: int, previous: int | None) -> None:
    first, _ = overlap.choose(exchange_s, step_s, steps, previous=previous)
    assert overlap.choose(exchange_s, step_s, steps, previous=first)[0] == first


@pytest.mark.parametrize(("exchange_s", "step_s"), [(math.nan, 1.0), (1.0, math.nan), (0.0, 1.0), (1.0, math.inf)])
def test_what_is_not_measured_is_waited_for(exchange_s: float, step_s: float) -> None:
    assert overlap.choose(exchange_s, step_s, 30, previous=4) == (
        0,
        "waiting for each exchange: step and exchange times are not measured yet",
    )


def test_a_short_exchange_is_waited_for_and_a_long_one_is_not() -> None:
    steps, reason = overlap.choose(0.01, 1.0, 30)
    assert steps == 0
    assert reason.startswith("waiting for each exchange: an exchange takes 0.01 s")
    steps, reason = overlap.choose(9.5, 1.0, 30)
    assert 0 < steps <= 10
    assert "more progress in a second than waiting" in reason
    assert overlap.choose(9.5, 1.0, 30, previous=0)[0] > 0


def test_the_cost_grows_with_the_share_and_is_never_more_than_all() -> None:
    shares = [index / 20 for index in range(200)]
    costs = [overlap.cost(share) for share in shares]
    assert costs[0] == 0
    assert all(earlier <= later for earlier, later in itertools.pairwise(costs))
    assert costs[-1] <= 1


@pytest.mark.parametrize(("steps", "fragments"), [(0, 1), (1, 0)])
def test_counts_below_one_are_refused(steps: int, fragments: int) -> None:
    with pytest.raises(RecipeError, match=f"local_steps = {steps}, fragments = {fragments}"):
        overlap.choose(1.0, 1.0, steps, fragments=fragments)
    with pytest.raises(RecipeError, match="overlap = -1"):
        overlap.Choice(-1, 30, 1)


@anytime
@given(st.floats(0.001, 30), st.floats(0.001, 30), st.integers(2, 60), st.integers(1, 60))
def test_with_overlap_pacing_settles_in_five_rounds_of_a_change_and_stays(
    before_s: float, after_s: float, reference: int, wanted: int
) -> None:
    """A peer's link changes among seven that stay; it measures, chooses, publishes what it could not hide, paces."""
    others = [Pace(1.0, 0.1)] * 7
    choice = overlap.Choice("auto", reference, 1)
    choice.count_step(1.0)
    own, steps = Pace(1.0, math.nan), reference
    chosen: list[tuple[int, int]] = []
    for exchange_s in [before_s] * 8 + [after_s] * 20:
        bound, _ = choice.steps()
        choice.count_exchange(exchange_s)
        waited_s = max(0.0, exchange_s - bound)
        own = Pace(1.0, smooth(own.exchange_time_s, overlap.unhidden_s(exchange_s, waited_s)))
        steps, _ = local_steps(own, [own, *others], reference, 4 * reference, previous=steps)
        chosen.append((bound, steps))
    assert len({bound for bound, _ in chosen[8 + 5 :]}) == 1, "the overlap has settled"
    settled = [steps for _, steps in chosen[8 + 6 :]]
    assert max(settled) - min(settled) <= max(1, round(0.15 * max(settled)))
    turns = sum(earlier != later for earlier, later in itertools.pairwise(settled))
    assert turns <= 2


def test_one_exchange_out_of_line_changes_nothing() -> None:
    choice = overlap.Choice("auto", 30, 1)
    choice.count_step(1.0)
    for seconds in (6.0, 6.1, 5.9, 6.0):
        choice.count_exchange(seconds)
    usual, _ = choice.steps()
    assert usual > 0
    choice.count_exchange(400.0)
    choice.count_exchange(math.nan)
    assert choice.steps()[0] == usual


def test_the_wait_for_late_partners_is_no_link_time() -> None:
    assert overlap.link_time_s([2.0, 3.0], 1, 10.0) == 3.0
    assert overlap.link_time_s([2.0, 3.0], 3, 10.0) == 9.0
    assert overlap.link_time_s([2.0, 3.0], 3, 7.0) == 7.0
    assert math.isnan(overlap.link_time_s([], 0, 10.0))
    assert overlap.unhidden_s(3.0, 1.0) == 1.0
    assert math.isnan(overlap.unhidden_s(math.nan, 1.0))


def test_progress_is_kept_in_the_memory_of_what_was_sent() -> None:
    theta, current = {"w": torch.tensor([10.0, 20.0])}, {"w": torch.tensor([1.5, 2.0])}
    sent = {"w": torch.tensor([1.0, 2.5])}
    memory = sent["w"].data_ptr()
    overlap.keep_progress(theta, current, sent)
    assert sent["w"].tolist() == [10.5, 19.5]
    assert sent["w"].data_ptr() == memory
    assert (theta["w"].tolist(), current["w"].tolist()) == ([10.0, 20.0], [1.5, 2.0])


# --- the thread -------------------------------------------------------------------------------------------------


def lane_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gasloc-exchange"]


def assert_no_thread_is_left() -> None:
    for thread in lane_threads():
        thread.join(DEADLINE_S)
    assert not lane_threads()


def test_work_is_done_in_order_on_one_thread_that_ends() -> None:
    lane, order, threads = Lane(), list[int](), set[int]()

    def work(index: int) -> int:
        order.append(index)
        threads.add(threading.get_ident())
        if index == 1:
            raise DaemonError("p2pd ended")
        return index

    futures = [lane.run(functools.partial(work, index)) for index in range(3)]
    assert futures[2].result(DEADLINE_S) == 2
    with pytest.raises(DaemonError, match="p2pd ended"):
        futures[1].result(DEADLINE_S)
    assert order == [0, 1, 2]
    assert threading.get_ident() not in threads
    assert_no_thread_is_left()
    assert lane.run(lambda: 7).result(DEADLINE_S) == 7


# --- the optimizer ----------------------------------------------------------------------------------------------


@dataclass
class Partner:
    """A network with one partner, whose parameters are ours plus `add`; answers when it is told to."""

    add: float = 1.0
    me: PeerId = "me"
    slots: list[Slot] = field(default_factory=list)
    sent: list[Mapping[str, Tensor]] = field(default_factory=list)
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    fails: Exception | None = None
    answer: Answer = Answer.ACCEPT
    round: int = 0
    """Earlier rounds are over for the partner."""

    def members(self, round: int) -> set[PeerId]:
        return {"me", "partner"}

    def swap(self, slot: Slot, offers: Mapping[PeerId, Offer], *, timeout_s: float) -> dict[PeerId, Swap]:
        self.slots.append(slot)
        assert self.go.acquire(timeout=DEADLINE_S), "nobody let the partner answer"
        self.sent.append({name: tensor.clone() for name, tensor in offers["partner"].send.items()})
        if self.fails is not None:
            raise self.fails
        if slot.round < self.round:
            return {"partner": Swap(Answer.AHEAD, "is ahead", their_round=self.round)}
        if self.answer is not Answer.ACCEPT:
            return {"partner": Swap(self.answer, "broke off")}
        theirs = {name: tensor + self.add for name, tensor in offers["partner"].send.items()}
        return {"partner": Swap(Answer.ACCEPT, "whole", tensors=theirs, seconds=0.5)}

    def swap_any(
        self, slot: Slot, candidates: Sequence[PeerId], offer: Offer, *, timeout_s: float
    ) -> dict[PeerId, Swap]:
        return {}

    def others_rounds(self) -> list[int]:
        return []


class Weight(nn.Module):
    def __init__(self, value: float = 0.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((3,), value, dtype=dtype))
        self.register_buffer("mean", torch.zeros(2, dtype=dtype))


def make(
    model: nn.Module, network: Partner, *, overlap: Overlap = 3, steps: int = 4, lr: float = 0.125, rate: float = 1.0
) -> tuple[GaslocOptimizer, list[RoundResult]]:
    results: list[RoundResult] = []
    optimizer = GaslocOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr),
        model,
        network=network,
        local_steps=steps,
        overlap=overlap,
        mixing="average",
        outer=lambda anchor: torch.optim.SGD(anchor, lr=rate),
        on_round=results.append,
    )
    return optimizer, results


def take(model: nn.Module, optimizer: GaslocOptimizer, count: int) -> None:
    """Each step moves every number by -0.125, exactly."""
    for _ in range(count):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()


def let_come(optimizer: GaslocOptimizer, network: Partner) -> None:
    """The partner answers, and its answer is there."""
    network.go.release()
    assert_no_thread_is_left()


def test_hand_worked() -> None:
    """The partner is 2 above: the mix is phi + 1, and the outer step goes half of the way to it."""
    model, network = Weight(), Partner(add=2.0)
    optimizer, results = make(model, network, rate=0.5)
    take(model, optimizer, 4)
    assert (optimizer.round, optimizer.local_step) == (1, 0)
    assert results == []
    take(model, optimizer, 2)
    assert model.w.tolist() == [-0.75] * 3
    let_come(optimizer, network)
    assert model.w.tolist() == [-0.75] * 3, "only training changes the model"
    take(model, optimizer, 1)
    # theta = 0, mix = -0.5 + 2 / 2 = 0.5, theta_new = 0 - 0.5 * (0 - 0.5) = 0.25, progress since = 3 * -0.125
    assert model.w.tolist() == [0.25 - 0.375] * 3
    assert optimizer.snapshot()[1]["anchor/w"].tolist() == [0.25] * 3
    (result,) = results
    assert (result.round, result.local_steps, result.next_round, result.overlap_steps) == (0, 4, 1, 3)
    assert result.steps_since == 7, "its four, and three of the next round"
    assert result.partners == ("partner",)
    assert result.waited_s <= result.exchange_s
    assert network.sent[0]["w"].shape == (3,)
    take(model, optimizer, 1)
    network.go.release()
    optimizer.take_outcomes()
    assert network.slots == [Slot(0), Slot(1)]
    # theta_new and all four steps of the next round
    assert network.sent[1]["w"].tolist() == [0.25 - 0.5] * 3
    # mix 0.75, theta_new = 0.25 + 0.5 * 0.5
    assert model.w.tolist() == [0.5] * 3
    assert [(result.round, result.steps_since) for result in results] == [(0, 7), (1, 1)]


def test_what_travels_does_not_follow_training() -> None:
    model, network = Weight(), Partner()
    optimizer, _ = make(model, network)
    take(model, optimizer, 6)
    network.go.release()
    optimizer.take_outcomes()
    assert network.sent[0]["w"].tolist() == [-0.5] * 3


def test_past_its_bound_and_when_due_again_training_waits() -> None:
    for bound, waits_at in ((2, 6), (100, 8)):
        model, network = Weight(), Partner()
        optimizer, results = make(model, network, overlap=bound)
        take(model, optimizer, waits_at - 1)
        assert results == []
        network.go.release(2)
        take(model, optimizer, 1)
        assert [result.round for result in results] == [0]
        assert results[0].overlap_steps <= waits_at - 4
        optimizer.take_outcomes()
        assert_no_thread_is_left()


def test_without_steps_in_between_it_is_the_blocking_form_bit_for_bit() -> None:
    ends = []
    for bound in (0, 5):
        torch.manual_seed(3)
        model, network = Weight(0.1), Partner(add=math.pi)
        network.go.release(100)
        optimizer, results = make(model, network, overlap=bound, lr=0.037, rate=0.7)
        for _ in range(5):
            take(model, optimizer, 4)
            optimizer.take_outcomes()
        assert [result.round for result in results] == [0, 1, 2, 3, 4]
        assert all((result.overlap_steps, result.steps_since) == (0, 4) for result in results)
        ends.append(model.w.detach().clone())
    assert torch.equal(*ends)


def test_a_partner_that_fails_leaves_the_outer_step_on_ones_own() -> None:
    model, network = Weight(), Partner(answer=Answer.BROKEN)
    optimizer, results = make(model, network, rate=0.5)
    take(model, optimizer, 5)
    let_come(optimizer, network)
    take(model, optimizer, 1)
    assert model.w.tolist() == [-0.25 - 0.25] * 3
    assert not results[0].mixed
    assert "broke off" in results[0].reason


def test_what_an_exchange_raises_reaches_the_training_thread_and_leaves_nothing_under_way() -> None:
    model, network = Weight(), Partner(fails=DaemonError("p2pd ended and cannot be started"))
    optimizer, results = make(model, network)
    take(model, optimizer, 5)
    let_come(optimizer, network)
    with pytest.raises(DaemonError, match="p2pd ended and cannot be started"):
        take(model, optimizer, 1)
    assert results == []
    assert model.w.tolist() == [-0.75] * 3, "the model is what training made of it"
    optimizer.take_outcomes()
    assert_no_thread_is_left()


def test_a_rollback_keeps_what_was_sent_and_loses_what_came_after() -> None:
    model, network = Weight(), Partner(add=0.0)
    optimizer, results = make(model, network)
    take(model, optimizer, 5)
    network.go.release()
    with torch.no_grad():
        model.w[0] = math.inf
    optimizer.roll_back("the loss is nan")
    assert model.w.tolist() == [-0.5] * 3
    assert [result.round for result in results] == [0]
    assert (optimizer.round, optimizer.local_step) == (1, 1)
    network.go.release(5)
    take(model, optimizer, 3)
    optimizer.take_outcomes()
    assert [result.rolled_back for result in results] == [0, 1]


def test_parameters_that_broke_meanwhile_go_back_when_the_outcome_is_taken() -> None:
    model, network = Weight(), Partner(add=0.0)
    optimizer, _ = make(model, network)
    take(model, optimizer, 5)
    let_come(optimizer, network)
    with torch.no_grad():
        model.w[0] = math.nan
    take(model, optimizer, 1)
    assert model.w.tolist() == [-0.5] * 3
    assert optimizer.snapshot()[0] == 1
    network.go.release()
    optimizer.take_outcomes()


def test_a_third_rollback_in_a_row_ends_the_run_in_flight_too() -> None:
    model, network = Weight(), Partner()
    optimizer, _ = make(model, network)
    network.go.release(9)
    take(model, optimizer, 5)
    optimizer.roll_back("the loss is nan")
    optimizer.roll_back("the loss is nan")
    with pytest.raises(RunError, match="3rd time in a row"):
        optimizer.roll_back("the loss is nan")


def test_a_newcomer_gets_the_round_before_until_the_outcome_is_taken() -> None:
    model, network = Weight(), Partner(add=2.0)
    optimizer, _ = make(model, network)
    take(model, optimizer, 6)
    round, state = optimizer.snapshot()
    assert (round, state["anchor/w"].tolist()) == (0, [0.0] * 3)
    network.go.release()
    optimizer.take_outcomes()
    round, state = optimizer.snapshot()
    assert (round, state["anchor/w"].tolist()) == (1, [0.5] * 3)


def test_a_state_saved_in_flight_goes_on_as_if_that_exchange_had_not_been(tmp_path: Path) -> None:
    model, network = Weight(), Partner(add=2.0)
    optimizer, _ = make(model, network)
    take(model, optimizer, 6)
    state = optimizer.state_dict()
    checkpoint.save(tmp_path, state["tensors"], {"optimizer": state["meta"]})
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    network.go.release()
    optimizer.take_outcomes()

    found = checkpoint.load_latest(tmp_path)
    assert found is not None
    ends = []
    for _ in range(2):
        other, later = Weight(), Partner(add=2.0)
        other.load_state_dict(weights)
        resumed, results = make(other, later)
        resumed.load_state_dict({"meta": found.meta["optimizer"], "tensors": found.tensors})
        assert (resumed.round, resumed.local_step) == (1, 2)
        assert resumed.snapshot()[0] == 0
        later.go.release()
        take(other, resumed, 2)
        resumed.take_outcomes()
        assert later.slots == [Slot(1)]
        assert later.sent[0].keys() == {"w", "mean"}
        # all eight steps are in the next exchange: theta 0, phi -1, mix 0, outer rate 1
        assert other.w.tolist() == [0.0] * 3
        assert [result.round for result in results] == [1]
        ends.append(resumed.state_dict()["tensors"])
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


def test_one_that_was_behind_goes_on_after_the_round_in_which_it_mixed() -> None:
    model, network = Weight(), Partner(add=2.0, round=3)
    optimizer, results = make(model, network)
    take(model, optimizer, 5)
    network.go.release(20)
    optimizer.take_outcomes()
    assert results[0].mixed
    assert (optimizer.round, optimizer.local_step) == (4, 1)
    assert results[0].next_round == 4
    assert "behind" in results[0].next_reason
    take(model, optimizer, 3)
    optimizer.take_outcomes()
    assert network.slots == [Slot(0), Slot(3), Slot(4)]


def test_those_who_listen_to_rounds_may_use_gradients() -> None:
    heard: list[bool] = []
    for bound in (0, 2):
        model, network = Weight(), Partner()
        optimizer = GaslocOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            network=network,
            local_steps=2,
            overlap=bound,
            on_round=lambda result: heard.append(torch.is_grad_enabled()),
        )
        network.go.release(9)
        take(model, optimizer, 2)
        optimizer.take_outcomes()
    assert heard == [True, True]


def test_fresh_state_drops_what_is_under_way() -> None:
    model, network = Weight(), Partner(add=2.0)
    optimizer, results = make(model, network)
    take(model, optimizer, 5)
    round, state = optimizer.snapshot()
    network.go.release()
    optimizer.load_snapshot(round + 7, {name: tensor + 3 for name, tensor in state.items()})
    assert model.w.tolist() == [3.0] * 3
    assert (optimizer.round, optimizer.local_step, results) == (7, 0, [])
    network.go.release()
    take(model, optimizer, 4)
    optimizer.take_outcomes()
    assert [result.round for result in results] == [7]
    assert network.slots == [Slot(0), Slot(7)]


def test_a_bf16_model_keeps_outer_updates_too_small_for_it() -> None:
    """Each round the mix is 0.001 away, which bfloat16 cannot show beside 1; ten rounds of it are not lost."""
    model, network = Weight(1.0, torch.bfloat16), Partner(add=0.002)
    optimizer, _ = make(model, network, lr=0.0, steps=2)
    network.go.release(50)
    take(model, optimizer, 21)
    optimizer.take_outcomes()
    anchor = optimizer.snapshot()[1]["anchor/w"]
    torch.testing.assert_close(anchor, torch.full((3,), 1.01), rtol=0, atol=1e-6)
    assert torch.equal(model.w, anchor.to(torch.bfloat16))


def test_progress_of_a_bf16_model_is_kept_exactly() -> None:
    model, network = Weight(1.0, torch.bfloat16), Partner(add=0.002)
    optimizer, _ = make(model, network)
    take(model, optimizer, 6)
    network.go.release()
    optimizer.take_outcomes()
    torch.testing.assert_close(optimizer.snapshot()[1]["anchor/w"], torch.full((3,), 0.501), rtol=0, atol=1e-6)
    assert model.w.tolist() == [0.25] * 3


def test_local_steps_that_change_in_mid_round_exchange_each_fragment_once() -> None:
    model, network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), Partner(add=0.0)
    results: list[RoundResult] = []
    optimizer = GaslocOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        network=network,
        local_steps=8,
        fragments=4,
        overlap=1,
        mixing="average",
        on_round=results.append,
    )
    network.go.release(1000)
    for count, steps in ((3, 8), (2, 4), (4, 20), (25, 4), (30, 9)):
        optimizer.local_steps = steps
        take(model, optimizer, count)
    optimizer.take_outcomes()
    assert network.slots == sorted(network.slots)
    rounds = {slot.round for slot in network.slots if slot.round < optimizer.round}
    assert len(rounds) == len(results)
    for round in rounds:
        assert [slot.mix for slot in network.slots if slot.round == round] == [0, 1, 2, 3]


@pytest.mark.parametrize("fragments", [1, 3])
def test_two_peers_converge_and_stay_together(fragments: int) -> None:
    places = seats("ab")
    torch.manual_seed(0)
    target = torch.randn(6, dtype=torch.float64)
    models = [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6)).double() for _ in places]
    models[1].load_state_dict(models[0].state_dict())
    results: list[RoundResult] = []
    optimizers = [
        GaslocOptimizer(
            torch.optim.AdamW(model.parameters(), lr=0.02),
            model,
            network=seat,
            local_steps=6,
            fragments=fragments,
            overlap=2,
            on_round=results.append,
        )
        for model, seat in zip(models, places, strict=True)
    ]
    losses: list[list[float]] = [[], []]

    def work(peer: int) -> None:
        generator = torch.Generator().manual_seed(peer)
        for _ in range(25 * 6):
            inputs = torch.randn(16, 4, generator=generator, dtype=torch.float64)
            loss = (models[peer](inputs) - target).square().mean()
            losses[peer].append(loss.item())
            torch.autograd.backward(loss)
            optimizers[peer].step()
            optimizers[peer].zero_grad()
        optimizers[peer].take_outcomes()

    at_once(lambda: work(0), lambda: work(1))
    assert len(results) == 50
    assert all(result.mixed for result in results)
    for history in losses:
        assert sum(history[-6:]) < 0.1 * sum(history[:6])
    states = [{name: p.detach() for name, p in model.named_parameters()} for model in models]
    assert mixing.spread(states) < 0.05
    assert_no_thread_is_left()


# --- the simulator ----------------------------------------------------------------------------------------------


def simulated(overlap: Overlap, bandwidth: float = math.inf, landing: int | None = None) -> tuple[Result, list[Round]]:
    """Twelve rounds of four workers; what is left, and the rounds of the first."""
    values = {
        "rounds": 12,
        "local_steps": 6,
        "topology": "2-peer",
        "pacing": False,
        "exchange": {"overlap": overlap, "grace_s": 100.0},
        "evaluation": {"every_rounds": 4},
        "inner": {"learning_rate": 0.02, "warmup_steps": 4},
    }
    result, heard = play(
        parse(values),
        QuadraticProblem(8, tensors=2),
        [Conditions(bandwidth=bandwidth)] * 4,
        Variant(landing_steps=landing),
    )
    return result, [event for worker, _, event in heard if worker == "worker-0" and isinstance(event, Round)]


def test_overlap_where_there_is_none_is_refused() -> None:
    for changes in ({"topology": "noloco"}, {"topology": "syncer"}, {"outer": {"rule": "published"}}):
        recipe = parse({"exchange": {"overlap": 3}, **changes})
        with pytest.raises(RecipeError, match="overlap = 3 with topology"):
            play(recipe, QuadraticProblem(8), 4)


def test_auto_waits_in_all_to_all_and_a_number_does_not() -> None:
    assert [resolved("auto", topology) for topology in ("2-peer", "1-peer", "all-to-all")] == ["auto", "auto", "off"]
    assert resolved(3, "all-to-all") == 3
    assert resolved("off", "2-peer") == "off"
    runs = {}
    for mode in ("auto", "off"):
        values = {"topology": "all-to-all", "rounds": 4, "local_steps": 6, "exchange": {"overlap": mode}}
        runs[mode], _ = play(parse(values), QuadraticProblem(8, tensors=2), [Conditions(bandwidth=40.0)] * 3)
    for one, other in zip(runs["auto"].parameters, runs["off"].parameters, strict=True):
        assert_equal(one, other, 0.0)


def test_simulated_without_delay_is_blocking() -> None:
    blocking, _ = simulated("off")
    forced, _ = simulated("off", landing=0)
    for one, other in zip(blocking.parameters, forced.parameters, strict=True):
        assert_equal(one, other, 0.0)


def test_simulated_overlap_hides_the_link() -> None:
    """64 bytes to each of two partners at 70 bytes a second: an exchange takes 1.83 steps."""
    blocking, _ = simulated("off", 70.0)
    hidden, rounds = simulated(4, 70.0)
    forced, _ = simulated("off", 70.0, landing=2)
    assert blocking.seconds == pytest.approx(12 * (6 + 128 / 70), abs=0.1)
    assert hidden.seconds == pytest.approx(12 * 6 + 128 / 70, abs=0.1)
    assert [event.round for event in rounds] == list(range(12))
    assert [event.overlap_steps for event in rounds[:-1]] == [2] * 11
    assert all(event.waited_s == 0 for event in rounds[:-1])
    assert all(event.exchange_s == pytest.approx(128 / 70, abs=0.1) for event in rounds)
    for one, other in zip(hidden.parameters, forced.parameters, strict=True):
        assert_equal(one, other, 0.0)


def test_simulated_auto_waits_until_it_has_measured() -> None:
    result, rounds = simulated("auto", 70.0)
    assert rounds[0].overlap_steps == 0
    assert all(event.overlap_steps == 2 for event in rounds[1:-1])
    assert result.seconds == pytest.approx(12 * 6 + 2 * 128 / 70, abs=0.1)


def test_simulated_failures_and_newcomers_survive_overlap() -> None:
    recipe = parse(
        {
            "rounds": 20,
            "local_steps": 6,
            "fragments": 2,
            "topology": "1-peer",
            "exchange": {"overlap": 3, "grace_s": 5.0},
            "inner": {"learning_rate": 0.02, "warmup_steps": 4},
            "stale_rounds": 2,
        }
    )
    conditions = [Conditions(bandwidth=64.0, mtbf_s=70.0, mttr_s=10.0)] * 3
    conditions += [Conditions(bandwidth=64.0)] * 3 + [Conditions(step_time_s=4.0, bandwidth=64.0, join_s=30.0)]
    problem = QuadraticProblem(8, tensors=2)
    result, heard = play(recipe, problem, conditions)
    assert any(event.name == "warning" for _, _, event in heard)
    for parameters in result.parameters:
        assert problem.validation_loss(parameters) < 0.5 * problem.validation_loss(problem.initial())
