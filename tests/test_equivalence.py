"""The outer algorithm as a whole, of topology, mixing and outer step, against DiLoCo, gossip and numbers by hand."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from gasloc import mixing, published, topology
from gasloc.outer import MakeOptimizer, OuterStep, make_outer
from gasloc.recipe import OuterConfig
from tests.diloco import Inner, diloco

State = dict[str, Tensor]

OUTERS: dict[str, MakeOptimizer] = {
    "nesterov": make_outer(OuterConfig(learning_rate=0.7, momentum=0.9)),
    "sgd": make_outer(OuterConfig(learning_rate=0.7, momentum=0.0)),
    "adam": make_outer(OuterConfig(optimizer="adam", learning_rate=0.1, momentum=0.9)),
}


def start_state(seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(4, 3, generator=generator, dtype=torch.float64),
        "bias": torch.randn(3, generator=generator, dtype=torch.float64),
    }


def local_adamw(worker: int, round: int, theta: State) -> State:
    """A few AdamW steps of a linear regression on this worker's own batch of this round."""
    generator = torch.Generator().manual_seed(1000 * worker + round)
    inputs = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    targets = torch.randn(8, 3, generator=generator, dtype=torch.float64) + worker
    for tensor in theta.values():
        tensor.requires_grad_()
    optimizer = torch.optim.AdamW(theta.values(), lr=0.03)
    for _ in range(3 + worker):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(inputs @ theta["weight"] + theta["bias"], targets)
        torch.autograd.backward(loss)
        optimizer.step()
    return {name: tensor.detach() for name, tensor in theta.items()}


class Worker:
    """One peer: its anchor and its outer step."""

    def __init__(self, peer: str, number: int, start: State, make: MakeOptimizer) -> None:
        self.peer, self.number = peer, number
        self.theta = {name: tensor.clone() for name, tensor in start.items()}
        self.outer = OuterStep(self.theta, make)

    def train(self, inner: Inner, round: int) -> State:
        return dict(inner(self.number, round, {name: tensor.clone() for name, tensor in self.theta.items()}))


def swarm(starts: list[State], make: MakeOptimizer) -> list[Worker]:
    return [Worker(f"peer{number:02d}", number, start, make) for number, start in enumerate(starts)]


def play_round(workers: list[Worker], name: str, inner: Inner, round: int, seed: int = 0) -> None:
    members = [worker.peer for worker in workers]
    phis = {worker.peer: worker.train(inner, round) for worker in workers}
    for worker in workers:
        row = topology.row(name, round=round, members=members, me=worker.peer, seed=seed)
        received = {peer: phis[peer] for peer in row if peer != worker.peer}
        worker.outer.step(mixing.mix(phis[worker.peer], received, row, worker.peer))


def assert_close(left: State, right: State, tolerance: float = 1e-12) -> None:
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=tolerance)


def mean_of(states: list[State]) -> State:
    return {name: torch.stack([state[name] for state in states]).mean(dim=0) for name in states[0]}


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_complete_graph_is_diloco(outer: str, workers: int) -> None:
    make = OUTERS[outer]
    reference = diloco(start_state(), local_adamw, make, workers=workers, rounds=6)
    peers = swarm([start_state()] * workers, make)
    for round, expected in enumerate(reference):
        play_round(peers, "all-to-all", local_adamw, round)
        for worker in peers:
            assert_close(worker.theta, expected)
    assert not torch.allclose(reference[-1]["weight"], start_state()["weight"], atol=1e-2), "nothing was learned"


def test_three_peers_on_a_ring_are_diloco() -> None:
    make = OUTERS["nesterov"]
    reference = diloco(start_state(), local_adamw, make, workers=3, rounds=4)
    peers = swarm([start_state()] * 3, make)
    for round, expected in enumerate(reference):
        play_round(peers, "2-peer", local_adamw, round)
        for worker in peers:
            assert_close(worker.theta, expected)


@pytest.mark.parametrize("name", topology.NAMES)
def test_unit_rate_without_momentum_is_plain_gossip(name: str) -> None:
    starts = [start_state(seed) for seed in range(6)]
    peers = swarm(starts, make_outer(OuterConfig(learning_rate=1.0, momentum=0.0)))
    plain = [{key: tensor.clone() for key, tensor in start.items()} for start in starts]
    for round in range(4):
        play_round(peers, name, local_adamw, round)
        phis = [
            local_adamw(number, round, {key: t.clone() for key, t in state.items()})
            for number, state in enumerate(plain)
        ]
        matrix = torch.from_numpy(topology.matrix(name, round=round, members=[worker.peer for worker in peers], seed=0))
        plain = [
            {key: torch.einsum("j,j...->...", row, torch.stack([phi[key] for phi in phis])) for key in phis[0]}
            for row in matrix
        ]
        for worker, expected in zip(peers, plain, strict=True):
            assert_close(worker.theta, expected)


