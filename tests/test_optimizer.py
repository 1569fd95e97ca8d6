"""`GaslocOptimizer` in loops written by hand: alone, with partners, over odd models, resumed."""

import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from gasloc import checkpoint
from gasloc.errors import ModelError, RunError, UsageError
from gasloc.optimizer import GaslocOptimizer, RoundResult
from peers.exchange import Answer, Offer, PeerId, Slot, Swap
from tests.diloco import diloco
from tests.meeting import at_once, seats


def perceptron(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def sample(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1_000 + step)
    inputs = torch.randn(8, 5, generator=generator, dtype=torch.float64)
    targets = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), targets.to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, clip: float = 0.3) -> None:
    """Somebody's own loop, with clipping tight enough to act."""
    dtype = next(model.parameters()).dtype
    for step in steps:
        inputs, targets = sample(step, dtype)
        torch.autograd.backward(nn.functional.mse_loss(model(inputs), targets))
        assert float(nn.utils.clip_grad_norm_(model.parameters(), clip)) > 0
        optimizer.step()
        optimizer.zero_grad()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def plain_outer(anchor: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(anchor, lr=1.0)


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def assert_close(left: Mapping[str, Tensor], right: Mapping[str, Tensor], tolerance: float = 1e-12) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=tolerance, atol=tolerance)


def assert_same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def test_the_package_names_it_without_importing_torch_before_it_is_used() -> None:
    script = "import sys, gasloc; early = 'torch' in sys.modules; from gasloc import *; print(early, GaslocOptimizer)"
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=50)
    assert finished.stdout == "False <class 'gasloc.optimizer.GaslocOptimizer'>\n"


# --- alone -----------------------------------------------------------------------------------------------------


def test_alone_with_outer_rate_one_and_no_momentum_it_is_a_plain_loop() -> None:
    model, plain = perceptron(), perceptron()
    train(model, GaslocOptimizer(adamw(model), model, local_steps=4, outer=plain_outer), range(14))
    train(plain, adamw(plain), range(14))
    assert_close(values(model), values(plain))


@pytest.mark.parametrize(
    "outer",
    [
        lambda anchor: torch.optim.SGD(anchor, lr=0.7, momentum=0.9, nesterov=True),
        lambda anchor: torch.optim.SGD(anchor, lr=0.7),
        lambda anchor: torch.optim.Adam(anchor, lr=0.01),
    ],
    ids=["nesterov", "sgd", "adam"],
)
def test_alone_it_is_diloco_with_one_worker(outer: Callable[[list[Tensor]], torch.optim.Optimizer]) -> None:
    model = perceptron()
    results: list[RoundResult] = []
    optimizer = GaslocOptimizer(adamw(model), model, local_steps=5, outer=outer, on_round=results.append)

    reference = perceptron()
    reference_inner = adamw(reference)

    def inner(worker: int, round: int, theta: dict[str, Tensor]) -> Mapping[str, Tensor]:
        reference.load_state_dict(theta)
        train(reference, reference_inner, range(round * 5, round * 5 + 5))
        return values(reference)

    history = diloco(values(reference), inner, outer, workers=1, rounds=4)
    for round, expected in enumerate(history):
        train(model, optimizer, range(round * 5, round * 5 + 5))
        assert_close(values(model), expected)
    assert [(result.round, result.next_round, result.local_steps) for result in results] == [
        (0, 1, 5),
        (1, 2, 5),
        (2, 3, 5),
        (3, 4, 5),
    ]
    assert not any(result.tried or result.mixed for result in results)


@dataclass
class Deserted:
    """A network in which nobody else is; a swap with anybody would be a wait."""

    me: PeerId = "alone"

    def members(self, round: int) -> set[PeerId]:
        return set()

    def swap(self, slot: Slot, offers: Mapping[PeerId, Offer], *, timeout_s: float) -> dict[PeerId, Swap]:
        assert not offers
        return {}

    def swap_any(
        self, slot: Slot, candidates: Sequence[PeerId], offer: Offer, *, timeout_s: float
    ) -> dict[PeerId, Swap]:
        assert not candidates
        return {}

    def others_rounds(self) -> list[int]:
        return []


def test_the_only_member_of_a_swarm_does_the_same_and_waits_for_nobody() -> None:
    alone, member = perceptron(), perceptron()
    results: list[RoundResult] = []
    train(alone, GaslocOptimizer(adamw(alone), alone, local_steps=3), range(9))
    train(
        member,
        GaslocOptimizer(adamw(member), member, local_steps=3, network=Deserted(), on_round=results.append),
        range(9),
    )
    assert_same_bits(values(alone), values(member))
    assert [(result.tried, result.mixed, result.reason) for result in results] == [
        (False, False, "nobody to mix with this round")
    ] * 3


def test_alone_in_fragments_with_outer_rate_one_it_is_a_plain_loop_too() -> None:
    model, plain = perceptron(), perceptron()
    results: list[RoundResult] = []
    optimizer = GaslocOptimizer(
        adamw(model), model, local_steps=6, fragments=3, outer=plain_outer, on_round=results.append
    )
    train(model, optimizer, range(18))
    train(plain, adamw(plain), range(18))
    assert_close(values(model), values(plain))
    assert [(result.round, result.local_steps) for result in results] == [(0, 6), (1, 6), (2, 6)]


# --- with partners ---------------------------------------------------------------------------------------------


def test_everyone_with_everyone_is_diloco() -> None:
    names = "abc"
    places = seats(names)
    models = [perceptron() for _ in names]
    optimizers = [
        GaslocOptimizer(adamw(model), model, network=seat, topology="all-to-all", local_steps=4)
        for model, seat in zip(models, places, strict=True)
    ]
    references = [perceptron() for _ in names]
    inners = [adamw(reference) for reference in references]

    def inner(worker: int, round: int, theta: dict[str, Tensor]) -> Mapping[str, Tensor]:
        references[worker].load_state_dict(theta)
        start = 100 * worker + 4 * round
        train(references[worker], inners[worker], range(start, start + 4))
        return values(references[worker])

    def outer(anchor: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(anchor, lr=0.7, momentum=0.5, nesterov=True)

    expected = diloco(values(references[0]), inner, outer, workers=3, rounds=3)[-1]
    at_once(
        *(
            lambda worker=worker: train(models[worker], optimizers[worker], range(100 * worker, 100 * worker + 12))
            for worker in range(3)
        )
    )
    for model in models:
        assert_close(values(model), expected)
    assert all(optimizer.round == 3 and optimizer.local_step == 0 for optimizer in optimizers)


def mix_once(
    models: list[nn.Module], outer: Callable[[list[Tensor]], torch.optim.Optimizer] = plain_outer
) -> tuple[list[RoundResult], list[dict[str, Tensor]]]:
    """One round without training (no gradients): what happens is the exchange alone. Also what each sent.

    Not clipped: peers that do not move have nothing to measure the others by.
    """
    places = seats("ab")
    results: list[RoundResult] = []
    optimizers = [
        GaslocOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            network=seat,
            local_steps=1,
            outer=outer,
            mixing="average",
            on_round=results.append,
        )
        for model, seat in zip(models, places, strict=True)
    ]
    at_once(*(optimizer.step for optimizer in optimizers))
    return results, [dict(seat.sent[0]) for seat in places]


