"""The plot of `benchmarks.overlap`: the cost of staleness, and loss at one time against the exchange time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from gasloc import overlap


def draw(
    path: Path,
    local_steps: int,
    costs: Sequence[tuple[int, float, float]],
    crossing: Sequence[tuple[float, Mapping[str, float]]],
) -> None:
    """Two panels. `costs`: tau, loss over that of tau 0, share of rounds lost; `crossing`: exchange time and losses."""
    plt = _pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5))
    shares = [tau / local_steps for tau, _, _ in costs]
    left.plot(shares, [100 * lost for _, _, lost in costs], "o", label="measured")
    left.plot(shares, [100 * overlap.cost(share) for share in shares], "-", label="gasloc.overlap.cost")
    left.set_xlabel("tau / H: how late an outcome is taken, in rounds")
    left.set_ylabel("rounds of blocking training lost, %")
    for name, marker in (("off", "o"), ("always", "s"), ("auto", "^")):
        right.plot(
            [exchange_s / local_steps for exchange_s, _ in crossing],
            [by_mode[name] for _, by_mode in crossing],
            marker=marker,
            label={"off": "waiting"}.get(name, name),
        )
    right.set_xlabel("exchange time, in rounds of local steps")
    right.set_ylabel("validation loss at the same virtual time, nats per byte")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _pyplot() -> Any:
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot
