"""Fragments: the model cut into parts of near-equal bytes, each of which travels at its own steps of a round.

Whole tensors only, largest first, each into the part that is smallest so far: the balanced tensor fragmentation
of Decoupled DiLoCo (arXiv 2604.21428), which schedules them as Streaming DiLoCo does (arXiv 2501.18512). With
every offset zero all parts travel together at the end of the round, and that equals no fragments at all.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gasloc.errors import RecipeError


@dataclass(frozen=True, slots=True)
class Fragments:
    """A partition of named tensors. Index p in all fields is fragment p."""

    parts: tuple[tuple[str, ...], ...]
    """Names of each fragment's tensors, sorted. Every tensor is in exactly one part, and no part is empty."""
    sizes_bytes: tuple[int, ...]
    imbalance: float
    """Largest part over the mean part: 1.0 is perfect, 2.0 means a peak of traffic twice the mean."""


def fragment(tensor_bytes: Mapping[str, int], count: int) -> Fragments:
    """Cuts named tensors, given by size in bytes, into `count` (P) fragments of near-equal bytes.

    Greedy, largest tensor first; ties go by name. The answer depends on names and sizes alone, not on the order
    of the mapping, so that peers and syncer agree without a word. The largest part is at most 4/3 - 1/(3P) of
    the largest part of the best possible cut (Graham, 1969, "Bounds on multiprocessing timing anomalies").

    Raises `RecipeError` where `count` is under 1 or over the number of tensors, or a size is negative.
    """
    if not 1 <= count <= len(tensor_bytes):
        raise RecipeError(
            f"fragments = {count} for a model of {len(tensor_bytes)} tensors: fragments are whole tensors, "
            f"so give a number from 1 to {len(tensor_bytes)}"
        )
    for name, size_bytes in tensor_bytes.items():
        if size_bytes < 0:
            raise RecipeError(f"tensor '{name}' has {size_bytes} bytes: a size cannot be negative")
    parts: list[list[str]] = [[] for _ in range(count)]
    sizes_bytes = [0] * count
    for name in sorted(tensor_bytes, key=lambda name: (-tensor_bytes[name], name)):
        # The second key keeps tensors of no bytes from leaving a part empty.
        smallest = min(range(count), key=lambda index: (sizes_bytes[index], len(parts[index]), index))
        parts[smallest].append(name)
        sizes_bytes[smallest] += tensor_bytes[name]
    total_bytes = sum(sizes_bytes)
    imbalance = max(sizes_bytes) * count / total_bytes if total_bytes else 1.0
    return Fragments(tuple(tuple(sorted(part)) for part in parts), tuple(sizes_bytes), imbalance)


def offsets(count: int, local_steps: int, staggered: bool = True) -> tuple[int, ...]:
    """The step within a round at which each of `count` (P) fragments is due, from 0 to `local_steps` (H) - 1.

    Staggered offsets are spread evenly and are all different; P = H gives one fragment a step. Not staggered,
    all are 0: everything is due at the end of the round, as without fragments.

    Raises `RecipeError` where P or H is under 1, or P is over H: a schedule longer than the round.
    """
    if local_steps < 1:
        raise RecipeError(f"local_steps = {local_steps}: a round has at least 1 step")
    if not 1 <= count <= local_steps:
        raise RecipeError(
            f"fragments = {count} with local_steps = {local_steps}: "
            + ("there is at least 1" if count < 1 else "a fragment schedule longer than H")
            + f"; give a number from 1 to {local_steps}"
        )
    return tuple(index * local_steps // count if staggered else 0 for index in range(count))


def due(step: int, local_steps: int, count: int, staggered: bool = True) -> list[int]:
    """The fragments to send after local step `step`, counted from 1 over the whole run; ascending.

    Fragment p is due when `step` is its offset modulo H, so exactly once in any H consecutive steps. Its first
    time may come after fewer than H steps. At step 0 nothing has moved and nothing is due.

    Raises `RecipeError` as `offsets` does, and `ValueError` for a negative step.
    """
    if step < 0:
        raise ValueError(f"step {step} is negative")
    schedule = offsets(count, local_steps, staggered)
    if step == 0:
        return []
    return [index for index, offset in enumerate(schedule) if step % local_steps == offset]
