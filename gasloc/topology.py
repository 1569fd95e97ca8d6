"""Who mixes with whom in a round: peers' ids in, one row of the mixing matrix out.

Pure and deterministic. Two peers that see the same members compute the same graph, and peers whose views differ
by a few members compute almost the same one, because the order is by hash: a missing member disturbs its
neighbours in that order and nobody else.

Every matrix here is symmetric and doubly stochastic with a positive diagonal, whatever the number of members.
"""

import hashlib
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from itertools import count
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from gasloc.errors import RecipeError
from gasloc.stability import Verdict, published_stability, safe_momentum, stability, verdict

__all__ = [
    "NAMES",
    "TopologyName",
    "Verdict",
    "candidates",
    "matrix",
    "published_stability",
    "row",
    "safe_momentum",
    "stability",
    "verdict",
]

TopologyName = Literal["1-peer", "2-peer", "all-to-all", "ring", "exponential", "none"]
NAMES: tuple[str, ...] = get_args(TopologyName)

_REACH = 32
"""In a matching pass a member may be paired with this many members on either side of it in hash order. All pairs
are candidates up to 65 members; beyond, the cost stays linear in the number of members."""

_CACHED = 8
"""Graphs kept: a simulator asks for each once a worker."""

_Hashes = NDArray[np.uint64]
_Indices = NDArray[np.int64]
_Array = NDArray[np.float64]


def row(name: str, *, round: int, members: Collection[str], me: str, seed: int, mix: int = 0) -> dict[str, float]:
    """One peer's row of this round's mixing matrix: weights by peer id, its own included; they sum to 1.

    A peer that rests (the odd one out, or the only one) gets `{me: 1.0}`. `mix` is the index of the mix within
    the round, for several mixes a round. Cost: about 1 ms for 64 members, linear beyond.

    | name          | neighbours                                                      | weights            |
    |---------------|-----------------------------------------------------------------|--------------------|
    | `1-peer`      | a random perfect matching; the odd one out rests                | 1/2                |
    | `2-peer`      | a random ring                                                   | 1/3; 1/2 for two   |
    | `all-to-all`  | everyone                                                        | 1/n                |
    | `ring`        | the ring of sorted ids, the same every round                    | 1/3; 1/2 for two   |
    | `exponential` | at distance 2^(t mod log2 n) in sorted order, t = round + mix   | 1/2; 1/3, see below|
    | `none`        | nobody                                                          | 1                  |

    `exponential`: for n a power of two the neighbour at position `p XOR 2^k` (a hypercube: log2 n mixes in a row
    give the exact mean). For other n the two neighbours at `p + 2^k` and `p - 2^k` modulo n, k below
    floor(log2 n), weights 1/3: symmetric, and the mean is approached, not reached.

    Raises `RecipeError` for an unknown topology, and `ValueError` where `me` is not among the members.
    """
    ordered, mine = _locate(name, members, me)
    neighbours = _neighbours(name, ordered, mine, round=round, seed=seed, mix=mix)
    weight = 1.0 / (len(neighbours) + 1)
    return {me: weight} | {ordered[index]: weight for index in neighbours}


def candidates(name: str, *, round: int, members: Collection[str], me: str, seed: int, mix: int = 0) -> list[str]:
    """Whom to ask next, best first, when the partners of `row` are not to be had. Does not repeat those.

    `1-peer`: by hash of the pair, so two left over that try in order meet. `2-peer`: outward along the ring, the
    two sides in turn. Static topologies have no second choice: an empty list. Raises as `row` does.
    """
    ordered, mine = _locate(name, members, me)
    if name not in ("1-peer", "2-peer"):
        return []
    taken = {mine, *_neighbours(name, ordered, mine, round=round, seed=seed, mix=mix)}
    if name == "2-peer":
        order = _ring_order(tuple(ordered), round, seed, mix)
        place = int(np.flatnonzero(order == mine)[0])
        n = len(ordered)
        outward = [int(order[(place + side * step) % n]) for step in range(1, n // 2 + 1) for side in (1, -1)]
        ranked = list(dict.fromkeys(outward))
    else:
        tickets = _mix64(_hash_ids(ordered) ^ _key("1-peer", seed, round, mix, 0))
        ranked = np.argsort(_mix64(tickets + tickets[mine]), kind="stable").tolist()
    return [ordered[index] for index in ranked if index not in taken]


def matrix(name: str, *, round: int, members: Collection[str], seed: int, mix: int = 0) -> _Array:
    """The whole mixing matrix, (n, n) float64, rows and columns in sorted order of ids. For tests and studies.

    Built of every member's own `row`, so it shows what a swarm would do. Raises `RecipeError` as `row` does.
    """
    ordered = sorted(set(members))
    place = {peer: index for index, peer in enumerate(ordered)}
    result = np.zeros((len(ordered), len(ordered)))
    for peer in ordered:
        for other, weight in row(name, round=round, members=ordered, me=peer, seed=seed, mix=mix).items():
            result[place[peer], place[other]] = weight
    return result


def _locate(name: str, members: Collection[str], me: str) -> tuple[list[str], int]:
    _check_name(name)
    ordered = sorted(set(members))
    if me not in members:
        raise ValueError(f"peer '{me}' is not among the {len(ordered)} members: add it to its own view")
    return ordered, ordered.index(me)


def _check_name(name: str) -> None:
    if name not in NAMES:
        raise RecipeError(f"topology '{name}' is unknown: choose one of {', '.join(NAMES)}")


def _neighbours(name: str, ordered: Sequence[str], mine: int, *, round: int, seed: int, mix: int) -> list[int]:
    """Positions in `ordered` of the neighbours of the member at position `mine`, without repeats."""
    n = len(ordered)
    if n == 1 or name == "none":
        return []
    if name == "all-to-all":
        return [index for index in range(n) if index != mine]
    if name == "1-peer":
        partner = int(_matched(tuple(ordered), round, seed, mix)[mine])
        return [] if partner < 0 else [partner]
    if name == "exponential":
        return _exponential_neighbours(n, mine, round + mix)
    order = np.arange(n) if name == "ring" else _ring_order(tuple(ordered), round, seed, mix)
    place = int(np.flatnonzero(order == mine)[0])
    return sorted({int(order[place - 1]), int(order[(place + 1) % n])})


def _exponential_neighbours(n: int, mine: int, turn: int) -> list[int]:
    levels = n.bit_length() - 1
    distance = 1 << (turn % levels)
    if n == 1 << levels:
        return [mine ^ distance]
    return [(mine + distance) % n, (mine - distance) % n]


@lru_cache(maxsize=_CACHED)
def _matched(ordered: tuple[str, ...], round: int, seed: int, mix: int) -> _Indices:
    return _matching(_hash_ids(ordered), lambda attempt: _key("1-peer", seed, round, mix, attempt))


@lru_cache(maxsize=_CACHED)
def _ring_order(ordered: tuple[str, ...], round: int, seed: int, mix: int) -> _Indices:
    tickets = _mix64(_hash_ids(ordered) ^ _key("2-peer", seed, round, mix, 0))
    return np.argsort(tickets, kind="stable")


def _matching(ids: _Hashes, key: Callable[[int], np.uint64]) -> _Indices:
    """Each member's partner as an index, -1 for one at rest: greedy by hash of the pair, in passes.

    A pass sorts those still alone by hash on a circle and takes pairs at most `_REACH` places apart, smallest pair
    hash first; the few left over go to the next pass, under a fresh hash. Up to 2 * _REACH + 1 members one pass
    sees every pair, and this is the greedy matching over all pairs. The rule treats all ids alike, so every perfect
    matching is equally likely. Nothing depends on n but the circle itself: no threshold at which two views that
    differ by one member would part.
    """
    partner = np.full(len(ids), -1, dtype=np.int64)
    alone = np.arange(len(ids))
    for attempt in count():
        if len(alone) < 2:
            break
        tickets = _mix64(ids[alone] ^ key(attempt))
        order = np.argsort(tickets, kind="stable")
        alone, tickets = alone[order], tickets[order]
        left, right = _window_pairs(len(alone))
        by_hash = np.argsort(_mix64(tickets[left] + tickets[right]), kind="stable")
        mate = _greedy(len(alone), left[by_hash], right[by_hash])
        paired = mate >= 0
        partner[alone[paired]] = alone[mate[paired]]
        alone = np.sort(alone[~paired])
    return partner


def _window_pairs(n: int) -> tuple[_Indices, _Indices]:
    """All pairs of places at most `_REACH` apart on a circle of n; a pair half-way round may come twice."""
    steps = np.arange(1, min(_REACH, n // 2) + 1)
    left = np.tile(np.arange(n), len(steps))
    return left, (left + np.repeat(steps, n)) % n


def _greedy(n: int, left: _Indices, right: _Indices) -> _Indices:
    """The greedy matching over edges given best first: mates by vertex, -1 for none.

    Each sweep takes every edge that is the best left at both its ends, which is what one-by-one greedy takes too;
    about half of the vertices go in each sweep.
    """
    mate = np.full(n, -1, dtype=np.int64)
    while len(left):
        rank = np.arange(len(left))
        best_left = np.full(n, len(left))
        best_right = np.full(n, len(left))
        best_left[left[::-1]] = rank[::-1]  # of repeated indices numpy keeps the last written: the best
        best_right[right[::-1]] = rank[::-1]
        best = np.minimum(best_left, best_right)
        taken = (best[left] == rank) & (best[right] == rank)
        mate[left[taken]] = right[taken]
        mate[right[taken]] = left[taken]
        free = (mate[left] < 0) & (mate[right] < 0)
        left, right = left[free], right[free]
    return mate


def _hash_ids(ordered: Sequence[str]) -> _Hashes:
    digests = b"".join(hashlib.blake2b(peer.encode(), digest_size=8).digest() for peer in ordered)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)


def _key(name: str, seed: int, round: int, mix: int, attempt: int) -> np.uint64:
    text = f"{name} seed {seed} round {round} mix {mix} attempt {attempt}"
    return np.uint64(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))


def _mix64(values: _Hashes) -> _Hashes:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): every input bit moves every output bit."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