class Tied(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.constant_(self.embedding.weight, value)


class TiedByStorage(nn.Module):
    """Two parameters, one memory: some libraries tie so."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((4, 3), value))
        self.second = nn.Parameter(self.first.data)


@pytest.mark.parametrize(
    ("make", "names"), [(Tied, ("embedding.weight", "head.weight")), (TiedByStorage, ("first", "second"))]
)
def test_tied_weights_of_one_and_three_become_two_and_stay_tied(
    make: Callable[[float], nn.Module], names: tuple[str, str]
) -> None:
    models = [make(1.0), make(3.0)]
    _, sent = mix_once(models)
    for model, message in zip(models, sent, strict=True):
        first, second = (model.get_parameter(name) for name in names)
        assert torch.equal(first, torch.full((4, 3), 2.0))
        assert torch.equal(second, first)
        assert first.data_ptr() == second.data_ptr()
        assert message.keys() == {names[0]}, "a tied weight is sent once"


def test_frozen_parameters_are_not_sent_and_not_changed() -> None:
    models = [perceptron(seed=1), perceptron(seed=2)]
    for model in models:
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
    frozen = [values(model[0]) for model in models]
    _, sent = mix_once(list(models))
    for model, before, message in zip(models, frozen, sent, strict=True):
        assert message.keys() == {"2.weight", "2.bias"}
        assert_same_bits(values(model[0]), before)
    assert_close(values(models[0][2]), values(models[1][2]))


class Counting(nn.Module):
    def __init__(self, value: float, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), value))
        self.register_buffer("mean", torch.full((2,), value))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("count", torch.tensor(count))
        self.register_buffer("table", torch.full((2,), value), persistent=False)


def test_float_buffers_are_mixed_plainly_and_integer_ones_stay() -> None:
    models = [Counting(1.0, 10), Counting(3.0, 21)]
    results, sent = mix_once(
        [*models], outer=lambda anchor: torch.optim.SGD(anchor, lr=0.5, momentum=0.9, nesterov=True)
    )
    assert all(result.mixed for result in results)
    assert sorted(result.distance or 0.0 for result in results) == pytest.approx([1 / 3, 1.0])
    assert all(message.keys() == {"weight", "mean"} for message in sent)
    for model, count, value in zip(models, (10, 21), (1.0, 3.0), strict=True):
        assert torch.equal(model.get_buffer("mean"), torch.full((2,), 2.0)), "no outer step on a buffer"
        assert torch.equal(model.get_buffer("mask"), torch.tensor([0.0, float("-inf")]))
        assert int(model.get_buffer("count")) == count
        assert torch.equal(model.get_buffer("table"), torch.full((2,), value))
        # theta - lr * (delta + momentum * delta), delta = theta - 2
        torch.testing.assert_close(model.weight, torch.full((2,), value - 0.5 * 1.9 * (value - 2.0)))


def test_the_exchange_buffers_are_only_read() -> None:
    """What a partner sent is still what it sent after the outer step."""
    received: list[tuple[Tensor, Tensor]] = []

    @dataclass
    class Partner(Deserted):
        def members(self, round: int) -> set[PeerId]:
            return {"alone", "partner"}

        def swap(self, slot: Slot, offers: Mapping[PeerId, Offer], *, timeout_s: float) -> dict[PeerId, Swap]:
            theirs = {name: tensor + 1 for name, tensor in offers["partner"].send.items()}
            received.extend((tensor, tensor.clone()) for tensor in theirs.values())
            return {"partner": Swap(Answer.ACCEPT, "whole", tensors=theirs)}

    model = perceptron()
    train(model, GaslocOptimizer(adamw(model), model, network=Partner(), local_steps=2, mixing="average"), range(6))
    assert len(received) == 12
    assert all(torch.equal(now, then) for now, then in received)


def test_own_parameters_that_are_not_finite_are_never_sent() -> None:
    model = perceptron()
    places = seats("a")
    optimizer = GaslocOptimizer(adamw(model), model, network=places[0], local_steps=1)

    def spoil() -> None:
        with torch.no_grad():
            model.get_parameter("2.bias")[0] = float("nan")

    for _ in range(2):
        spoil()
        optimizer.step()
        assert all(tensor.isfinite().all() for tensor in values(model).values())
    spoil()
    with pytest.raises(
        RunError, match=r"round 2: '2\.bias' of the model is no longer finite, for the 3rd time in a row"
    ):
        optimizer.step()
    assert not places[0].sent


def test_a_peer_behind_the_others_takes_their_round_and_publishes_it_in_the_result() -> None:
    @dataclass
    class Ahead(Deserted):
        def others_rounds(self) -> list[int]:
            return [7, 7, 8]

    model = perceptron()
    results: list[RoundResult] = []
    optimizer = GaslocOptimizer(adamw(model), model, network=Ahead(), local_steps=1, on_round=results.append)
    train(model, optimizer, range(1))
    assert optimizer.round == results[0].next_round == 7
    assert "behind" in results[0].next_reason


@pytest.mark.parametrize("overlap", ["off", 2])
@pytest.mark.parametrize("begin", [4, 10])
def test_slots_only_grow_until_a_state_of_an_earlier_round_is_taken(overlap: Literal["off"] | int, begin: int) -> None:
    slots: list[Slot] = []

    @dataclass
    class Recording(Deserted):
        def swap(self, slot: Slot, offers: Mapping[PeerId, Offer], *, timeout_s: float) -> dict[PeerId, Swap]:
            slots.append(slot)
            return {}

        def others_rounds(self) -> list[int]:
            return [9]

    model = perceptron()
    optimizer = GaslocOptimizer(adamw(model), model, network=Recording(), local_steps=3, fragments=3, overlap=overlap)
    _, early = optimizer.snapshot()
    train(model, optimizer, range(7))
    assert optimizer.round == 10
    optimizer.load_snapshot(begin, early)
    before = len(slots)
    train(model, optimizer, range(7))
    optimizer.take_outcomes()
    assert len(slots) >= 12
    assert slots[:before] == sorted(slots[:before])
    assert slots[before:] == sorted(slots[before:])
    assert slots[before].round == (4 if begin == 4 else 11), "a part of round 10 was exchanged already"
    assert (slots == sorted(slots)) == (begin == 10)
    assert len(set(slots[:before])) == before
    assert len(set(slots[before:])) == len(slots) - before


def test_distance_is_how_far_mixing_moved_a_peer_relative_to_its_own_parameters() -> None:
    models = [Tied(1.0), Tied(3.0)]
    results, _ = mix_once([*models])
    assert sorted(result.distance or 0.0 for result in results) == pytest.approx([1 / 3, 1.0])


class Compiled(nn.Module):
    """As `torch.compile` wraps a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self._orig_mod(inputs)
        return output


def test_a_peer_that_compiles_its_model_agrees_with_one_that_does_not() -> None:
    plain, inside = perceptron(seed=1), perceptron(seed=2)
    compiled = Compiled(inside)
    _, sent = mix_once([plain, compiled])
    assert sent[0].keys() == sent[1].keys()
    assert_close(values(plain), values(inside))
    ours, theirs = (GaslocOptimizer(adamw(model), model, local_steps=2) for model in (plain, compiled))
    train(compiled, theirs, range(3))
    ours.load_state_dict(theirs.state_dict())
    assert ours.round == 1
    assert_same_bits(ours.state_dict()["tensors"], theirs.state_dict()["tensors"])


def test_buffers_that_a_module_replaces_are_followed() -> None:
    class Averaging(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))
            self.register_buffer("mean", torch.zeros(2))
            self.value = value

        def forward(self) -> Tensor:
            self.mean = torch.full((2,), self.value)
            return self.weight.sum()

    models = [Averaging(1.0), Averaging(3.0)]
    places = seats("ab")
    optimizers = [
        GaslocOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model, network=seat, local_steps=1)
        for model, seat in zip(models, places, strict=True)
    ]
    for model in models:
        model()
    at_once(*(optimizer.step for optimizer in optimizers))
    assert [model.mean.tolist() for model in models] == [[2.0, 2.0]] * 2


