"""Mixing matrices: their algebra, their statistics, and what differing views do to them."""

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gasloc import topology
from gasloc.errors import RecipeError

sizes = st.integers(1, 64)
names = st.sampled_from(topology.NAMES)
rounds = st.integers(0, 10_000)
seeds = st.integers(0, 2**63 - 1)
mixes = st.integers(0, 5)


def peers(n: int) -> list[str]:
    return [f"12D3KooW{index:04d}" for index in range(n)]


def assert_mixing_matrix(matrix: NDArray[np.float64]) -> None:
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_allclose(matrix.sum(axis=0), 1, rtol=0, atol=1e-12)
    assert (matrix >= 0).all()
    assert (matrix.diagonal() > 0).all()


@settings(max_examples=150, deadline=None)
@given(name=names, n=sizes, round=rounds, seed=seeds, mix=mixes)
def test_every_matrix_is_symmetric_and_doubly_stochastic(name: str, n: int, round: int, seed: int, mix: int) -> None:
    assert_mixing_matrix(topology.matrix(name, round=round, members=peers(n), seed=seed, mix=mix))


@settings(max_examples=50, deadline=None)
@given(name=names, n=st.integers(1, 24), round=rounds, seed=seeds, count=st.integers(1, 5))
def test_product_of_mixes_is_doubly_stochastic(name: str, n: int, round: int, seed: int, count: int) -> None:
    product = np.eye(n)
    for mix in range(count):
        product = topology.matrix(name, round=round, members=peers(n), seed=seed, mix=mix) @ product
    np.testing.assert_allclose(product.sum(axis=0), 1, rtol=0, atol=1e-12)
    np.testing.assert_allclose(product.sum(axis=1), 1, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "n", "weights"),
    [
        ("1-peer", 2, [0.5, 0.5]),
        ("1-peer", 8, [0.5, 0.5]),
        ("2-peer", 2, [0.5, 0.5]),
        ("2-peer", 3, [1 / 3] * 3),
        ("2-peer", 9, [1 / 3] * 3),
        ("all-to-all", 5, [0.2] * 5),
        ("ring", 2, [0.5, 0.5]),
        ("ring", 6, [1 / 3] * 3),
        ("exponential", 8, [0.5, 0.5]),
        ("exponential", 6, [1 / 3] * 3),
        ("none", 6, [1.0]),
    ],
)
def test_weights(name: str, n: int, weights: list[float]) -> None:
    for me in peers(n):
        assert list(topology.row(name, round=3, members=peers(n), me=me, seed=0).values()) == weights


@pytest.mark.parametrize("name", topology.NAMES)
def test_one_member_keeps_everything(name: str) -> None:
    assert topology.row(name, round=0, members=["a"], me="a", seed=0) == {"a": 1.0}


def test_odd_one_out_rests_and_takes_turns() -> None:
    resting: Counter[str] = Counter()
    for round in range(60):
        matrix = topology.matrix("1-peer", round=round, members=peers(5), seed=0)
        (alone,) = np.flatnonzero(matrix.diagonal() == 1)
        resting[peers(5)[alone]] += 1
    assert set(resting) == set(peers(5))


def test_static_ring_is_by_sorted_id() -> None:
    row = topology.row("ring", round=7, members=["d", "a", "c", "b"], me="a", seed=5)
    assert row == {"a": 1 / 3, "b": 1 / 3, "d": 1 / 3}


@pytest.mark.parametrize("n", [2, 4, 8, 32])
def test_exponential_mixes_of_one_round_give_the_exact_mean(n: int) -> None:
    for round in (0, 1, 5):
        product = np.eye(n)
        for mix in range(n.bit_length() - 1):
            product = topology.matrix("exponential", round=round, members=peers(n), seed=0, mix=mix) @ product
        np.testing.assert_array_equal(product, np.full((n, n), 1 / n))


