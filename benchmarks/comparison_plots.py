"""The two plots of `benchmarks.topologies`: loss against bytes, and against virtual time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import ticker

Curve = Sequence[tuple[float, float]]
"""(x, loss), in order of x."""

_MARKERS = "osD^vP*XhpHd"


def loss_against_bytes(path: Path, curves: Mapping[str, Curve]) -> None:
    """Curves that send nothing are drawn as a level line at their last loss."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(10, 6))
    for index, (name, curve) in enumerate(curves.items()):
        sending = [(x, loss) for x, loss in curve if x > 0]
        if sending:
            axes.plot(*zip(*sending, strict=True), label=name, **_style(index, len(curves)))
        else:
            axes.axhline(curve[-1][1], color="black", linestyle=":", label=f"{name} (at its end)")
    axes.set_xscale("log")
    axes.set_xlabel("megabytes sent by a worker")
    _finish(figure, [axes], path)


def loss_against_time(path: Path, panels: Sequence[tuple[str, Mapping[str, Curve]]]) -> None:
    """One panel a condition, side by side, on one scale."""
    plt = _pyplot()
    figure, all_axes = plt.subplots(1, len(panels), figsize=(6.5 * len(panels) + 2, 6), sharey=True, sharex=True)
    for axes, (title, curves) in zip(all_axes, panels, strict=True):
        for index, (name, curve) in enumerate(curves.items()):
            moved = [(x, loss) for x, loss in curve if x > 0]
            axes.plot(*zip(*moved, strict=True), label=name, **_style(index, len(curves)))
        axes.set_xscale("log")
        axes.set_title(title)
        axes.set_xlabel("virtual seconds (a local step takes 1)")
    _finish(figure, list(all_axes), path)


def _pyplot() -> Any:
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _style(index: int, count: int) -> dict[str, Any]:
    # strong colours first, then their pale shades
    color = mpl.colormaps["tab20"]((2 * index) % 20 + (2 * index) // 20) if count > 10 else f"C{index}"
    return {"color": color, "marker": _MARKERS[index % len(_MARKERS)], "markersize": 5, "linewidth": 1.5}


def _finish(figure: Any, all_axes: list[Any], path: Path) -> None:
    losses = [line.get_ydata() for axes in all_axes for line in axes.get_lines()]
    lowest = min(min(loss) for loss in losses)
    # what happens far above the end tells nothing apart
    all_axes[0].set_ylim(lowest - 0.03, min(max(max(loss) for loss in losses) + 0.1, lowest + 0.8))
    all_axes[0].set_ylabel("validation loss, nats per byte, mean over workers")
    for axes in all_axes:
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axes.grid(alpha=0.3, which="both")
    all_axes[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")
    _pyplot().close(figure)