# --- precision -------------------------------------------------------------------------------------------------


def test_a_bf16_model_moves_as_float32_does_under_outer_updates_of_one_in_ten_thousand() -> None:
    """Each round moves the partner's mix by 1e-4 relative: bf16 alone (8 bits) would round every one away."""
    rounds = 60

    @dataclass
    class Pulling(Deserted):
        """A partner whose parameters are always ours plus 2e-4 relative, so the mix is ours plus 1e-4."""

        def members(self, round: int) -> set[PeerId]:
            return {"alone", "partner"}

        def swap(self, slot: Slot, offers: Mapping[PeerId, Offer], *, timeout_s: float) -> dict[PeerId, Swap]:
            theirs = {name: tensor * (1 + 2e-4) for name, tensor in offers["partner"].send.items()}
            return {"partner": Swap(Answer.ACCEPT, "whole", tensors=theirs)}

    ends = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = perceptron(torch.bfloat16, seed=3).to(dtype)  # both start from the same values
        optimizer = GaslocOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            network=Pulling(),
            local_steps=1,
            outer=plain_outer,
            mixing="average",
        )
        for _ in range(rounds):
            optimizer.step()
        ends[dtype] = optimizer.snapshot()[1] | values(model)
    start = values(perceptron(torch.bfloat16, seed=3))
    for name, first in start.items():
        wide, narrow = ends[torch.float32][f"anchor/{name}"], ends[torch.bfloat16][f"anchor/{name}"]
        assert narrow.dtype == torch.float32
        torch.testing.assert_close(narrow, wide, rtol=1e-6, atol=0)
        torch.testing.assert_close(wide, first.float() * (1 + 1e-4) ** rounds, rtol=1e-5, atol=0)
        assert torch.equal(ends[torch.bfloat16][name], wide.to(torch.bfloat16)), "the model is theta, rounded"
        assert not torch.equal(ends[torch.bfloat16][name], first), "the model itself has moved"