@settings(max_examples=50, deadline=None)
@given(name=names, n=sizes, round=rounds, seed=seeds, data=st.data())
def test_order_and_repeats_of_members_do_not_matter(
    name: str, n: int, round: int, seed: int, data: st.DataObject
) -> None:
    members = peers(n)
    shuffled = data.draw(st.permutations(members))
    me = members[n // 2]
    assert topology.row(name, round=round, members=members, me=me, seed=seed) == topology.row(
        name, round=round, members=[*shuffled, me], me=me, seed=seed
    )


@pytest.mark.parametrize("name", ["1-peer", "2-peer"])
def test_round_seed_and_mix_each_draw_anew(name: str) -> None:
    members = peers(64)
    base = topology.row(name, round=1, members=members, me=members[0], seed=1, mix=1)
    others = [
        topology.row(name, round=2, members=members, me=members[0], seed=1, mix=1),
        topology.row(name, round=1, members=members, me=members[0], seed=2, mix=1),
        topology.row(name, round=1, members=members, me=members[0], seed=1, mix=2),
    ]
    assert all(other != base for other in others)


def test_rows_are_the_same_on_every_machine_and_version() -> None:
    """Peers of one run compute rows apart, so a change here ends every live run: it must be deliberate."""
    members = ["alice", "bob", "carol", "dave", "erin", "frank"]

    def partners(name: str, me: str, mix: int) -> set[str]:
        return set(topology.row(name, round=11, members=members, me=me, seed=42, mix=mix)) - {me}

    assert [partners("1-peer", me, 0) for me in ("alice", "bob", "carol")] == [{"dave"}, {"erin"}, {"frank"}]
    assert [partners("1-peer", me, 1) for me in ("alice", "carol", "erin")] == [{"bob"}, {"dave"}, {"frank"}]
    assert [partners("2-peer", me, 0) for me in ("alice", "bob")] == [{"carol", "frank"}, {"carol", "dave"}]
    assert [partners("2-peer", me, 1) for me in ("alice", "bob")] == [{"bob", "carol"}, {"alice", "frank"}]


@pytest.mark.parametrize(
    ("name", "n", "second"),
    [
        ("1-peer", 4, 1 / 2 - 1 / (2 * 3)),
        ("1-peer", 8, 1 / 2 - 1 / (2 * 7)),
        ("1-peer", 16, 1 / 2 - 1 / (2 * 15)),
        ("2-peer", 4, 1 / 3 - 2 / (3 * 3)),
        ("2-peer", 8, 1 / 3 - 2 / (3 * 7)),
        ("2-peer", 16, 1 / 3 - 2 / (3 * 15)),
    ],
)
def test_consensus_contracts_as_by_formula(name: str, n: int, second: float) -> None:
    """The second eigenvalue of E[W^T W], by Monte Carlo over rounds.

    E[W^T W] is a multiple of the identity on disagreements, so its trace gives that multiple without noise, while
    the largest eigenvalue of the sampled mean lies above it by sampling error: compared more loosely.
    """
    draws = 1000 if n < 16 else 400
    total = np.zeros((n, n))
    for round in range(draws):
        matrix = topology.matrix(name, round=round, members=peers(n), seed=9)
        total += matrix.T @ matrix
    mean = total / draws
    assert (np.trace(mean) - 1) / (n - 1) == pytest.approx(second, abs=1e-12)
    assert np.linalg.eigvalsh(mean)[-2] == pytest.approx(second, abs=0.06)


def test_every_pair_is_equally_likely() -> None:
    n, draws = 8, 2100
    counts = np.zeros((n, n))
    for round in range(draws):
        counts += topology.matrix("1-peer", round=round, members=peers(n), seed=3) > 0
    pairs = counts[np.triu_indices(n, 1)]
    expected = draws / (n - 1)
    assert pairs.sum() == draws * n / 2
    chi_square = float((np.square(pairs - expected) / expected).sum())
    assert chi_square < 60  # 20 degrees of freedom; the draws are fixed, so this passes always or never


def agreement(name: str, share_missing: float, views: int = 30) -> float:
    """Share of chosen partners that chose back, when each view of 64 lacks random others; one at rest chose none."""
    generator = np.random.default_rng(7)
    members = peers(64)
    missing = round(share_missing * len(members))
    agreed = chosen = 0
    for turn in range(views):
        rows = {}
        for me in members:
            others = [peer for peer in members if peer != me]
            view = [others[index] for index in generator.permutation(63)[missing:]] + [me]
            rows[me] = set(topology.row(name, round=turn, members=view, me=me, seed=0)) - {me}
        for me, partners in rows.items():
            chosen += len(partners)
            agreed += sum(me in rows[partner] for partner in partners)
    return agreed / chosen


@pytest.mark.parametrize(
    ("name", "share_missing", "expected"),
    [
        ("1-peer", 0.02, 0.90),
        ("1-peer", 0.05, 0.80),
        ("1-peer", 0.10, 0.66),
        ("2-peer", 0.02, 0.95),
        ("2-peer", 0.05, 0.92),
        ("2-peer", 0.10, 0.81),
    ],
)
def test_views_that_differ_mostly_agree(name: str, share_missing: float, expected: float) -> None:
    assert agreement(name, share_missing) == pytest.approx(expected, abs=0.035)


@pytest.mark.parametrize("n", [65, 66, 67, 150])
def test_one_more_member_changes_few_pairs(n: int) -> None:
    """Around 65 members the pairs no longer fit one window; no size may be a cliff."""
    before, after = peers(n), peers(n + 1)
    same = sum(
        topology.row("1-peer", round=round, members=before, me=me, seed=0)
        == topology.row("1-peer", round=round, members=after, me=me, seed=0)
        for round in range(3)
        for me in before
    )
    assert same / (3 * n) > 0.8


def test_large_matching_is_perfect() -> None:
    members = peers(1000)
    ids = topology._hash_ids(members)
    partner = topology._matching(ids, lambda attempt: topology._key("1-peer", 0, 0, 0, attempt))
    assert (partner[partner] == np.arange(1000)).all()
    assert (partner != np.arange(1000)).all()


@pytest.mark.parametrize(("n", "limit_s"), [(64, 0.05), (1_000, 0.3)])
@pytest.mark.parametrize("name", topology.NAMES)
def test_row_is_quick(name: str, n: int, limit_s: float) -> None:
    members = peers(n)
    times = []
    for round in range(5):
        began = time.perf_counter()
        topology.row(name, round=round, members=members, me=members[1], seed=0)
        times.append(time.perf_counter() - began)
    assert min(times) < limit_s


@settings(max_examples=50, deadline=None)
@given(name=names, n=sizes, round=rounds, seed=seeds)
def test_candidates_are_everyone_else_once(name: str, n: int, round: int, seed: int) -> None:
    members = peers(n)
    me = members[n // 3]
    found = topology.candidates(name, round=round, members=members, me=me, seed=seed)
    assert len(found) == len(set(found))
    row = topology.row(name, round=round, members=members, me=me, seed=seed)
    expected = set(members) - set(row) if name in ("1-peer", "2-peer") else set()
    assert set(found) == expected


def test_two_left_over_meet() -> None:
    """When all but two are taken, each is the other's first choice among the free."""
    members = peers(20)
    free = {members[3], members[11]}
    for me in free:
        ranked = topology.candidates("1-peer", round=1, members=members, me=me, seed=0)
        row = topology.row("1-peer", round=1, members=members, me=me, seed=0)
        reachable = [peer for peer in [*row, *ranked] if peer in free - {me}]
        assert reachable == list(free - {me})


def test_first_candidate_of_a_ring_is_the_neighbours_neighbour() -> None:
    members = peers(9)
    me = members[0]

    def partners(peer: str) -> set[str]:
        return set(topology.row("2-peer", round=4, members=members, me=peer, seed=0)) - {peer}

    first_two = topology.candidates("2-peer", round=4, members=members, me=me, seed=0)[:2]
    beyond = set().union(*(partners(peer) for peer in partners(me))) - {me}
    assert set(first_two) == beyond


def test_unknown_topology_is_named() -> None:
    with pytest.raises(RecipeError, match="topology 'star' is unknown"):
        topology.row("star", round=0, members=["a"], me="a", seed=0)
    with pytest.raises(RecipeError, match="topology 'star' is unknown"):
        topology.candidates("star", round=0, members=["a"], me="a", seed=0)


@pytest.mark.parametrize("name", topology.NAMES)
def test_stranger_to_its_own_view_is_named(name: str) -> None:
    with pytest.raises(ValueError, match="peer 'z' is not among the 2 members"):
        topology.row(name, round=0, members=["a", "b"], me="z", seed=0)
