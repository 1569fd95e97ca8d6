"""The mix with two partners and the outer step, on 134 million parameters, against one `clone()` of them.

    python -m benchmarks.outer_step [--quick] [--repeats N] [--json FILE] [--strict]

What a peer computes between the end of a transfer and its next local step, as `gasloc.gossip` and
`gasloc.optimizer` call it: distances of the partners for clipping, the mix in the memory of what was received, the
outer step. One thread; every turn measures each stage once, and the bars are medians over turns of the ratios within a
turn. A clone whose memory comes anew from the system takes several times as long as one into memory that is there;
which of the two `clone()` is depends on the allocator, so a copy into present memory is measured as well, and has the
same bar.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from benchmarks import bars
from benchmarks.bars import Bar
from gasloc import clipping, mixing, model, recipe
from gasloc.outer import OuterStep, make_outer

LIMIT = 6.0
STAGES = ("clone", "copy", "distances", "mix", "outer step", "distance moved")
_State = dict[str, Tensor]
T = TypeVar("T")


def main() -> int:
    """Prints the table and the bars; 1 where a bar is short and that was to be strict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--recipe", default="134m", help="whose model is taken")
    parser.add_argument("--quick", action="store_true", help="the model of the small recipe: fits in caches")
    parser.add_argument("--repeats", type=int, default=15, help="turns that count, after two that do not")
    bars.add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)

    chosen = recipe.load("small" if options.quick else options.recipe)
    phi = {name: p.detach() for name, p in model.build(chosen.model, chosen.seed).named_parameters()}
    outer = OuterStep(_near(phi, 0), make_outer(chosen.outer))
    received = {"a": _near(phi, 1), "b": _near(phi, 2)}
    copy = _near(phi, 3)
    turns = [_turn(phi, copy, received, outer) for _ in range(options.repeats + 2)][2:]

    parameters = sum(tensor.numel() for tensor in phi.values())
    write = sys.stdout.write
    write(f"{parameters:,} parameters in {len(phi)} tensors, 2 partners, 1 thread, medians of {len(turns)} turns\n")
    write(f"{'stage':16}{'ms':>9}{'GB/s':>8}{'clones':>8}{'copies':>8}\n")
    medians = {stage: statistics.median(turn[stage] for turn in turns) for stage in STAGES}
    ratios = {
        unit: {stage: statistics.median(turn[stage] / turn[unit] for turn in turns) for stage in STAGES}
        for unit in ("clone", "copy")
    }
    moved = {"clone": 2, "copy": 2, "distances": 4, "mix": 4, "outer step": 5, "distance moved": 3}
    for stage in STAGES:
        rate = moved[stage] * 4 * parameters / medians[stage] / 1e9
        shares = f"{ratios['clone'][stage]:8.2f}{ratios['copy'][stage]:8.2f}"
        write(f"{stage:16}{1e3 * medians[stage]:9.1f}{rate:8.1f}{shares}\n")
    write("GB/s: the least bytes that the stage must read and write, over its time\n")
    both, clipped = (
        {unit: statistics.median(sum(turn[name] for name in names) / turn[unit] for turn in turns) for unit in ratios}
        for names in (("mix", "outer step"), ("distances", "mix", "outer step"))
    )
    write(f"with the distances that clipping needs: {clipped['clone']:.2f} clones, {clipped['copy']:.2f} copies\n")
    return bars.finish(
        [
            Bar("outer_step_and_mix_clones", both["clone"], LIMIT, at_least=False),
            Bar("outer_step_and_mix_copies", both["copy"], LIMIT, at_least=False),
        ],
        {"parameters": parameters, "median_s": medians, "ratios": ratios, "both": both, "with_distances": clipped},
        json_path=options.json,
        strict=options.strict,
    )


def _near(tensors: _State, seed: int) -> _State:
    """Another replica, about a thousandth away."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 1e-3 * tensor.abs().mean() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in tensors.items()
    }


def _turn(phi: _State, copy: _State, received: dict[str, _State], outer: OuterStep) -> dict[str, float]:
    """Seconds of each stage. What was received holds the mix of the turn before: other values, as far apart."""
    weights = dict.fromkeys(("me", "a", "b"), 1 / 3)
    seconds: dict[str, float] = {}
    clone, seconds["clone"] = _timed(lambda: {name: tensor.clone() for name, tensor in phi.items()})
    del clone
    _, seconds["copy"] = _timed(lambda: [copy[name].copy_(tensor) for name, tensor in phi.items()])
    _, seconds["distances"] = _timed(lambda: [clipping.clip(phi, theirs, 1e9) for theirs in received.values()])
    mix, seconds["mix"] = _timed(lambda: mixing.mix_received(phi, received, weights, "me"))
    _, seconds["outer step"] = _timed(lambda: outer.step(mix))
    _, seconds["distance moved"] = _timed(lambda: mixing.distance(phi, mix))
    return seconds


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    began = time.perf_counter()
    result = call()
    return result, time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