def test_local_progress_of_a_bf16_model_is_kept_beside_the_remainder() -> None:
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    nn.init.constant_(model.weight, 1.0)
    optimizer = GaslocOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, local_steps=1, outer=plain_outer)
    state = optimizer.state_dict()
    state["tensors"]["anchor/weight"].fill_(1.001)  # between two bf16 numbers: the model shows 1.0
    model.weight.grad = torch.full_like(model.weight, -0.25)
    optimizer.step()
    torch.testing.assert_close(optimizer.snapshot()[1]["anchor/weight"], torch.tensor([[1.251]]))
    assert model.weight.item() == 1.25


# --- as a torch optimizer --------------------------------------------------------------------------------------


def test_learning_rate_schedulers_and_closures_work_on_it() -> None:
    model, plain = perceptron(), perceptron()
    inner = adamw(model)
    optimizer = GaslocOptimizer(inner, model, local_steps=3, outer=plain_outer)
    reference = adamw(plain)
    schedules = [
        torch.optim.lr_scheduler.CosineAnnealingLR(each, T_max=10, eta_min=1e-4) for each in (optimizer, reference)
    ]

    def closure(module: nn.Module, each: torch.optim.Optimizer, step: int) -> Callable[[], float]:
        def evaluate() -> float:
            each.zero_grad()
            inputs, targets = sample(step)
            loss = nn.functional.mse_loss(module(inputs), targets)
            torch.autograd.backward(loss)
            return loss.item()

        return evaluate

    for step in range(8):
        ours = optimizer.step(closure(model, optimizer, step))
        theirs = reference.step(closure(plain, reference, step))
        assert ours == pytest.approx(theirs, rel=1e-12)
        for schedule in schedules:
            schedule.step()
        assert optimizer.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
    assert reference.param_groups[0]["lr"] < 0.002
    assert_close(values(model), values(plain))


def test_groups_stay_those_of_the_inner_optimizer_after_it_is_loaded_directly() -> None:
    model = perceptron()
    inner = adamw(model)
    optimizer = GaslocOptimizer(inner, model)
    inner.load_state_dict(inner.state_dict())
    optimizer.param_groups[0]["lr"] = 0.5
    assert inner.param_groups[0]["lr"] == 0.5
    assert optimizer.state is inner.state


def test_gradients_are_gone_before_memory_is_needed_for_the_mix() -> None:
    model = perceptron()
    during: list[bool] = []

    @dataclass
    class Watching(Deserted):
        def swap(self, slot: Slot, offers: Mapping[PeerId, Offer], *, timeout_s: float) -> dict[PeerId, Swap]:
            during.append(all(parameter.grad is None for parameter in model.parameters()))
            return {}

    optimizer = GaslocOptimizer(adamw(model), model, network=Watching(), local_steps=2)
    train(model, optimizer, range(2))
    assert during == [True]


def test_what_cannot_work_is_refused_at_once() -> None:
    model = perceptron()
    with pytest.raises(UsageError, match="local_steps = 0"):
        GaslocOptimizer(adamw(model), model, local_steps=0)
    with pytest.raises(UsageError, match="torus"):
        GaslocOptimizer(adamw(model), model, topology="torus")
    with pytest.raises(ModelError, match="4 parameters that are not of the model"):
        GaslocOptimizer(adamw(perceptron()), model)
    with pytest.raises(ModelError, match="nothing to train"):
        GaslocOptimizer(adamw(model), model.requires_grad_(False))


# --- snapshots and resume --------------------------------------------------------------------------------------