def test_unit_rate_without_momentum_and_partners_is_local_training() -> None:
    (alone,) = swarm([start_state()], make_outer(OuterConfig(learning_rate=1.0, momentum=0.0)))
    plain = start_state()
    for round in range(5):
        play_round([alone], "none", local_adamw, round)
        plain = local_adamw(0, round, plain)
        assert_close(alone.theta, plain)


@pytest.mark.parametrize("name", topology.NAMES)
@pytest.mark.parametrize("n", [2, 5, 8])
def test_mixing_keeps_the_mean(name: str, n: int) -> None:
    phis = {f"peer{index}": start_state(index) for index in range(n)}
    before = mean_of(list(phis.values()))
    for round in range(4):
        mixed = {}
        for me, own in phis.items():
            row = topology.row(name, round=round, members=phis, me=me, seed=1)
            mixed[me] = mixing.mix(own, {peer: phis[peer] for peer in row if peer != me}, row, me)
        phis = mixed
    assert_close(mean_of(list(phis.values())), before)


def test_failed_edges_keep_the_mean_when_both_ends_drop_them() -> None:
    phis = {f"peer{index}": start_state(index) for index in range(8)}
    failed = {frozenset(("peer0", "peer1")), frozenset(("peer2", "peer5")), frozenset(("peer0", "peer7"))}
    mixed = []
    for me, own in phis.items():
        row = topology.row("all-to-all", round=0, members=phis, me=me, seed=1)
        received = {peer: phis[peer] for peer in row if peer != me and frozenset((peer, me)) not in failed}
        mixed.append(mixing.mix(own, received, row, me))
    assert_close(mean_of(mixed), mean_of(list(phis.values())))


@pytest.mark.parametrize("outer", OUTERS)
def test_the_odd_one_out_still_takes_its_outer_step(outer: str) -> None:
    """Property 5: without a partner W_ii = 1, which is one-worker DiLoCo."""
    make = OUTERS[outer]
    peers = swarm([start_state()] * 3, make)
    members = [worker.peer for worker in peers]
    (resting,) = (
        worker
        for worker in peers
        if topology.row("1-peer", round=0, members=members, me=worker.peer, seed=0) == {worker.peer: 1.0}
    )
    play_round(peers, "1-peer", local_adamw, 0)

    def as_the_resting(worker: int, round: int, theta: State) -> State:
        return local_adamw(resting.number, round, theta)

    (expected,) = diloco(start_state(), as_the_resting, make, workers=1, rounds=1)
    assert_close(resting.theta, expected)
    assert not torch.equal(resting.theta["bias"], start_state()["bias"])


def test_alone_is_one_worker_diloco_on_every_topology() -> None:
    reference = diloco(start_state(), local_adamw, OUTERS["nesterov"], workers=1, rounds=5)
    for name in topology.NAMES:
        (alone,) = swarm([start_state()], OUTERS["nesterov"])
        for round, expected in enumerate(reference):
            play_round([alone], name, local_adamw, round)
            assert_close(alone.theta, expected)


def test_by_hand() -> None:
    """Two peers, two parameters, three rounds, lr 0.7, momentum 0.9; every number worked by hand.

    Local training adds a fixed move: peer a (+1, 0), peer b (0, +2), so that phi = theta + move.
    Both start at the same theta = (1, 2); 2-peer of two is 1/2, 1/2.

    Round 1: mix = theta + (0.5, 1), delta = (-0.5, -1), buf = delta.
        theta += 0.7 * 1.9 * (0.5, 1) = (0.665, 1.33)                          -> (1.665, 3.33)
    Round 2: delta the same, buf = 0.9 * buf + delta = 1.9 delta;  step = delta + 0.9 * 1.9 delta = 2.71 delta
        theta += 0.7 * 2.71 * (0.5, 1) = (0.9485, 1.897)                       -> (2.6135, 5.227)
    Round 3: peer a gets no answer and steps alone, peer b likewise: delta_a = (-1, 0), delta_b = (0, -2).
        buf before: 1.9 * (-0.5, -1) = (-0.95, -1.9); times 0.9: (-0.855, -1.71)
        a: buf = (-1.855, -1.71); step = delta + 0.9 buf = (-2.6695, -1.539); times 0.7: (-1.86865, -1.0773)
           theta_a = (4.48215, 6.3043)
        b: buf = (-0.855, -3.71); step = (-0.7695, -5.339); times 0.7: (-0.53865, -3.7373)
           theta_b = (3.15215, 8.9643)
    """
    moves = {"a": torch.tensor([1.0, 0.0], dtype=torch.float64), "b": torch.tensor([0.0, 2.0], dtype=torch.float64)}
    make = make_outer(OuterConfig(learning_rate=0.7, momentum=0.9))
    thetas = {peer: {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)} for peer in moves}
    outers = {peer: OuterStep(theta, make) for peer, theta in thetas.items()}
    expected = [
        {"a": [1.665, 3.33], "b": [1.665, 3.33]},
        {"a": [2.6135, 5.227], "b": [2.6135, 5.227]},
        {"a": [4.48215, 6.3043], "b": [3.15215, 8.9643]},
    ]
    for round, wanted in enumerate(expected):
        phis = {peer: {"w": thetas[peer]["w"] + move} for peer, move in moves.items()}
        sent = {peer: phi["w"].clone() for peer, phi in phis.items()}
        for me in moves:
            row = topology.row("2-peer", round=round, members=moves, me=me, seed=0)
            received = {peer: phis[peer] for peer in row if peer != me and round < 2}
            mix = mixing.mix(phis[me], received, row, me)
            kept = mix["w"].clone()
            outers[me].step(mix)
            assert torch.equal(mix["w"], kept)
        for me in moves:
            assert torch.equal(phis[me]["w"], sent[me]), "the exchange's buffers changed"
            np.testing.assert_allclose(thetas[me]["w"].numpy(), wanted[me], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["1-peer", "2-peer", "ring", "all-to-all"])
