"""A learner: what it sends, what it keeps when a merge comes, what it does while there is none."""

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gasloc import checkpoint
from gasloc.errors import ModelError, RunError, UsageError
from gasloc.learner import Delivery, Learner, Report
from gasloc.optimizer import GaslocOptimizer, RoundResult
from peers.errors import BehindError, UnreachableError

State = dict[str, Tensor]


@dataclass
class Post:
    """A `SyncerLink` whose answers the test gives, when it likes."""

    sent: list[Report] = field(default_factory=list)
    merges: "list[Future[Delivery]]" = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    answer_while_waiting: bool = False
    rounds: list[int] = field(default_factory=list)

    def send(self, report: Report) -> "Future[Delivery]":
        self.sent.append(report)
        self.merges.append(Future())
        return self.merges[-1]

    def await_merges(self, merges: "Sequence[Future[Delivery]]", *, timeout_s: float) -> None:
        self.waits.append(timeout_s)
        if self.answer_while_waiting:
            for merge in merges:
                if not merge.done():
                    self.answer(self.merges.index(merge), add=100.0)

    def others_rounds(self) -> list[int]:
        return self.rounds

    def answer(self, index: int, *, add: float, version: int | None = None) -> None:
        """Theta is what was sent in report `index`, and `add` on each number."""
        report = self.sent[index]
        merged = {name: tensor + add for name, tensor in report.tensors.items()}
        new = report.version + 1 if version is None else version
        self.merges[index].set_result(Delivery("hub", report.fragment, new, merged, 2, 3.0, 2.0, 100, 50))

    def fail(self, index: int, error: Exception) -> None:
        self.merges[index].set_exception(error)


def parameters(fill: float = 0.0) -> State:
    return {"a": torch.full((2,), fill, dtype=torch.float64), "b": torch.full((3,), fill, dtype=torch.float64)}


PARTS = [["a"], ["b"]]


# --- the account ------------------------------------------------------------------------------------------------


def test_progress_since_it_was_sent_is_kept() -> None:
    post = Post()
    learner = Learner(PARTS, post)
    learner.count_step(10.0)
    learner.report(0, parameters(1.0), round=0)
    post.answer(0, add=5.0)
    current = parameters(1.25)
    values = learner.take(current)
    assert values.keys() == {"a"}
    assert torch.equal(values["a"], torch.full((2,), 6.25, dtype=torch.float64))
    assert torch.equal(current["a"], parameters(1.25)["a"])
    assert learner.in_flight == ()


def test_what_was_sent_does_not_follow_training() -> None:
    post, phi = Post(), parameters(1.0)
    learner = Learner(PARTS, post)
    learner.count_step(1.0)
    learner.report(0, phi, round=0)
    phi["a"].add_(7.0)
    assert torch.equal(post.sent[0].tensors["a"], parameters(1.0)["a"])


def test_without_progress_the_merged_fragment_is_taken_bit_for_bit() -> None:
    post, phi = Post(), {"a": torch.rand(50, dtype=torch.float64), "b": torch.rand(3, dtype=torch.float64)}
    learner = Learner(PARTS, post)
    learner.count_step(1.0)
    learner.report(0, phi, round=0)
    post.answer(0, add=math.pi)
    assert torch.equal(learner.take(phi)["a"], phi["a"] + math.pi)


def test_tokens_and_steps_count_from_what_the_last_merge_was_made_of() -> None:
    post = Post()
    learner = Learner(PARTS, post)
    for _ in range(4):
        learner.count_step(10.0)
    learner.report(0, parameters(), round=3)
    learner.count_step(10.0)
    learner.count_step(10.0)
    post.answer(0, add=0.0, version=17)
    learner.take(parameters())
    learner.report(0, parameters(), round=4)
    learner.report(1, parameters(), round=4)
    told = [(r.fragment, r.version, r.round, r.tokens, r.steps) for r in post.sent]
    assert told == [(0, 0, 3, 40.0, 4), (0, 17, 4, 20.0, 2), (1, 0, 4, 60.0, 6)]


