"""Training during an exchange: what staleness costs, and from which exchange time on it pays.

    python -m benchmarks.overlap --quick     # under 4 minutes of CPU
    python -m benchmarks.overlap             # three seeds of 24 rounds

Eight workers of a small byte-level decoder, 2-peer, rounds of 15 steps of one virtual second. First every outcome is
taken a fixed number of steps late (tau), beside blocking runs of more rounds: between those, a loss is so many rounds
of blocking training, and the cost of tau is the share of rounds that are lost (`gasloc.overlap.cost` is fitted to
that). Then, at several exchange times, runs that end at the same virtual time: waiting, always overlapped, and as
`overlap = "auto"` chooses. Losses are those of the held-out text, nats per byte, mean over workers.
"""

import argparse
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import bars, overlap_plot
from gasloc import corpus, mixing, overlap
from gasloc.overlap import Overlap
from gasloc.recipe import Recipe, parse
from gasloc.simulation.conditions import Conditions
from gasloc.simulation.decoder import DecoderProblem
from gasloc.simulation.run import Simulation, Variant

WORKERS = 8
STEPS = 15
TAUS = (0, 1, 3, 5, 10, 15)
LONGER = (4 / 3, 5 / 3, 2.0)
"""Blocking runs of so many times the rounds, to tell what a loss is worth in rounds."""
EXCHANGES_S = (0.5, 3.0, 7.5, 15.0)
"""What one exchange takes; a step takes 1 s."""
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Job:
    """One simulation."""

    seed: int
    rounds: int
    tau: int | None = None
    """Every outcome is taken so many steps late; None: by `mode`."""
    mode: Overlap = "off"
    exchange_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """What came of it."""

    job: Job
    loss: float
    spread: float
    seconds: float
    """Virtual."""


def recipe_of(job: Job) -> Recipe:
    """The recipe of a job."""
    return parse(
        {
            "name": "bench",
            "seed": job.seed,
            "rounds": job.rounds,
            "local_steps": STEPS,
            "topology": "2-peer",
            "pacing": False,
            "model": {
                "dim": 32,
                "layers": 1,
                "heads": 4,
                "key_value_heads": 2,
                "hidden_dim": 88,
                "context_length": 32,
            },
            "inner": {"batch_size": 8, "learning_rate": 3e-3, "warmup_steps": 30},
            "exchange": {"overlap": job.mode, "grace_s": 1000.0},
            "evaluation": {"every_rounds": job.rounds, "batches": 16},
        }
    )


def run(job: Job) -> Run:
    """Runs one job in this process, on one thread."""
    torch.set_num_threads(1)
    recipe = recipe_of(job)
    problem = DecoderProblem(recipe, corpus.load(recipe.data))
    size_bytes = sum(tensor.numel() * 4 for tensor in problem.initial().values())
    # both partners' copies share the link
    bandwidth = 2 * size_bytes / job.exchange_s if job.exchange_s else math.inf
    conditions = [Conditions(step_time_s=1.0, bandwidth=bandwidth)] * WORKERS
    result = Simulation(recipe, problem, conditions, variant=Variant(landing_steps=job.tau)).run()
    loss = statistics.fmean(problem.validation_loss(parameters) for parameters in result.parameters)
    return Run(job, loss, mixing.spread(result.parameters), result.seconds)


def fitting(rounds: int, exchange_s: float, tau: int) -> int:
    """Rounds that end by the time at which `rounds` blocking ones do, with at most `tau` steps during an exchange."""
    blocking_s = rounds * (STEPS + exchange_s)
    hidden_s = min(exchange_s, tau)
    # the last exchange has nothing to hide behind
    return max(1, round((blocking_s - hidden_s) / (STEPS + exchange_s - hidden_s)))


def jobs_of(rounds: int, seeds: int) -> list[Job]:
    """All of them; a seed's together."""
    jobs = []
    for seed in range(seeds):
        jobs += [Job(seed, rounds, tau=tau) for tau in TAUS]
        jobs += [Job(seed, round(rounds * factor)) for factor in LONGER]
        for exchange_s in EXCHANGES_S:
            chosen, _ = overlap.choose(exchange_s, 1.0, STEPS)
            modes: tuple[tuple[Overlap, int], ...] = (("off", 0), (STEPS, STEPS), ("auto", chosen))
            jobs += [Job(seed, fitting(rounds, exchange_s, tau), None, mode, exchange_s) for mode, tau in modes]
    return jobs


