"""What each simulated worker's machine and link are like: speed, link, failures, time of joining."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gasloc.errors import UsageError
from gasloc.simulation.link import Link


@dataclass(frozen=True, slots=True)
class Conditions:
    """One worker's machine and link. Raises `UsageError` for a value that cannot be."""

    step_time_s: float = 1.0
    """Seconds of one local step."""
    bandwidth: float = math.inf
    """Bytes per second, each way."""
    latency_s: float = 0.0
    """One-way delay of its link, seconds."""
    mtbf_s: float = math.inf
    """Mean time between failures, seconds of running; exponential."""
    mttr_s: float = 60.0
    """Mean time to repair, seconds; exponential. Infinite: the first failure is for good."""
    join_s: float = 0.0
    """When it starts, seconds."""

    def __post_init__(self) -> None:
        for name in ("step_time_s", "bandwidth", "mtbf_s", "mttr_s"):
            value = getattr(self, name)
            if not value > 0:
                raise UsageError(f"{name} {value:g} must be above zero")
        for name in ("latency_s", "join_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise UsageError(f"{name} {value:g} must be zero or above, and finite")
        if not self.step_time_s < math.inf:
            raise UsageError("step_time_s must be finite")

    @property
    def link(self) -> Link:
        return Link(self.bandwidth, self.latency_s)

    def lives(self, seed: int, worker: int) -> Iterator[tuple[float, float]]:
        """Pairs (seconds until the next failure, seconds of repair after it), without end.

        The draws depend on the seed and the worker's number alone, so they are the same for every algorithm.
        """
        draws = np.random.default_rng([seed, worker, 0x6661696C])
        while True:
            running_s = math.inf if math.isinf(self.mtbf_s) else float(draws.exponential(self.mtbf_s))
            yield running_s, float(draws.exponential(self.mttr_s)) if math.isfinite(self.mttr_s) else math.inf


def conditions_of(
    workers: int,
    *,
    step_time_s: Sequence[float],
    bandwidth: Sequence[float],
    latency_s: Sequence[float],
    mtbf_s: Sequence[float],
    mttr_s: Sequence[float],
    join_s: Sequence[float],
) -> list[Conditions]:
    """One `Conditions` a worker from lists that hold one value for all or one a worker. Raises `UsageError`."""
    if workers < 1:
        raise UsageError(f"workers {workers} must be at least 1")
    columns = [
        _for_each(workers, name, values)
        for name, values in (
            ("step-time", step_time_s),
            ("bandwidth", bandwidth),
            ("latency", latency_s),
            ("mtbf", mtbf_s),
            ("mttr", mttr_s),
            ("join", join_s),
        )
    ]
    return [Conditions(*values) for values in zip(*columns, strict=True)]


def numbers(name: str, text: str) -> list[float]:
    """Comma-separated numbers, as they come from a flag. Raises `UsageError` that names the flag and the part."""
    parts = []
    for part in text.split(","):
        try:
            parts.append(float(part))
        except ValueError:
            raise UsageError(f"--{name} {text!r}: {part.strip()!r} is not a number") from None
    return parts


def _for_each(workers: int, name: str, values: Sequence[float]) -> list[float]:
    if len(values) == 1:
        return list(values) * workers
    if len(values) != workers:
        raise UsageError(f"--{name} has {len(values)} values for {workers} workers: give one, or one a worker")
    return list(values)
