"""What one liar in a swarm of four can do: the others' loss against a swarm of three honest peers."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from gasloc.errors import RunError
from gasloc.offences import SetAside
from gasloc.optimizer import GaslocOptimizer, RoundResult
from gasloc.recipe import parse
from gasloc.swarm import Swarm
from peers.exchange import Answer, Offer, PeerId, Slot, Swap, Tensors
from peers.identity import Identity
from peers.memory_exchange import MemoryExchange, MemoryHub
from peers.node import PeerOptions
from peers.thread import NetworkThread
from tests.meeting import at_once

ROUNDS = 16
LOCAL_STEPS = 8
Lie = Callable[[Tensors], dict[str, Tensor]]


def truth(tensors: Tensors) -> dict[str, Tensor]:
    return dict(tensors)


def hundredfold(tensors: Tensors) -> dict[str, Tensor]:
    return {name: tensor * 100 for name, tensor in tensors.items()}


def noise(tensors: Tensors) -> dict[str, Tensor]:
    """Each tensor as random numbers of fifty times its length."""
    generator = torch.Generator().manual_seed(0)
    lies = {}
    for name, tensor in tensors.items():
        random = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        lies[name] = random * (50 * tensor.norm() / random.norm())
    return lies


def not_a_number(tensors: Tensors) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, math.nan) for name, tensor in tensors.items()}


def stale() -> Lie:
    """Always what it sent first."""
    first: dict[str, Tensor] = {}

    def lie(tensors: Tensors) -> dict[str, Tensor]:
        if not first:
            first.update({name: tensor.clone() for name, tensor in tensors.items()})
        return first

    return lie


@dataclass
class Place:
    """One peer's `Network` over a `MemoryExchange`; a liar's tensors are exchanged for others as they are sent."""

    thread: NetworkThread
    exchange: MemoryExchange
    members_seen: tuple[PeerId, ...]
    lie: Lie = truth
    results: list[RoundResult] = field(default_factory=list)

    @property
    def me(self) -> PeerId:
        return self.exchange.me

    def members(self, round: int) -> tuple[PeerId, ...]:
        return self.members_seen

    def swap(self, slot: Slot, offers: Mapping[PeerId, Offer], *, timeout_s: float) -> dict[PeerId, Swap]:
        told = {peer: replace(offer, send=self.lie(offer.send)) for peer, offer in offers.items()}
        return self.thread.call(self.exchange.swap(slot, told, timeout_s=timeout_s))

    def swap_any(
        self, slot: Slot, candidates: Sequence[PeerId], offer: Offer, *, timeout_s: float
    ) -> dict[PeerId, Swap]:
        told = replace(offer, send=self.lie(offer.send))
        return self.thread.call(self.exchange.swap_any(slot, candidates, told, timeout_s=timeout_s))

    def others_rounds(self) -> list[int]:
        return []


@contextlib.contextmanager
def places(names: str, lie: Lie) -> Iterator[list[Place]]:
    """A swarm; `z` is the liar, if it is there."""
    thread = NetworkThread()
    hub = MemoryHub()
    try:
        yield [Place(thread, MemoryExchange(hub, name), tuple(names), lie if name == "z" else truth) for name in names]
    finally:
        thread.close()


def student() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))


def batch(seed: int, size: int) -> tuple[Tensor, Tensor]:
    """Inputs, and what a fixed teacher makes of them, with noise: as with text, no loss gets under some floor."""
    torch.manual_seed(7)
    teacher = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 6, generator=generator)
    with torch.no_grad():
        return inputs, 3 * teacher(inputs) + 0.7 * torch.randn(size, 2, generator=generator)


@dataclass
class Outcome:
    """What became of the honest peers."""

    losses: list[float]
    """Of each, on data that none has seen; all are finite."""
    results: list[RoundResult]


BATCHES = {(name, step): batch(1000 * index + step, 16) for index, name in enumerate("abcz") for step in range(128)}
HELD_OUT = batch(99_999, 512)


def train(
    names: str,
    lie: Lie = truth,
    mixing: Literal["clipped", "average"] = "clipped",
    topology: str = "2-peer",
) -> Outcome:
    """Peers train the student, each on batches of its own; everything repeats but the order of threads."""
    with places(names, lie) as swarm:
        models = [student() for _ in names]

        def work(place: Place, model: nn.Module) -> None:
            optimizer = GaslocOptimizer(
                torch.optim.AdamW(model.parameters(), lr=0.01),
                model,
                network=place,
                topology=topology,
                local_steps=LOCAL_STEPS,
                mixing=mixing,
                grace_s=20.0,
                on_round=place.results.append,
            )
            for step in range(ROUNDS * LOCAL_STEPS):
                inputs, targets = BATCHES[place.me, step]
                torch.autograd.backward(nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()

        at_once(*(partial(work, place, model) for place, model in zip(swarm, models, strict=True)))
    losses = []
    results = []
    for place, model in zip(swarm, models, strict=True):
        if place.me != "z":
            inputs, targets = HELD_OUT
            losses.append(float(nn.functional.mse_loss(model(inputs), targets).detach()))
            results += place.results
    return Outcome(losses, results)


@pytest.fixture(scope="module")
def three() -> Outcome:
    """What three honest peers reach among themselves."""
    return train("abc")


def test_four_honest_peers_do_as_well_as_three_and_nobody_is_clipped(three: Outcome) -> None:
    four = train("abcz")
    assert max(four.losses) < 1.03 * max(three.losses)
    assert all(result.mixed and not result.clipped for result in four.results)
    assert all(result.radius and result.excess is not None and result.excess <= 1 for result in four.results)


def test_with_nobody_to_clip_it_is_the_plain_average_bit_for_bit(three: Outcome) -> None:
    assert train("abc", mixing="average").losses == three.losses


@pytest.mark.parametrize("lie", [hundredfold, noise, stale()], ids=["x100", "noise x50", "stale"])
def test_a_liar_is_clipped_and_the_others_learn_as_three_would(three: Outcome, lie: Lie) -> None:
    among = train("abcz", lie)
    baseline = sum(three.losses) / 3
    assert sum(among.losses) / 3 < 1.03 * baseline
    assert max(among.losses) < 1.08 * baseline
    clipped = [result for result in among.results if result.clipped]
    assert clipped
    assert all(result.clipped.keys() == {"z"} for result in clipped)
    for result in clipped:
        assert result.excess == result.clipped["z"] > 1
        assert f"clipped z at {result.excess:.3g} times the radius, {result.radius:.3g}: 2 times" in result.reason


@pytest.mark.parametrize("lie", [hundredfold, noise, stale()], ids=["x100", "noise x50", "stale"])
def test_pieces_of_an_all_reduce_are_clipped_too(three: Outcome, lie: Lie) -> None:
    """A liar is in every mix there, and owns a piece of the average, so it does somewhat more harm."""
    among = train("abcz", lie, topology="all-to-all")
    assert max(among.losses) < 1.1 * max(three.losses)
    assert {peer for result in among.results for peer in result.clipped} == {"z"}


def test_the_plain_average_is_ruined_by_the_same_liar(three: Outcome) -> None:
    among = train("abcz", hundredfold, "average")
    assert min(among.losses) > 1000 * max(three.losses)
    assert not any(result.clipped for result in among.results)
    assert all(result.radius is None for result in among.results)


def test_values_that_are_not_finite_are_refused_by_name_and_the_others_learn(three: Outcome) -> None:
    among = train("abcz", not_a_number)
    assert max(among.losses) < 1.03 * max(three.losses)
    assert all("z" not in result.partners for result in among.results)
    assert any(result.swaps["z"].answer is not Answer.ACCEPT for result in among.results if "z" in result.swaps)


def test_a_peer_that_is_far_away_again_and_again_is_set_aside(tmp_path: Path) -> None:
    recipe = parse({"rounds": 5})
    liar = Identity.load_or_create(tmp_path / "liar.key").peer_id
    model = student()
    optimizer = GaslocOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    told: list[tuple[PeerId, SetAside]] = []
    far = RoundResult(0, 1, (liar,), {}, 1, 1, "", 0.0, 0.0, 0, 0, 1, "", clipped={liar: 50.0})
    near = replace(far, clipped={liar: 1.5})  # clipped, but not by so much that it must have lied
    with Swarm.start(recipe, PeerOptions(identity_path=tmp_path / "key", host="127.0.0.1")) as swarm:
        swarm.company.on_set_aside = lambda peer, offender: told.append((peer, offender))
        swarm.enter(optimizer)
        swarm.publish(near)
        assert swarm.company.set_aside() == {}
        swarm.publish(far)
        assert swarm.company.set_aside()[liar].count == 1
        assert not told
        swarm.publish(far)
        held = swarm.company.set_aside()[liar]
        assert held.count == 2
        assert told == [(liar, held)]
        assert held.reason == (
            "its parameters were 50 times the radius away from ours; its offence number 2, set aside for 30 s"
        )
        swarm.publish(far)
        assert swarm.company.set_aside() == {liar: held}
        swarm.publish(near)
        assert swarm.company.set_aside()[liar].count == 1


@dataclass
class Weight:
    """A replica of one number, for a swarm."""

    value: float
    round: int = 0
    local_steps: int = 1

    def snapshot(self) -> tuple[int, dict[str, Tensor]]:
        return self.round, {"anchor/w": torch.full((4,), self.value)}

    def load_snapshot(self, round: int, tensors: Tensors) -> None:
        self.round, self.value = round, float(tensors["anchor/w"][0])


def test_a_newcomer_whose_donor_lied_takes_the_state_of_others(tmp_path: Path) -> None:
    recipe = parse({"rounds": 50})
    with ExitStack() as stack:

        def options(name: str, *addresses: str) -> PeerOptions:
            return PeerOptions(tmp_path / name, host="127.0.0.1", initial_peers=addresses)

        def join(name: str, replica: Weight) -> Swarm:
            swarm = stack.enter_context(Swarm.join(options(name, first.addresses[0])))
            swarm.enter(replica)
            swarm.train()
            return swarm

        first = stack.enter_context(Swarm.start(recipe, options("first")))
        first.enter(Weight(1.0, round=5))
        first.train()
        honest = [first.me, *(join(name, Weight(1.0, round=5)).me for name in ("second", "third"))]
        liar = join("liar", Weight(100.0, round=7))
        assert first.wait_for(4) == 4
        victim = stack.enter_context(Swarm.join(options("victim", first.addresses[0])))
        replica = Weight(0.0)
        assert victim.enter(replica).round == 7
        assert replica.value == 100.0, "it is given by the one that claims the highest round"
        victim.train()
        assert victim._provide() is None, "what nobody has confirmed is not passed on"

        met = tuple(sorted(honest))
        far = RoundResult(7, 1, met, {}, 1, 1, "", 0.0, 0.0, 0, 0, 8, "", clipped=dict.fromkeys(met, 50.0))
        victim.publish(far)
        entry = victim.catch_up()
        assert entry is not None
        assert entry.reason.startswith("3 of 3 partners are far away")
        assert replica.value == 1.0
        assert replica.round >= 7, "rounds that were used are not used again"
        assert victim.company.set_aside() == {}, "it was not they who erred"
        victim.publish(replace(far, clipped={}))
        assert victim.catch_up() is None
        assert victim._provide() is not None
        assert liar.me not in honest


def test_a_state_that_is_not_finite_is_put_back_and_the_peer_learns_on(three: Outcome) -> None:
    """One poisoned gradient: AdamW's moments hold it for ever, so without the rollback the peer is lost."""
    model = student()
    results: list[RoundResult] = []
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = GaslocOptimizer(inner, model, local_steps=LOCAL_STEPS, on_round=results.append)
    for step in range(ROUNDS * LOCAL_STEPS):
        inputs, targets = BATCHES["a", step]
        loss = nn.functional.mse_loss(model(inputs), targets)
        torch.autograd.backward(loss * (math.inf if step == 20 else 1.0))
        optimizer.step()
        optimizer.zero_grad()
    assert [result.rolled_back for result in results] == [0, 0, 1] + [0] * (ROUNDS - 3)
    assert "rolled back to the round's start: '0." in results[2].reason
    inputs, targets = HELD_OUT
    assert float(nn.functional.mse_loss(model(inputs), targets).detach()) < 1.15 * max(three.losses)


def test_an_inner_optimizer_that_makes_its_state_at_once_is_reset_too() -> None:
    model = student()
    inner = torch.optim.Adagrad(model.parameters(), lr=0.1)
    optimizer = GaslocOptimizer(inner, model, local_steps=1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    optimizer.step()
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert not any(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_a_rollback_now_and_then_never_ends_the_run_and_three_in_a_row_do() -> None:
    model = student()
    optimizer = GaslocOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, local_steps=1)
    for index in range(12):
        if index % 3:
            optimizer.roll_back("the loss is nan")
        else:
            optimizer.step()
            optimizer.step()
    optimizer.step()
    optimizer.step()
    optimizer.roll_back("the loss is nan")
    optimizer.roll_back("the loss is nan")
    with pytest.raises(RunError, match="the loss is nan, for the 3rd time in a row"):
        optimizer.roll_back("the loss is nan")