def costs(runs: Sequence[Run], rounds: int) -> list[tuple[int, float, float]]:
    """For each tau: its loss over that of tau 0, and the share of a blocking run's rounds that are lost by it.

    Means over seeds. Between blocking runs the loss is taken to fall linearly with the logarithm of their rounds.
    """
    blocking = sorted(
        (length, _mean(runs, tau=None, rounds=length, mode="off", exchange_s=0.0))
        for length in {round(rounds * factor) for factor in LONGER}
    )
    reference = _mean(runs, tau=0, rounds=rounds)
    slope, _ = statistics.linear_regression(
        [math.log(length / rounds) for length, _ in blocking] + [0.0], [loss for _, loss in blocking] + [reference]
    )
    table = []
    for tau in TAUS:
        loss = _mean(runs, tau=tau, rounds=rounds)
        table.append((tau, loss / reference - 1, 1 - math.exp((loss - reference) / slope)))
    return table


def crossing(runs: Sequence[Run]) -> list[tuple[float, dict[str, float]]]:
    """For each exchange time the loss of each mode at the same virtual time, means over seeds."""
    return [
        (
            exchange_s,
            {
                name: _mean(runs, tau=None, mode=mode, exchange_s=exchange_s)
                for name, mode in (("off", "off"), ("always", STEPS), ("auto", "auto"))
            },
        )
        for exchange_s in EXCHANGES_S
    ]


def _mean(runs: Sequence[Run], **wanted: object) -> float:
    chosen = [each.loss for each in runs if all(getattr(each.job, name) == value for name, value in wanted.items())]
    return statistics.fmean(chosen)


def main() -> int:
    """Runs all jobs; prints tables and bars, and writes the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two seeds of 12 rounds")
    parser.add_argument("--seeds", type=int, help="seeds, over those of the size")
    parser.add_argument("--rounds", type=int, help="rounds, over those of the size")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once, one thread each")
    parser.add_argument("--plot", type=Path, default=RESULTS / "overlap.png", help="where the plot goes")
    bars.add_options(parser)
    options = parser.parse_args()
    rounds = options.rounds or (12 if options.quick else 24)
    jobs = jobs_of(rounds, options.seeds or (2 if options.quick else 3))
    began_s = time.monotonic()
    runs: list[Run] = []
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in pool.map(run, jobs):
            runs.append(done)
            _say(
                f"{time.monotonic() - began_s:5.0f} s  seed {done.job.seed}, {done.job.rounds} rounds, "
                + (f"tau {done.job.tau}" if done.job.tau is not None else f"{done.job.mode} at {done.job.exchange_s} s")
                + f": loss {done.loss:.4f}, spread {done.spread:.4f}, {done.seconds:.1f} virtual s"
            )
    return _report(runs, rounds, options)


def _report(runs: list[Run], rounds: int, options: argparse.Namespace) -> int:
    table, times = costs(runs, rounds), crossing(runs)
    _say(f"\ntau of {STEPS}   loss over tau 0   rounds lost   cost in gasloc.overlap")
    for tau, more, lost in table:
        _say(f"{tau:4}        {more:+12.2%} {lost:13.1%} {overlap.cost(tau / STEPS):18.1%}")
    _say("\nexchange, steps   waiting   always    auto, at the same virtual time")
    for exchange_s, by_mode in times:
        _say(f"{exchange_s:10}     {by_mode['off']:9.4f}{by_mode['always']:9.4f}{by_mode['auto']:9.4f}")
    _say("")
    overlap_plot.draw(options.plot, STEPS, table, times)
    worst = max(by_mode["auto"] / by_mode["off"] for _, by_mode in times)
    longest = times[-1][1]
    return bars.finish(
        [
            bars.Bar("overlap_auto_over_waiting_worst", worst, 1.01, at_least=False),
            bars.Bar("overlap_auto_over_waiting_long_exchange", longest["auto"] / longest["off"], 1.0, at_least=False),
        ],
        {
            "workers": WORKERS,
            "local_steps": STEPS,
            "rounds": rounds,
            "costs": [{"tau": tau, "loss_over_tau_0": more, "rounds_lost": lost} for tau, more, lost in table],
            "crossing": [{"exchange_s": exchange_s, **by_mode} for exchange_s, by_mode in times],
            "runs": [asdict(each) for each in runs],
        },
        json_path=options.json,
        strict=options.strict,
    )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
