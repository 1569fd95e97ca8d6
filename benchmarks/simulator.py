"""What the simulator costs over plain loops of the same work, measured in one run.

    python -m benchmarks.simulator               # 32 workers over 32 single-worker loops; the bar is 1.3
    python -m benchmarks.simulator --crossing    # stacked steps over a plain loop, by size of the model
    python -m benchmarks.simulator --consensus   # 1,024 workers of a noisy quadratic; the bar is a minute

The plain loops are the trainer's own: its model, AdamW, clipping, schedule and sampler, one worker after another, no
network. The two sides take turns, so that a busy machine slows both; the best time of each counts.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from gasloc import corpus, inner, model, sampler
from gasloc.corpus import Corpus
from gasloc.recipe import Recipe, parse
from gasloc.simulation.conditions import Conditions
from gasloc.simulation.decoder import DecoderProblem
from gasloc.simulation.quadratic import QuadraticProblem
from gasloc.simulation.run import Simulation

BAR = 1.3
WORKERS = 32
CONSENSUS_WORKERS = 1024
CONSENSUS_BAR_S = 60.0


def recipe_of(dim: int, context_length: int, batch_size: int, rounds: int) -> Recipe:
    """A byte-level decoder of two layers under 2-peer gossip; nothing is evaluated on the way."""
    return parse(
        {
            "rounds": rounds,
            "local_steps": 5,
            "topology": "2-peer",
            "model": {
                "dim": dim,
                "layers": 2,
                "heads": 4,
                "key_value_heads": 2,
                "hidden_dim": dim * 11 // 4,
                "context_length": context_length,
            },
            "inner": {"batch_size": batch_size},
            "evaluation": {"every_rounds": 1000, "batches": 1},
        }
    )


def plain_loops(recipe: Recipe, text: Corpus) -> None:
    """The local steps of all workers, as one process each would take them, and the evaluations of a run."""
    held_out = sampler.evaluation_batches(
        text.held_out,
        batches=recipe.evaluation.batches,
        batch_size=recipe.inner.batch_size,
        context_length=recipe.model.context_length,
    )
    for worker in range(WORKERS):
        decoder = model.build(recipe.model, recipe.seed)
        optimizer = inner.make_inner(decoder, recipe.inner)
        for step in range(recipe.total_steps):
            if step == 0:
                _evaluate(decoder, held_out)
            inputs, targets = sampler.batch(
                text.train,
                peer_id=f"worker-{worker}",
                step=step,
                seed=recipe.seed,
                batch_size=recipe.inner.batch_size,
                context_length=recipe.model.context_length,
            )
            inner.set_learning_rate(optimizer, inner.learning_rate(step, recipe.inner, recipe.total_steps))
            optimizer.zero_grad()
            loss = decoder.loss(inputs, targets)
            float(loss.detach())
            torch.autograd.backward(loss)
            inner.clip(decoder, recipe.inner)
            optimizer.step()
        _evaluate(decoder, held_out)


@torch.no_grad()
def _evaluate(decoder: model.Decoder, held_out: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for inputs, targets in held_out:
        float(decoder.loss(inputs, targets))


def simulated(recipe: Recipe, text: Corpus, batched: bool | None = None) -> None:
    """The same with exchanges and outer steps between; `batched` None: as the simulator chooses."""
    problem = DecoderProblem(recipe, text)
    if batched is not None:
        problem.batched = batched
    Simulation(recipe, problem, [Conditions(bandwidth=1e6)] * WORKERS).run()


def best_of(repeats: int, *sides: Callable[[], None]) -> list[float]:
    """The shortest time of each, seconds; the sides take turns."""
    for side in sides:
        side()  # what is done once, such as imports, counts for neither
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats):
        for index, side in enumerate(sides):
            began = time.perf_counter()
            side()
            times[index].append(time.perf_counter() - began)
    return [min(each) for each in times]


def overhead(text: Corpus, repeats: int) -> None:
    """Prints the bar for a model that is stepped plainly; and, to see it, one that is stacked."""
    for name, recipe in (
        ("simulator_overhead", recipe_of(64, 64, 8, rounds=2)),
        ("simulator_overhead_stacked", recipe_of(32, 32, 8, rounds=2)),
    ):
        plain_s, simulated_s = best_of(
            repeats,
            partial(plain_loops, recipe, text),
            partial(simulated, recipe, text),
        )
        ratio = simulated_s / plain_s
        size = model.parameter_count(recipe.model)
        print(f"{size:,} parameters, {WORKERS} workers: plain {plain_s:.2f} s, simulated {simulated_s:.2f} s")
        print(f"bar {name} {ratio:.3f} {BAR} {'ok' if ratio <= BAR else 'short'}")


def crossing(text: Corpus, repeats: int) -> None:
    """Prints where stacking stops to pay."""
    for dim, context_length, batch_size in ((16, 16, 8), (32, 32, 8), (32, 64, 16), (48, 32, 8), (64, 32, 8)):
        recipe = recipe_of(dim, context_length, batch_size, rounds=1)
        looped_s, stacked_s = best_of(
            repeats,
            partial(simulated, recipe, text, batched=False),
            partial(simulated, recipe, text, batched=True),
        )
        size = model.parameter_count(recipe.model)
        work = size * batch_size * context_length
        print(
            f"{size:,} parameters x {batch_size * context_length} tokens = {work:.1e}: "
            f"loop {looped_s:.2f} s, stacked {stacked_s:.2f} s, ratio {stacked_s / looped_s:.2f}",
            flush=True,
        )


def consensus() -> None:
    """Prints how far apart 1,024 workers end on each topology, and the time of the slowest as the bar."""
    slowest_s = 0.0
    for topology in ("none", "1-peer", "2-peer", "ring", "exponential"):
        recipe = parse(
            {
                "rounds": 10,
                "local_steps": 10,
                "topology": topology,
                "inner": {"learning_rate": 0.02, "warmup_steps": 10},
                "evaluation": {"every_rounds": 1000},
            }
        )
        began = time.perf_counter()
        problem = QuadraticProblem(16, diversity=1.0)
        result = Simulation(recipe, problem, [Conditions(bandwidth=1e6)] * CONSENSUS_WORKERS).run()
        took_s = time.perf_counter() - began
        slowest_s = max(slowest_s, took_s)
        # the spread over the length of the start, since the mean itself goes to zero
        apart = torch.stack([parameters["x0"] for parameters in result.parameters])
        distance = float((apart - apart.mean(dim=0)).norm(dim=1).mean())
        print(f"{topology:12} {CONSENSUS_WORKERS} workers: distance from the mean {distance:.4f}, {took_s:.1f} s")
    verdict = "ok" if slowest_s <= CONSENSUS_BAR_S else "short"
    print(f"bar simulator_consensus_s {slowest_s:.1f} {CONSENSUS_BAR_S:.0f} {verdict}")


def main() -> None:
    """Measures on one thread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crossing", action="store_true", help="where stacked steps stop to pay")
    parser.add_argument("--consensus", action="store_true", help="1,024 workers of a quadratic")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.consensus:
        consensus()
        return
    (crossing if options.crossing else overhead)(corpus.load("stdlib"), options.repeats)


if __name__ == "__main__":
    main()