def test_a_newcomer_takes_over_a_snapshot_and_then_computes_the_same() -> None:
    veteran, newcomer = perceptron(), perceptron(seed=9)
    ours = GaslocOptimizer(torch.optim.SGD(veteran.parameters(), lr=0.1), veteran, local_steps=3)
    theirs = GaslocOptimizer(torch.optim.SGD(newcomer.parameters(), lr=0.1), newcomer, local_steps=3)
    train(veteran, ours, range(6))
    round, tensors = ours.snapshot()
    assert round == 2
    theirs.load_snapshot(round, tensors)
    assert_same_bits(values(newcomer), values(veteran))
    train(veteran, ours, range(6, 13))
    train(newcomer, theirs, range(6, 13))
    assert_same_bits(values(newcomer), values(veteran))
    assert theirs.round == ours.round == 4


def test_a_snapshot_can_be_taken_before_any_outer_step() -> None:
    veteran, newcomer = perceptron(), perceptron(seed=9)
    ours = GaslocOptimizer(adamw(veteran), veteran)
    theirs = GaslocOptimizer(adamw(newcomer), newcomer)
    theirs.load_snapshot(*ours.snapshot())
    assert_same_bits(values(newcomer), values(veteran))


def test_a_snapshot_from_another_thread_is_of_one_round_or_the_next_never_between() -> None:
    model = perceptron()
    ends: dict[int, dict[str, Tensor]] = {}
    optimizer = GaslocOptimizer(adamw(model), model, local_steps=1, on_round=lambda result: None)
    ends[0] = values(model)
    taken: list[tuple[int, dict[str, Tensor]]] = []
    begun, done = threading.Event(), threading.Event()

    def watch() -> None:
        while not done.is_set():
            taken.append(optimizer.snapshot())
            begun.set()

    def work() -> None:
        assert begun.wait(20)
        for step in range(150):
            train(model, optimizer, range(step, step + 1))
            ends[optimizer.round] = values(model)
        done.set()

    at_once(watch, work)
    assert len(taken) > 1
    for round, tensors in taken:
        assert_same_bits({name: tensors[f"anchor/{name}"] for name in ends[round]}, ends[round])


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda t: t.update({"outer/momentum_buffer/2.bias": torch.zeros(4)}), r"momentum_buffer/2\.bias' has shape"),
        (lambda t: t.pop("anchor/0.bias"), r"anchor '0\.bias' of this model is missing"),
        (lambda t: t.update({"anchor/new": torch.zeros(1)}), r"anchor 'new' of the state is not in this model"),
        (lambda t: t.update({"anchor/0.bias": torch.zeros(8)}), r"anchor '0\.bias' is \(7,\) .* \(8,\)"),
        (lambda t: t.update({"anchor/0.bias": torch.zeros(7)}), r"float64 in this model, .*float32"),
        (lambda t: t.update({"junk": torch.zeros(1)}), "'junk' is no part"),
        (lambda t: t["outer/momentum_buffer/0.bias"].fill_(float("nan")), r"momentum_buffer/0\.bias' is not finite"),
        (lambda t: t.update({"outer/momentum_buffer/x": torch.zeros(1)}), r"momentum_buffer/x' is of no parameter"),
        (lambda t: t.pop("outer/momentum_buffer/0.bias"), r"momentum_buffer/0\.bias' is missing"),
    ],
)
@pytest.mark.parametrize("fragments", [1, 2])
def test_a_snapshot_that_does_not_fit_is_refused_whole(
    spoil: Callable[[dict[str, Tensor]], object], reason: str, fragments: int
) -> None:
    veteran, newcomer = perceptron(), perceptron(seed=9)
    ours, theirs = (
        GaslocOptimizer(adamw(model), model, local_steps=2, fragments=fragments) for model in (veteran, newcomer)
    )
    train(veteran, ours, range(4))
    train(newcomer, theirs, range(2))
    before = theirs.snapshot()
    model_before = values(newcomer)
    round, tensors = ours.snapshot()
    spoil(tensors)
    with pytest.raises(ModelError, match=reason):
        theirs.load_snapshot(round, tensors)
    assert theirs.snapshot()[0] == before[0]
    assert_same_bits(theirs.snapshot()[1], before[1])
    assert_same_bits(values(newcomer), model_before)


