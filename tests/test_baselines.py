"""Baselines: hand-worked cases and equalities, float64 to 1e-12."""

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gasloc.baselines import (
    NolocoState,
    dadam,
    ddp,
    local_dadam_mixes,
    noloco,
    noloco_start,
    noloco_travelling,
)
from gasloc.errors import ModelError, RecipeError
from gasloc.mixing import mix
from gasloc.topology import row

# A busy machine may take any time for one example.
anytime = settings(deadline=None)

Named = dict[str, Tensor]
GRAPHS = ["none", "1-peer", "ring", "exponential", "all-to-all"]


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def mix_all(states: Mapping[str, Mapping[str, Tensor]], graph: str, round: int = 0) -> dict[str, Named]:
    """Everybody's mix of everybody's state."""
    mixes = {}
    for me, own in states.items():
        weights = row(graph, round=round, members=list(states), me=me, seed=3)
        received = {peer: states[peer] for peer in weights if peer != me}
        mixes[me] = mix(own, received, weights, me)
    return mixes


class Worker:
    """Least squares towards its own target with its own AdamW."""

    def __init__(self, initial: Tensor, target: Tensor) -> None:
        self.weight = torch.nn.Parameter(initial.clone())
        self.target = target
        self.adamw = torch.optim.AdamW([self.weight], lr=0.05, betas=(0.9, 0.95), weight_decay=0.1)

    def gradient(self) -> Tensor:
        return self.weight.detach() - self.target

    def step(self, gradient: Tensor | None = None) -> tuple[Named, Named]:
        """Parameters before and after one AdamW step."""
        before = self.weight.detach().clone()
        self.weight.grad = self.gradient() if gradient is None else gradient.clone()
        self.adamw.step()
        return {"w": before}, {"w": self.weight.detach().clone()}

    def take(self, state: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            self.weight.copy_(state["w"])


def workers(count: int, seed: int = 0, *, alike: bool = False) -> dict[str, Worker]:
    generator = torch.Generator().manual_seed(seed)
    initial = torch.randn(5, generator=generator, dtype=torch.float64)
    targets = [torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(count)]
    return {f"w{index}": Worker(initial, targets[0 if alike else index]) for index in range(count)}


# DDP


def test_ddp_averages_gradients_by_hand() -> None:
    mean = ddp([{"w": vector(1.0, 2.0)}, {"w": vector(3.0, -2.0)}, {"w": vector(-1.0, 3.0)}])
    close(mean["w"], vector(1.0, 1.0))


def test_ddp_with_equal_shards_is_one_adamw() -> None:
    swarm, alone = workers(3, alike=True), workers(1)["w0"]
    for _ in range(10):
        mean = ddp([{"w": worker.gradient()} for worker in swarm.values()])
        for worker in swarm.values():
            worker.step(mean["w"])
        alone.step()
    for worker in swarm.values():
        close(worker.weight.detach(), alone.weight.detach())


def test_ddp_equals_one_worker_with_the_whole_batch() -> None:
    swarm, whole = workers(4), workers(1)["w0"]
    whole.target = torch.stack([worker.target for worker in swarm.values()]).mean(0)
    for _ in range(10):
        mean = ddp([{"w": worker.gradient()} for worker in swarm.values()])
        for worker in swarm.values():
            worker.step(mean["w"])
        whole.step()
    for worker in swarm.values():
        close(worker.weight.detach(), whole.weight.detach())


def test_ddp_refuses_what_has_no_mean() -> None:
    with pytest.raises(ValueError, match="no differences"):
        ddp([])
    with pytest.raises(ModelError):
        ddp([{"w": vector(1.0)}, {"w": vector(1.0, 2.0)}])


# Decentralized Adam


def test_dadam_by_hand() -> None:
    result = dadam({"w": vector(2.0, 0.0)}, {"w": vector(1.0, 1.0)}, {"w": vector(0.9, 1.25)})
    close(result["w"], vector(1.9, 0.25))


def test_dadam_first_step_of_two_workers_by_hand() -> None:
    # Without decay Adam's first update is lr * sign(gradient), up to epsilon: 0.1 here.
    swarm = {"a": Worker(vector(1.0), vector(0.0)), "b": Worker(vector(3.0), vector(5.0))}
    before, after = {}, {}
    for name, worker in swarm.items():
        worker.adamw = torch.optim.AdamW([worker.weight], lr=0.1, eps=0.0, weight_decay=0.0)
        before[name], after[name] = worker.step()
    mixes = mix_all(before, "all-to-all")
    close(dadam(mixes["a"], before["a"], after["a"])["w"], vector(1.9))
    close(dadam(mixes["b"], before["b"], after["b"])["w"], vector(2.1))


def run_dadam(swarm: dict[str, Worker], graph: str, steps: int) -> None:
    for step in range(steps):
        taken = {name: worker.step() for name, worker in swarm.items()}
        mixes = mix_all({name: before for name, (before, _) in taken.items()}, graph, step)
        for name, worker in swarm.items():
            worker.take(dadam(mixes[name], *taken[name]))


def test_dadam_without_neighbours_is_adamw() -> None:
    swarm, alone = workers(3), workers(3)
    run_dadam(swarm, "none", 10)
    for name, worker in alone.items():
        for _ in range(10):
            worker.step()
        close(swarm[name].weight.detach(), worker.weight.detach())


@pytest.mark.parametrize("graph", GRAPHS)
def test_dadam_keeps_equal_workers_equal(graph: str) -> None:
    swarm, alone = workers(5, alike=True), workers(1)["w0"]
    run_dadam(swarm, graph, 10)
    for _ in range(10):
        alone.step()
    for worker in swarm.values():
        close(worker.weight.detach(), alone.weight.detach())


@pytest.mark.parametrize("graph", GRAPHS[1:])
def test_dadam_draws_workers_together_and_moves_the_mean_by_the_mean_update(graph: str) -> None:
    swarm, alone = workers(4), workers(4)
    first = {name: worker.weight.detach().clone() for name, worker in swarm.items()}
    taken = {name: worker.step() for name, worker in workers(4).items()}
    run_dadam(swarm, graph, 1)
    updates = torch.stack([after["w"] - before["w"] for before, after in taken.values()]).mean(0)
    mean = torch.stack([worker.weight.detach() for worker in swarm.values()]).mean(0)
    close(mean, torch.stack(list(first.values())).mean(0) + updates)
    run_dadam(swarm, graph, 59)
    run_dadam(alone, "none", 60)

    def apart(group: dict[str, Worker]) -> float:
        weights = torch.stack([worker.weight.detach() for worker in group.values()])
        return float((weights - weights.mean(0)).norm())

    assert apart(swarm) < 0.5 * apart(alone)


def test_dadam_refuses_tensors_that_do_not_fit() -> None:
    own = {"w": vector(1.0, 2.0)}
    with pytest.raises(ModelError, match="of the mix"):
        dadam({"w": vector(1.0)}, own, own)
    with pytest.raises(ModelError, match="after its step"):
        dadam(own, own, {"v": vector(1.0, 2.0)})


def test_dadam_widens_half_precision_and_leaves_inputs() -> None:
    before = {"w": torch.tensor([1.0], dtype=torch.bfloat16)}
    after = {"w": torch.tensor([1.5], dtype=torch.bfloat16)}
    result = dadam({"w": torch.tensor([3.0])}, before, after)
    assert result["w"].dtype == torch.float32
    assert result["w"].item() == 3.5
    assert before["w"].dtype == torch.bfloat16
    assert (before["w"].item(), after["w"].item()) == (1.0, 1.5)


# Local decentralized Adam


@anytime
@given(st.integers(1, 50), st.integers(1, 10_000))
def test_local_dadam_mixes_once_in_each_round_at_its_end(local_steps: int, step: int) -> None:
    window = [local_dadam_mixes(at, local_steps) for at in range(step, step + local_steps)]
    assert sum(window) == 1
    assert local_dadam_mixes(local_steps, local_steps)
    assert not local_dadam_mixes(0, local_steps)


def test_local_dadam_refuses_rounds_without_steps() -> None:
    with pytest.raises(RecipeError, match="local_steps = 0"):
        local_dadam_mixes(1, 0)


def run_local_dadam(swarm: dict[str, Worker], graph: str, steps: int, local_steps: int) -> None:
    for step in range(1, steps + 1):
        states = {name: worker.step()[1] for name, worker in swarm.items()}
        if local_dadam_mixes(step, local_steps):
            for name, mixed in mix_all(states, graph, step // local_steps).items():
                swarm[name].take(mixed)


@pytest.mark.parametrize("graph", GRAPHS)
def test_local_dadam_keeps_equal_workers_equal(graph: str) -> None:
    swarm, alone = workers(5, alike=True), workers(1)["w0"]
    run_local_dadam(swarm, graph, 12, 4)
    for _ in range(12):
        alone.step()
    for worker in swarm.values():
        close(worker.weight.detach(), alone.weight.detach())


def test_local_dadam_on_a_complete_graph_ends_each_round_at_the_mean_of_local_training() -> None:
    swarm, alone = workers(3), workers(3)
    run_local_dadam(swarm, "all-to-all", 4, 4)
    for worker in alone.values():
        for _ in range(4):
            worker.step()
    mean = torch.stack([worker.weight.detach() for worker in alone.values()]).mean(0)
    for worker in swarm.values():
        close(worker.weight.detach(), mean)


# NoLoCo


def test_noloco_by_hand() -> None:
    state = {
        "a": NolocoState({"w": vector(1.0)}, {"w": vector(0.2)}),
        "b": NolocoState({"w": vector(3.0)}, {"w": vector(-0.4)}),
    }
    phis = {"a": {"w": vector(2.0)}, "b": {"w": vector(2.4)}}
    # d = 1.0 and -0.6: mean 0.2; mean slow 2.0.
    mixes = mix_all({name: noloco_travelling(state[name], phis[name]) for name in state}, "1-peer")
    a, b = (noloco(state[name], mixes[name]) for name in state)
    close(a.momentum["w"], vector(0.5 * 0.2 + 0.7 * 0.2 + 0.7 * 1.0))
    close(a.slow["w"], vector(1.94))
    close(b.momentum["w"], vector(0.5 * -0.4 + 0.7 * 0.2 + 0.7 * -1.0))
    close(b.slow["w"], vector(2.24))
    loose = noloco(state["a"], mixes["a"], learning_rate=0.5, momentum=0.9, consensus=0.25)
    close(loose.slow["w"], vector(1.0 + 0.9 * 0.2 + 0.5 * 0.2 + 0.25 * 1.0))
    close(state["a"].slow["w"], vector(1.0))
    close(state["a"].momentum["w"], vector(0.2))


def train(slow: Tensor, target: Tensor) -> Tensor:
    for _ in range(4):
        slow = slow - 0.1 * (slow - target)
    return slow


@pytest.mark.parametrize("graph", GRAPHS)
def test_noloco_of_equal_peers_is_one_workers_heavy_ball(graph: str) -> None:
    initial, target = vector(1.0, -2.0, 0.5), vector(-1.0, 4.0, 0.25)
    states = {name: noloco_start({"w": initial}) for name in "abcd"}
    alone = torch.nn.Parameter(initial.clone())
    # The heavy ball is SGD with plain momentum on the outer gradient s - phi, with the rate outside the momentum.
    outer = torch.optim.SGD([alone], lr=0.7, momentum=0.5, nesterov=False)
    for round in range(8):
        sent = {name: noloco_travelling(state, {"w": train(state.slow["w"], target)}) for name, state in states.items()}
        mixes = mix_all(sent, graph, round)
        states = {name: noloco(state, mixes[name]) for name, state in states.items()}
        alone.grad = alone.detach() - train(alone.detach(), target)
        outer.step()
    for state in states.values():
        close(state.slow["w"], alone.detach())


def test_noloco_without_training_moves_the_mean_not_and_draws_pairs_together() -> None:
    generator = torch.Generator().manual_seed(1)
    initial = {name: torch.randn(6, generator=generator, dtype=torch.float64) for name in "abcdefgh"}
    states = {name: noloco_start({"w": weight}) for name, weight in initial.items()}
    mean = torch.stack(list(initial.values())).mean(0)

    def apart() -> float:
        return float(torch.stack([state.slow["w"] - mean for state in states.values()]).norm())

    before = apart()
    for round in range(40):
        sent = {name: noloco_travelling(state, state.slow) for name, state in states.items()}
        mixes = mix_all(sent, "1-peer", round)
        states = {name: noloco(state, mixes[name]) for name, state in states.items()}
        close(torch.stack([state.slow["w"] for state in states.values()]).mean(0), mean)
    assert apart() < 0.02 * before


def test_noloco_holds_for_stacked_workers() -> None:
    generator = torch.Generator().manual_seed(2)
    slow, phi, momentum = (torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    weights = torch.tensor([[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5]]).double()
    stacked = NolocoState({"w": slow}, {"w": momentum})
    sent = noloco_travelling(stacked, {"w": phi})
    together = noloco(stacked, {name: weights @ tensor for name, tensor in sent.items()})
    for index in range(4):
        alone = NolocoState({"w": slow[index]}, {"w": momentum[index]})
        partner = index ^ 1
        mean = {name: (tensor[index] + tensor[partner]) / 2 for name, tensor in sent.items()}
        close(together.slow["w"][index], noloco(alone, mean).slow["w"])


def test_noloco_starts_with_copies_in_float32_and_sends_both() -> None:
    theta = {"w": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)}
    state = noloco_start(theta)
    assert state.slow["w"].dtype == state.momentum["w"].dtype == torch.float32
    double = {"w": vector(1.0)}
    noloco_start(double).slow["w"].add_(1.0)
    close(double["w"], vector(1.0))
    sent = noloco_travelling(state, {"w": torch.tensor([1.5, 1.0], dtype=torch.bfloat16)})
    assert sorted(sent) == ["delta/w", "slow/w"]
    assert sent["delta/w"].tolist() == [0.5, -1.0]
    assert sent["slow/w"].tolist() == [1.0, 2.0]


def test_noloco_refuses_tensors_that_do_not_fit() -> None:
    state = noloco_start({"w": vector(1.0, 2.0)})
    with pytest.raises(ModelError, match=r"'w'.*after its local steps"):
        noloco_travelling(state, {"w": vector(1.0)})
    with pytest.raises(ModelError, match="of the mix"):
        noloco(state, {"slow/w": vector(1.0, 2.0)})