def test_mean_of_the_published_rule_follows_nesterov(name: str) -> None:
    """With moves that do not depend on theta, the mean of all peers is one Nesterov worker under the mean move."""
    lr, gamma, n = 0.7, 0.6, 6
    members = [f"peer{index}" for index in range(n)]
    thetas = {peer: start_state(index) for index, peer in enumerate(members)}
    previous = thetas
    moves = {peer: start_state(100 + index) for index, peer in enumerate(members)}
    mean_move = mean_of(list(moves.values()))

    def inner(worker: int, round: int, theta: State) -> State:
        return {key: tensor + mean_move[key] for key, tensor in theta.items()}

    make = make_outer(OuterConfig(learning_rate=lr, momentum=gamma))
    reference = diloco(mean_of(list(thetas.values())), inner, make, workers=1, rounds=5)
    for round, expected in enumerate(reference):
        zs = {}
        for peer, theta in thetas.items():
            phi = {key: tensor + moves[peer][key] for key, tensor in theta.items()}
            zs[peer] = published.travelling(theta, phi, lr)
        following = {}
        for me in members:
            row = topology.row(name, round=round, members=members, me=me, seed=2)
            mixed = mixing.mix(zs[me], {peer: zs[peer] for peer in row if peer != me}, row, me)
            following[me] = published.step(mixed, zs[me], previous[me], gamma)
        thetas, previous = following, zs
        assert_close(mean_of(list(thetas.values())), expected)


def test_published_rule_parts_peers_on_a_complete_graph_and_ours_does_not() -> None:
    """From equal starts under different moves; this is why ours is the default."""
    lr, momentum = 0.7, 0.9
    ours = swarm([start_state()] * 4, make_outer(OuterConfig(learning_rate=lr, momentum=momentum)))
    thetas = previous = {worker.peer: start_state() for worker in ours}
    for round in range(4):
        play_round(ours, "all-to-all", local_adamw, round)
        zs = {}
        for number, (peer, theta) in enumerate(thetas.items()):
            phi = local_adamw(number, round, {key: tensor.clone() for key, tensor in theta.items()})
            zs[peer] = published.travelling(theta, phi, lr)
        following = {}
        for me in zs:
            row = topology.row("all-to-all", round=round, members=list(zs), me=me, seed=0)
            mixed = mixing.mix(zs[me], {peer: z for peer, z in zs.items() if peer != me}, row, me)
            following[me] = published.step(mixed, zs[me], previous[me], momentum)
        thetas, previous = following, zs
    assert mixing.spread([worker.theta for worker in ours]) < 1e-15
    assert mixing.spread(list(thetas.values())) > 1e-3


@pytest.mark.parametrize("make", OUTERS.values(), ids=OUTERS)
def test_momentum_acts_on_mixed_states(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> None:
    """Two peers with opposite moves: the mixed gradient is 0, so nothing moves and no momentum builds up."""
    thetas = {peer: {"w": torch.ones(3, dtype=torch.float64)} for peer in ("a", "b")}
    outers = {peer: OuterStep(theta, make) for peer, theta in thetas.items()}
    for round in range(3):
        phis = {"a": {"w": thetas["a"]["w"] + 0.5}, "b": {"w": thetas["b"]["w"] - 0.5}}
        for me, other in (("a", "b"), ("b", "a")):
            row = topology.row("1-peer", round=round, members=["a", "b"], me=me, seed=0)
            outers[me].step(mixing.mix(phis[me], {other: phis[other]}, row, me))
    for theta in thetas.values():
        torch.testing.assert_close(theta["w"], torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-12)