class WithNorm(nn.Module):
    """Batch norm, so that float and integer buffers take part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.body(inputs)
        return output


def new_run(
    dtype: torch.dtype, fragments: int
) -> tuple[nn.Module, GaslocOptimizer, torch.optim.lr_scheduler.LRScheduler]:
    model = WithNorm().to(dtype)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    inner = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
    optimizer = GaslocOptimizer(inner, model, local_steps=7, fragments=fragments)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)


def run_pieces(folder: Path, pieces: list[int], dtype: torch.dtype, fragments: int = 1) -> dict[str, Tensor]:
    """Trains `sum(pieces)` steps, each piece from the last one's files; all that is left at the end."""
    done = 0
    tensors: dict[str, Tensor] = {}
    for piece in pieces:
        model, optimizer, schedule = new_run(dtype, fragments)
        found = checkpoint.load_latest(folder)
        if found is not None:
            prefix = "model/"
            own = {n.removeprefix(prefix): t for n, t in found.tensors.items() if n.startswith(prefix)}
            rest = {n: t for n, t in found.tensors.items() if not n.startswith(prefix)}
            model.load_state_dict(own)
            optimizer.load_state_dict({"meta": found.meta["optimizer"], "tensors": rest})
            schedule.load_state_dict(found.meta["schedule"])
        for step in range(done, done + piece):
            train(model, optimizer, range(step, step + 1))
            schedule.step()
        done += piece
        state = optimizer.state_dict()
        tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()} | state["tensors"]
        plain = {key: value for key, value in schedule.state_dict().items() if not callable(value)}
        checkpoint.save(folder, tensors, {"optimizer": state["meta"], "schedule": plain})
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pieces", [[20, 20], [10, 10, 10, 10], [14, 26], [1, 5, 34]], ids=str)
def test_a_resumed_run_repeats_the_straight_one_bit_for_bit(
    tmp_path: Path, pieces: list[int], dtype: torch.dtype
) -> None:
    straight = run_pieces(tmp_path / "straight", [40], dtype)
    resumed = run_pieces(tmp_path / "resumed", pieces, dtype)
    assert_same_bits(resumed, straight)
    names = {name.split("/")[0] for name in straight}
    assert names == {"model", "anchor", "buffer", "outer", "inner"}


def test_a_run_in_fragments_resumes_too(tmp_path: Path) -> None:
    straight = run_pieces(tmp_path / "straight", [40], torch.float32, fragments=3)
    resumed = run_pieces(tmp_path / "resumed", [10, 5, 25], torch.float32, fragments=3)
    assert_same_bits(resumed, straight)


def test_a_state_of_another_optimizer_is_refused() -> None:
    model = perceptron()
    optimizer = GaslocOptimizer(adamw(model), model, local_steps=2)
    train(model, optimizer, range(3))
    state = optimizer.state_dict()
    other = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4)).double()
    with pytest.raises(ModelError, match=r"anchor '2\.bias' is \(4,\)"):
        GaslocOptimizer(adamw(other), other).load_state_dict(state)
    with pytest.raises(ModelError, match="saved in 1 fragments, not 2"):
        GaslocOptimizer(adamw(model), model, fragments=2).load_state_dict(state)
    split = torch.optim.AdamW([{"params": [parameter]} for parameter in model.parameters()])
    with pytest.raises(ModelError, match="4 parameter groups that differ from the 1 saved"):
        GaslocOptimizer(split, model).load_state_dict(state)


def test_plain_numbers_in_an_optimizers_state_survive() -> None:
    """`SparseAdam` counts its steps in a plain integer."""

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        for step in range(count):
            torch.autograd.backward((model(torch.tensor([step % 3, 4])) - 1).square().sum())
            optimizer.step()
            optimizer.zero_grad()

    def new() -> tuple[nn.Module, GaslocOptimizer]:
        torch.manual_seed(6)
        model = nn.Embedding(6, 2, sparse=True)
        return model, GaslocOptimizer(torch.optim.SparseAdam(list(model.parameters())), model, local_steps=2)

    model, optimizer = new()
    again, resumed = new()
    steps(model, optimizer, 3)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    kept = resumed.state[again.get_parameter("weight")]["step"]
    assert kept == 3
    assert type(kept) is int
    steps(model, optimizer, 4)
    steps(again, resumed, 4)
    assert_same_bits(values(again), values(model))