def test_a_report_that_failed_counts_again_in_the_next() -> None:
    post = Post()
    learner = Learner(PARTS, post)
    learner.count_step(10.0)
    learner.report(0, parameters(), round=0)
    post.fail(0, UnreachableError("hub refused the connection"))
    assert learner.take(parameters()) == {}
    learner.count_step(10.0)
    learner.report(0, parameters(), round=1)
    assert (post.sent[1].tokens, post.sent[1].steps, post.sent[1].version) == (20.0, 2, 0)
    outcome = learner.end_round()
    assert (outcome.reported, outcome.merged, outcome.swaps, outcome.distance) == (2, 0, {}, None)
    assert outcome.reason == "0 of 2 fragments merged, 1 under way; fragment 0: hub refused the connection"


def test_one_flight_a_fragment() -> None:
    post = Post()
    learner = Learner(PARTS, post)
    learner.count_step(1.0)
    for index in (0, 1, 0):
        learner.report(index, parameters(), round=0)
    assert [report.fragment for report in post.sent] == [0, 1]
    assert learner.in_flight == (0, 1)
    assert "fragment 0 was due again before its last merge had come back: skipped" in learner.end_round().reason
    post.answer(0, add=0.0)
    learner.take(parameters())
    learner.report(0, parameters(), round=1)
    assert len(post.sent) == 3


def test_a_round_in_words_and_numbers() -> None:
    post = Post()
    learner = Learner(PARTS, post)
    learner.count_step(1.0)
    for index in (0, 1):
        learner.report(index, parameters(1.0), round=0)
        post.answer(index, add=2.0)
    learner.take(parameters(1.0))
    outcome = learner.end_round()
    assert outcome.reason == "2 of 2 fragments merged, 2.0 learners each"
    assert outcome.distance == pytest.approx(2.0)
    (swap,) = outcome.swaps.values()
    assert (swap.bytes_sent, swap.bytes_received, swap.seconds) == (200, 100, 1.0)
    assert learner.end_round().reason == "0 of 0 fragments merged"


def test_fresh_state_drops_what_was_under_way() -> None:
    post = Post()
    learner = Learner(PARTS, post)
    learner.count_step(1.0)
    learner.report(0, parameters(), round=0)
    learner.restart(torch.tensor([4, 5]))
    post.answer(0, add=1.0)
    assert not learner.arrived()
    assert learner.take(parameters()) == {}
    assert learner.merges().tolist() == [4, 5]
    learner.count_step(3.0)
    learner.report(1, parameters(), round=9)
    assert (post.sent[1].version, post.sent[1].tokens) == (5, 3.0)


@pytest.mark.parametrize(
    "merges", [torch.tensor([1]), torch.tensor([1, -1]), torch.tensor([1.0, 2.0]), torch.tensor([[1, 2]])]
)
def test_merges_of_another_form_are_refused(merges: Tensor) -> None:
    learner = Learner(PARTS, Post())
    with pytest.raises(ModelError, match="'merges'"):
        learner.restart(merges)
    assert learner.merges().tolist() == [0, 0]


@given(st.lists(st.sampled_from(["step", "report", "answer", "take"]), max_size=40))
def test_no_token_is_lost_or_counted_twice(events: list[str]) -> None:
    """Merged tokens and those still to be reported are all that were trained, whatever the order."""
    post = Post()
    learner = Learner([["a", "b"]], post)
    trained, merged, value = 0, 0.0, 0.0
    for event in events:
        if event == "step":
            learner.count_step(1.0)
            trained, value = trained + 1, value + 1.0
        elif event == "report" and trained > merged and not learner.in_flight:
            learner.report(0, parameters(value), round=0)
        elif event == "answer" and post.merges and not post.merges[-1].done():
            post.answer(len(post.sent) - 1, add=0.0)
        elif event == "take" and learner.arrived():
            merged += post.sent[-1].tokens
            values = learner.take(parameters(value))
            # Theta was what was sent: taking it changes nothing, since all progress is kept
            assert torch.equal(values["a"], parameters(value)["a"])
    assert learner.counts()["tokens"] == [trained - merged]
    assert learner.counts()["steps"] == [trained - merged]


# --- the optimizer as a learner ---------------------------------------------------------------------------------


def model(dtype: torch.dtype = torch.float64) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2).to(dtype)


def learn(
    net: nn.Module, post: Post, *, steps: int = 4, overlap: int = 2, fragments: int = 1
) -> tuple[GaslocOptimizer, list[RoundResult]]:
    results: list[RoundResult] = []
    optimizer = GaslocOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.125),
        net,
        network=post,
        topology="syncer",
        local_steps=steps,
        fragments=fragments,
        overlap_steps=overlap,
        step_tokens=64,
        on_round=results.append,
    )
    return optimizer, results


