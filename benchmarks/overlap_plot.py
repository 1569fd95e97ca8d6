"""The plot of `benchmarks.overlap`: what staleness costs, and loss against virtual time at several exchange times."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from gasloc import overlap

_STYLES = {"off": ("waiting", "o", "tab:blue"), "always": ("always", "s", "tab:orange"), "auto": ("auto", "^", "k")}

Curve = Sequence[tuple[float, float]]


def draw(
    path: Path,
    local_steps: int,
    costs: Sequence[tuple[int, float, Sequence[float]]],
    times: Sequence[tuple[float, Mapping[str, Sequence[float]], Mapping[str, Curve]]],
) -> None:
    """One panel for the cost, one for the crossing, and below one for each exchange time.

    `costs`: tau, the share of rounds lost, mean and of each seed; `times`: an exchange time in steps, and by mode the
    losses of each seed at the same virtual time, and the loss against virtual time.
    """
    plt = _pyplot()
    figure = plt.figure(figsize=(14, 9))
    above = figure.add_gridspec(2, 2, hspace=0.3, wspace=0.2)
    below = figure.add_gridspec(2, len(times), hspace=0.3, wspace=0.12)
    _cost(figure.add_subplot(above[0, 0]), local_steps, costs)
    _crossing(figure.add_subplot(above[0, 1]), local_steps, times)
    first = None
    for column, (exchange_s, _, curves) in enumerate(times):
        axes = figure.add_subplot(below[1, column], sharey=first)
        first = first or axes
        for mode, (label, marker, color) in _STYLES.items():
            axes.plot(*zip(*curves[mode], strict=True), marker=marker, markersize=4, color=color, label=label)
        axes.set_title(f"exchange: {exchange_s:g} of {local_steps} steps", fontsize=9)
        axes.set_xlabel("virtual time, steps")
        axes.tick_params(labelleft=axes is first)
        axes.grid(alpha=0.3)
    if first is not None:
        first.set_ylabel("validation loss, nats per byte")
        first.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, bbox_inches="tight")
    plt.close(figure)


def _cost(axes: Any, local_steps: int, costs: Sequence[tuple[int, float, Sequence[float]]]) -> None:
    shares = [tau / local_steps for tau, _, _ in costs]
    for share, (_, _, seeds) in zip(shares, costs, strict=True):
        axes.plot([share] * len(seeds), [100 * lost for lost in seeds], ".", color="tab:gray", markersize=5)
    axes.plot(shares, [100 * mean for _, mean, _ in costs], "o", label="measured, mean (dots: seeds)")
    axes.plot(shares, [100 * overlap.cost(share) for share in shares], "-", label="gasloc.overlap.cost")
    axes.set_xlabel("tau / H: how late an outcome is taken, in rounds")
    axes.set_ylabel("rounds of blocking training lost, %")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _crossing(
    axes: Any, local_steps: int, times: Sequence[tuple[float, Mapping[str, Sequence[float]], Mapping[str, Curve]]]
) -> None:
    exchanges = [exchange_s / local_steps for exchange_s, _, _ in times]
    for mode, (label, marker, color) in _STYLES.items():
        over = [100 * (statistics.fmean(by[mode]) / statistics.fmean(by["off"]) - 1) for _, by, _ in times]
        axes.plot(exchanges, over, marker=marker, color=color, label=label)
    axes.set_xlabel("exchange time, in rounds of local steps")
    axes.set_ylabel("loss over waiting at the same virtual time, %")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _pyplot() -> Any:
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot
