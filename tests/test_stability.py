"""Growth of disagreement: the figures measured for the design, direct simulation, and the verdict."""

import time

import numpy as np
import pytest

from gasloc import topology
from gasloc.errors import RecipeError
from gasloc.topology import Verdict, published_stability, safe_momentum, stability, verdict

SIZES = (8, 32, 128, 512)

MEASURED = {
    ("1-peer", 0.7, 0.5): (0.69, 0.76, 0.77, 0.79),
    ("1-peer", 0.7, 0.9): (0.88, 0.94, 0.96, 0.99),
    ("1-peer", 1.0, 0.5): (0.76, 0.85, 0.85, 0.88),
    ("1-peer", 1.0, 0.9): (1.00, 1.07, 1.07, 1.10),
    ("2-peer", 0.7, 0.5): (0.58, 0.65, 0.67, 0.69),
    ("2-peer", 0.7, 0.9): (0.77, 0.84, 0.86, 0.88),
    ("2-peer", 1.0, 0.5): (0.64, 0.73, 0.75, 0.77),
    ("2-peer", 1.0, 0.9): (0.82, 0.93, 0.95, 0.98),
}


def rounds_by_hand(name: str, n: int, lr: float, momentum: float, mixes: int, nesterov: bool, count: int) -> float:
    """Disagreement of peers simulated with the swarm's own matrices: ||theta|| after `count` rounds."""
    generator = np.random.default_rng(5)
    theta = generator.standard_normal((n, 4))
    theta -= theta.mean(axis=0)
    buf = np.zeros_like(theta)
    members = [f"peer{index:03d}" for index in range(n)]
    for round in range(count):
        mixed = theta
        for mix in range(mixes):
            mixed = topology.matrix(name, round=round, members=members, seed=1, mix=mix) @ mixed
        delta = theta - mixed
        buf = momentum * buf + delta
        theta = theta - lr * (delta + momentum * buf if nesterov else buf)
        theta -= theta.mean(axis=0)
    return float(np.linalg.norm(theta))


@pytest.mark.parametrize(("case", "measured"), MEASURED.items())
def test_measured_figures(case: tuple[str, float, float], measured: tuple[float, ...]) -> None:
    found = [stability(case[0], n, case[1], case[2]) for n in SIZES]
    np.testing.assert_allclose(found, measured, rtol=0, atol=0.03)


def test_published_form_drifts_apart_where_ours_does_not() -> None:
    assert published_stability("1-peer", 8, 0.9) == pytest.approx(1.067, abs=0.02)
    assert published_stability("1-peer", 32, 0.9) == pytest.approx(1.090, abs=0.02)
    assert published_stability("1-peer", 32, 0.8) > 1
    assert published_stability("1-peer", 32, 0.5) < 0.97
    assert stability("1-peer", 32, 0.7, 0.9) < 1


@pytest.mark.parametrize(
    ("name", "n", "lr", "momentum", "mixes", "nesterov"),
    [
        ("1-peer", 16, 0.7, 0.9, 1, True),
        ("1-peer", 16, 1.0, 0.5, 3, True),
        ("2-peer", 16, 0.7, 0.5, 1, False),
        ("2-peer", 17, 0.7, 0.5, 2, True),
    ],
)
def test_random_graphs_against_the_swarms_own(
    name: str, n: int, lr: float, momentum: float, mixes: int, nesterov: bool
) -> None:
    simulated = (
        rounds_by_hand(name, n, lr, momentum, mixes, nesterov, 60)
        / rounds_by_hand(name, n, lr, momentum, mixes, nesterov, 10)
    ) ** (1 / 50)
    assert stability(name, n, lr, momentum, mixes, nesterov) == pytest.approx(simulated, abs=0.05)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("name", "n", "mixes"),
    [
        ("ring", 2, 1),
        ("ring", 9, 1),
        ("ring", 9, 2),
        ("exponential", 4, 1),
        ("exponential", 6, 1),
        ("exponential", 16, 1),
        ("exponential", 16, 3),
        ("exponential", 16, 4),
        ("all-to-all", 5, 1),
    ],
)
def test_static_graphs_are_exact(name: str, n: int, mixes: int, nesterov: bool) -> None:
    """The spectral radius of the whole step of all peers, over one period, made of the swarm's own matrices."""
    lr, momentum = 0.7, 0.9
    period = n.bit_length() - 1
    members = [f"peer{index:03d}" for index in range(n)]
    total = np.eye(2 * n)
    for round in range(period):
        mixed = np.eye(n)
        for mix in range(mixes):
            mixed = topology.matrix(name, round=round, members=members, seed=1, mix=mix) @ mixed
        gain = np.eye(n) - mixed
        look_ahead, kept = (1 + momentum, momentum**2) if nesterov else (1.0, momentum)
        step = np.block([[np.eye(n) - lr * look_ahead * gain, -lr * kept * np.eye(n)], [gain, momentum * np.eye(n)]])
        centre = np.eye(n) - 1 / n  # the mean is no disagreement
        total = np.kron(np.eye(2), centre) @ step @ total
    radius = float(np.abs(np.linalg.eigvals(total)).max())
    assert stability(name, n, lr, momentum, mixes, nesterov) == pytest.approx(radius ** (1 / period), abs=1e-6)


@pytest.mark.parametrize("name", topology.NAMES)
def test_one_peer_cannot_disagree(name: str) -> None:
    assert stability(name, 1, 0.7, 0.9) == 0


def test_local_training_neither_joins_nor_parts() -> None:
    assert stability("none", 8, 0.7, 0.9) == 1


def test_more_mixes_bring_peers_closer() -> None:
    growths = [stability("1-peer", 32, 0.7, 0.5, mixes) for mixes in (1, 2, 3)]
    assert growths == sorted(growths, reverse=True)
    assert growths[0] - growths[2] > 0.1


def test_same_arguments_same_figure() -> None:
    assert stability("1-peer", 8, 0.7, 0.5) == stability("1-peer", 8, 0.7, 0.5)


def test_is_quick() -> None:
    began = time.perf_counter()
    stability("1-peer", 128, 0.7, 0.5)
    assert time.perf_counter() - began < 1


def test_safe_momentum_is_the_largest_that_passes() -> None:
    safe = safe_momentum("1-peer", 32, 1.0)
    assert safe is not None
    assert stability("1-peer", 32, 1.0, safe) <= 0.97
    assert stability("1-peer", 32, 1.0, safe + 0.1) > 0.97
    assert safe_momentum("none", 8, 0.7) is None


@pytest.mark.parametrize(
    ("growth", "expected"),
    [(0.0, "ok"), (0.97, "ok"), (0.9701, "warn"), (0.9999, "warn"), (1.0, "refuse"), (1.2, "refuse")],
)
def test_verdict(growth: float, expected: str) -> None:
    found, reason = verdict(growth, 0.5)
    assert found == expected
    assert f"{growth:.3f}" in reason
    assert ("momentum 0.5" in reason) is (expected != "ok")


def test_verdict_refuses_what_is_no_number() -> None:
    assert verdict(float("nan"), None)[0] is Verdict.REFUSE
    assert verdict(float("inf"), None)[0] is Verdict.REFUSE


def test_what_cannot_be_judged_is_named() -> None:
    with pytest.raises(RecipeError, match="'star' is unknown"):
        stability("star", 8, 0.7, 0.5)
    with pytest.raises(RecipeError, match="'ring' is not a random graph"):
        published_stability("ring", 8, 0.5)
    with pytest.raises(ValueError, match="n is 0"):
        stability("1-peer", 0, 0.7, 0.5)