def take_steps(net: nn.Module, optimizer: GaslocOptimizer, count: int) -> None:
    """Each moves every number by -0.125, exactly."""
    for _ in range(count):
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()


def values(net: nn.Module) -> State:
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


def moved(net: nn.Module, start: State, by: float) -> None:
    for name, tensor in values(net).items():
        torch.testing.assert_close(tensor, start[name] + by, rtol=0, atol=1e-12)


def test_it_trains_on_and_applies_the_merge_at_the_next_step() -> None:
    net, post = model(), Post()
    start = values(net)
    optimizer, results = learn(net, post)
    take_steps(net, optimizer, 4)
    (report,) = post.sent
    assert (report.fragment, report.tokens, report.steps, report.round) == (0, 256.0, 4, 0)
    moved(net, start, -0.5)
    take_steps(net, optimizer, 2)
    moved(net, start, -0.75)
    post.answer(0, add=10.0)
    moved(net, start, -0.75)
    take_steps(net, optimizer, 1)
    moved(net, start, 10 - 0.875)
    take_steps(net, optimizer, 1)
    assert [(r.round, r.mixes_tried, r.mixes_done, r.partners) for r in results] == [(0, 1, 0, ()), (1, 1, 1, ("hub",))]
    assert post.waits == []


def test_without_overlap_it_waits() -> None:
    net, post = model(), Post(answer_while_waiting=True)
    start = values(net)
    optimizer, results = learn(net, post, overlap=0)
    take_steps(net, optimizer, 4)
    moved(net, start, 100 - 0.5)
    assert results[0].reason == "1 of 1 fragments merged, 2.0 learners each"
    assert results[0].distance is not None
    assert len(post.waits) == 1


def test_fragments_are_sent_at_their_own_steps() -> None:
    net, post = model(), Post()
    optimizer, results = learn(net, post, fragments=2)
    take_steps(net, optimizer, 2)
    assert [report.fragment for report in post.sent] == [1]
    take_steps(net, optimizer, 2)
    assert [(report.fragment, list(report.tensors)) for report in post.sent] == [(1, ["bias"]), (0, ["weight"])]
    assert [result.mixes_tried for result in results] == [2]


def test_while_the_syncer_is_away_it_trains_as_if_alone_and_tries_again() -> None:
    net, post = model(), Post()
    start = values(net)
    optimizer, results = learn(net, post)
    for round in range(3):
        take_steps(net, optimizer, 3)
        take_steps(net, optimizer, 1)
        post.fail(round, UnreachableError("no syncer is seen in the run"))
    moved(net, start, -1.5)
    assert [report.steps for report in post.sent] == [4, 8, 12]
    assert "no syncer is seen in the run" in results[1].reason
    assert not results[2].mixed
    assert results[2].tried


def test_a_report_that_is_too_old_is_told_in_words() -> None:
    net, post = model(), Post()
    optimizer, results = learn(net, post)
    take_steps(net, optimizer, 4)
    post.fail(0, BehindError("fragment 0 is 9 merges behind, more than 5: take fresh state"))
    take_steps(net, optimizer, 4)
    assert "9 merges behind, more than 5: take fresh state" in results[1].reason


def test_settle_takes_what_is_under_way() -> None:
    net, post = model(), Post(answer_while_waiting=True)
    start = values(net)
    optimizer, _ = learn(net, post)
    take_steps(net, optimizer, 4)
    optimizer.settle(5.0)
    moved(net, start, 100 - 0.5)
    assert post.waits == [5.0]
    optimizer.settle(5.0)
    assert post.waits == [5.0]


def test_settle_reports_what_was_skipped_at_the_end() -> None:
    net, post = model(), Post(answer_while_waiting=True)
    start = values(net)
    optimizer, _ = learn(net, post)
    take_steps(net, optimizer, 8)
    assert len(post.sent) == 1
    optimizer.settle(5.0)
    moved(net, start, 200 - 1.0)
    assert [(report.steps, report.round) for report in post.sent] == [(4, 0), (4, 1)]


def test_a_slow_learner_takes_the_others_round() -> None:
    net, post = model(), Post(rounds=[7, 8, 9])
    optimizer, results = learn(net, post)
    take_steps(net, optimizer, 4)
    assert optimizer.round == results[0].next_round == 8


def test_a_bf16_model_keeps_merges_too_small_for_it() -> None:
    """0.001 beside 1 is lost in bfloat16; ten of them are not."""
    net, post = model(torch.bfloat16), Post()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(1.0)
    optimizer = GaslocOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.0), net, network=post, topology="syncer", local_steps=1
    )
    for index in range(10):
        take_steps(net, optimizer, 1)
        post.answer(index, add=0.001)
    take_steps(net, optimizer, 1)
    for tensor in post.sent[-1].tensors.values():
        torch.testing.assert_close(tensor, torch.full_like(tensor, 1.01), rtol=0, atol=1e-6)
    assert all(float(tensor.flatten()[0]) == pytest.approx(1.01, abs=0.004) for tensor in values(net).values())


def test_a_newcomer_takes_over_theta_and_versions() -> None:
    net, post = model(), Post()
    donor, _ = learn(net, post, fragments=2)
    take_steps(net, donor, 4)
    for index in (0, 1):
        post.answer(index, add=3.0, version=5 + index)
    take_steps(net, donor, 1)
    round, state = donor.snapshot()
    assert state["outer/merges"].tolist() == [6, 5]

    other, newcomers_post = model(), Post()
    newcomer, _ = learn(other, newcomers_post, fragments=2)
    newcomer.load_snapshot(round, state)
    assert values(other).keys() == values(net).keys()
    for name, tensor in values(other).items():
        assert torch.equal(tensor, state[f"anchor/{name}"])
    take_steps(other, newcomer, 4)
    assert [(report.fragment, report.version, report.steps) for report in newcomers_post.sent] == [(1, 5, 2), (0, 6, 4)]


@pytest.mark.parametrize("merges", [None, torch.tensor([1, 2, 3])])
def test_a_snapshot_of_another_kind_changes_nothing(merges: Tensor | None) -> None:
    net = model()
    optimizer, _ = learn(net, Post())
    before = values(net)
    state = {f"anchor/{name}": tensor + 1 for name, tensor in before.items()}
    with pytest.raises(ModelError, match="merges"):
        optimizer.load_snapshot(3, state if merges is None else state | {"outer/merges": merges})
    assert optimizer.round == 0
    assert optimizer.snapshot()[1]["outer/merges"].tolist() == [0]
    for name, tensor in values(net).items():
        assert torch.equal(tensor, before[name])


def test_a_resumed_learner_goes_on_with_its_versions_and_tokens(tmp_path: Path) -> None:
    folder = tmp_path
    net, post = model(), Post()
    optimizer, _ = learn(net, post)
    take_steps(net, optimizer, 4)
    post.answer(0, add=1.0, version=3)
    take_steps(net, optimizer, 2)
    state = optimizer.state_dict()
    checkpoint.save(folder, state["tensors"], {"optimizer": state["meta"]})

    found = checkpoint.load_latest(folder)
    assert found is not None
    other, later = model(), Post()
    other.load_state_dict(net.state_dict())
    resumed, _ = learn(other, later)
    resumed.load_state_dict({"meta": found.meta["optimizer"], "tensors": found.tensors})
    take_steps(other, resumed, 2)
    (report,) = later.sent
    assert (report.round, report.version, report.tokens, report.steps) == (1, 3, 256.0, 4)


def test_a_learner_needs_a_syncer() -> None:
    net = model()
    with pytest.raises(UsageError, match="'syncer' needs a network with a syncer"):
        GaslocOptimizer(torch.optim.SGD(net.parameters()), net, topology="syncer")
    with pytest.raises(UsageError, match="'2-peer' needs a network that can swap"):
        GaslocOptimizer(torch.optim.SGD(net.parameters()), net, network=Post())


def test_parameters_that_are_not_finite_are_never_sent() -> None:
    net, post = model(), Post()
    optimizer, _ = learn(net, post, steps=1)

    def broken_steps() -> None:
        for _ in range(5):
            with torch.no_grad():
                net.weight[0, 0] = math.nan
            take_steps(net, optimizer, 1)

    with pytest.raises(RunError, match="finite"):
        broken_steps()
    for report in post.sent:
        assert all(tensor.isfinite().all() for tensor in report.tensors.values())
