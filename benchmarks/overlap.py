"""Training during an exchange: what staleness costs, and from which exchange time on it pays.

    python -m benchmarks.overlap --quick     # two seeds of 12 rounds
    python -m benchmarks.overlap --store FILE --json FILE     # three seeds of 24 rounds, a quarter of an hour of CPU

Eight workers of a small byte-level decoder, 2-peer, rounds of 15 steps of one virtual second. First every outcome is
taken a fixed number of steps late (tau), beside blocking runs of more rounds: between those, a loss is so many rounds
of blocking training, and the cost of tau is the share of rounds that are lost (`gasloc.overlap.cost` is fitted to
that). Then, at several exchange times, runs that end at the same virtual time: waiting, always overlapped, and as
`overlap = "auto"` chooses. Losses are those of the held-out text, nats per byte, mean over workers.

A blocking run computes the same whatever its exchanges take, so it is run once a seed and its clock is set to each
exchange time. With `--store`, each finished run is kept at once, and not made again by the next call with that file.
"""

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import bars, overlap_plot
from gasloc import corpus, mixing, overlap
from gasloc.events import Evaluation, Event
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
EXCHANGES_S = (0.5, 1.5, 3.0, 7.5, 15.0)
"""What one exchange takes; a step takes 1 s."""
POINTS = 6
"""Evaluations in the reference number of rounds."""
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Job:
    """One simulation."""

    seed: int
    rounds: int
    every_rounds: int
    """Evaluations."""
    tau: int | None = None
    """Every outcome is taken so many steps late, at no time of its own; None: by `mode`."""
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
    curve: list[tuple[int, float, float]]
    """Rounds done, virtual seconds and loss: means over workers."""
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Modes:
    """Runs of one exchange time that end at the same virtual time, by what they do during an exchange."""

    exchange_s: float
    losses: dict[str, list[float]]
    """Of `off`, `always` and `auto`, one a seed."""
    curves: dict[str, list[tuple[float, float]]]
    """Virtual seconds and loss: means over seeds."""

    def over_waiting(self, mode: str) -> float:
        """The loss of a mode over that of waiting, means over seeds."""
        return statistics.fmean(self.losses[mode]) / statistics.fmean(self.losses["off"])


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
            "evaluation": {"every_rounds": job.every_rounds, "batches": 16},
        }
    )


def run(job: Job) -> Run:
    """Runs one job in this process, on one thread."""
    torch.set_num_threads(1)
    began_s = time.process_time()
    recipe = recipe_of(job)
    problem = DecoderProblem(recipe, corpus.load(recipe.data))
    size_bytes = sum(tensor.numel() * 4 for tensor in problem.initial().values())
    # both partners' copies share the link
    bandwidth = 2 * size_bytes / job.exchange_s if job.exchange_s else math.inf
    conditions = [Conditions(step_time_s=1.0, bandwidth=bandwidth)] * WORKERS
    points: dict[int, list[tuple[float, float]]] = {}

    def listen(_: str, time_s: float, event: Event) -> None:
        if isinstance(event, Evaluation):
            points.setdefault(event.round, []).append((time_s, event.validation_loss))

    result = Simulation(recipe, problem, conditions, variant=Variant(landing_steps=job.tau)).run(listen)
    curve = [
        (done, statistics.fmean(time_s for time_s, _ in each), statistics.fmean(loss for _, loss in each))
        for done, each in sorted(points.items())
        if done and len(each) == WORKERS
    ]
    spread = mixing.spread(result.parameters)
    return Run(job, curve[-1][2], spread, result.seconds, curve, time.process_time() - began_s)


def fitting(rounds: int, exchange_s: float, tau: int, waits: int) -> int:
    """Rounds that end by the time at which `rounds` blocking ones do, with at most `tau` steps during an exchange.

    `waits`: exchanges that nothing is hidden of all the same.
    """
    blocking_s = rounds * (STEPS + exchange_s)
    hidden_s = min(exchange_s, tau)
    return max(1, round((blocking_s - waits * hidden_s) / (STEPS + exchange_s - hidden_s)))


def jobs_of(rounds: int, seeds: int) -> list[Job]:
    """All of them; a seed's together."""
    jobs = []
    every = max(1, rounds // POINTS)
    for seed in range(seeds):
        jobs += [Job(seed, rounds, every, tau=tau) for tau in TAUS]
        jobs += [Job(seed, length, every, tau=0) for length in _longer(rounds)]
        for exchange_s in EXCHANGES_S:
            chosen, _ = overlap.choose(exchange_s, 1.0, STEPS, previous=0)
            # the last exchange has nothing to hide behind, nor has the first where its time is not known yet
            modes: tuple[tuple[Overlap, int, int], ...] = ((STEPS, STEPS, 1), ("auto", chosen, 2))
            for mode, tau, waits in modes:
                jobs.append(Job(seed, fitting(rounds, exchange_s, tau, waits), every, None, mode, exchange_s))
    return jobs


def _longer(rounds: int) -> list[int]:
    return sorted({round(rounds * factor) for factor in LONGER} - {rounds})


def costs(runs: Sequence[Run], rounds: int) -> list[tuple[int, float, list[float]]]:
    """For each tau: its loss over that of tau 0 (means over seeds), and the share of rounds lost by it in each seed.

    Within a seed the loss of blocking runs is taken to fall linearly with the logarithm of their rounds; shares are
    of such rounds.
    """
    seeds = sorted({each.job.seed for each in runs})
    slopes = {seed: _slope(runs, rounds, seed) for seed in seeds}
    table = []
    for tau in TAUS:
        loss = {seed: _loss(runs, seed, tau=tau, rounds=rounds) for seed in seeds}
        reference = {seed: _loss(runs, seed, tau=0, rounds=rounds) for seed in seeds}
        lost = [1 - math.exp((loss[seed] - reference[seed]) / slopes[seed]) for seed in seeds]
        table.append((tau, statistics.fmean(loss.values()) / statistics.fmean(reference.values()) - 1, lost))
    return table


def line_through_origin(table: Sequence[tuple[int, float, list[float]]]) -> float:
    """The share of rounds lost at tau = H on the line through 0 with the least squares over all taus and seeds."""
    pairs = [(tau / STEPS, share) for tau, _, lost in table for share in lost]
    return sum(x * y for x, y in pairs) / sum(x * x for x, _ in pairs)


def crossing(runs: Sequence[Run], rounds: int) -> list[Modes]:
    """For each exchange time what each mode comes to at the same virtual time."""
    return [_modes(runs, rounds, exchange_s) for exchange_s in EXCHANGES_S]


def _modes(runs: Sequence[Run], rounds: int, exchange_s: float) -> Modes:
    chosen = {
        "off": [each for each in runs if each.job.tau == 0 and each.job.rounds == rounds],
        "always": [each for each in runs if each.job.mode == STEPS and each.job.exchange_s == exchange_s],
        "auto": [each for each in runs if each.job.mode == "auto" and each.job.exchange_s == exchange_s],
    }
    curves = {mode: _mean_curve(each) for mode, each in chosen.items()}
    # waiting computes the same whatever an exchange takes: only the clock differs
    done_rounds = [done for done, _, _ in chosen["off"][0].curve]
    curves["off"] = [
        (done * (STEPS + exchange_s), loss) for done, (_, loss) in zip(done_rounds, curves["off"], strict=True)
    ]
    return Modes(exchange_s, {mode: [each.loss for each in found] for mode, found in chosen.items()}, curves)


def _mean_curve(runs: Sequence[Run]) -> list[tuple[float, float]]:
    columns = zip(*(each.curve for each in runs), strict=True)
    return [
        (statistics.fmean(s for _, s, _ in column), statistics.fmean(x for _, _, x in column)) for column in columns
    ]


def _slope(runs: Sequence[Run], rounds: int, seed: int) -> float:
    lengths = [rounds, *_longer(rounds)]
    losses = [_loss(runs, seed, tau=0, rounds=length) for length in lengths]
    return statistics.linear_regression([math.log(length) for length in lengths], losses).slope


def _loss(runs: Sequence[Run], seed: int, *, tau: int, rounds: int) -> float:
    (found,) = (each.loss for each in runs if (each.job.seed, each.job.tau, each.job.rounds) == (seed, tau, rounds))
    return found


def stored(path: Path | None) -> list[Run]:
    """The runs that a file holds; none where there is none."""
    if path is None or not path.exists():
        return []
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        Run(**{**each, "job": Job(**each["job"]), "curve": [tuple(point) for point in each["curve"]]}) for each in found
    ]


def made(jobs: Sequence[Job], path: Path | None, processes: int) -> Iterator[Run]:
    """The runs of the jobs, as they end: first those of the file, then the others, which are added to it."""
    known = {each.job: each for each in stored(path)}
    yield from (known[job] for job in jobs if job in known)
    missing = [job for job in jobs if job not in known]
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in pool.map(run, missing):
            if path is not None:
                with path.open("a") as file:
                    file.write(json.dumps(asdict(done)) + "\n")
            yield done


def main() -> int:
    """Runs all jobs; prints tables and bars, and writes the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two seeds of 12 rounds")
    parser.add_argument("--seeds", type=int, help="seeds, over those of the size")
    parser.add_argument("--rounds", type=int, help="rounds, over those of the size")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once, one thread each")
    parser.add_argument("--store", type=Path, help="keeps finished runs there; for one version of the code")
    parser.add_argument("--plot", type=Path, default=RESULTS / "overlap.png", help="where the plot goes")
    bars.add_options(parser)
    options = parser.parse_args()
    rounds = options.rounds or (12 if options.quick else 24)
    jobs = jobs_of(rounds, options.seeds or (2 if options.quick else 3))
    runs: list[Run] = []
    for done in made(jobs, options.store, options.jobs):
        runs.append(done)
        _say(
            f"{len(runs)} of {len(jobs)}: seed {done.job.seed}, {done.job.rounds} rounds, "
            + (f"tau {done.job.tau}" if done.job.tau is not None else f"{done.job.mode} at {done.job.exchange_s} s")
            + f": loss {done.loss:.4f}, spread {done.spread:.4f}, {done.seconds:.1f} virtual s, {done.cpu_s:.0f} CPU s"
        )
    return _report(runs, rounds, options)


def _report(runs: list[Run], rounds: int, options: argparse.Namespace) -> int:
    table, times = costs(runs, rounds), crossing(runs, rounds)
    _say(f"\ntau of {STEPS}   loss over tau 0   rounds lost, of each seed          cost in gasloc.overlap")
    for tau, more, lost in table:
        each = " ".join(f"{share:7.1%}" for share in lost)
        _say(
            f"{tau:4}        {more:+12.2%}     {statistics.fmean(lost):7.1%} ({each}) {overlap.cost(tau / STEPS):12.1%}"
        )
    fitted = line_through_origin(table)
    _say(f"the line through 0 nearest to all of them: {fitted:.3f} of a round at tau = H")
    _say("\nexchange, steps   waiting   always    auto, at the same virtual time; auto over waiting")
    for modes in times:
        means = {mode: statistics.fmean(losses) for mode, losses in modes.losses.items()}
        losses = f"{means['off']:9.4f}{means['always']:9.4f}{means['auto']:9.4f}"
        _say(f"{modes.exchange_s:10}     {losses} {modes.over_waiting('auto') - 1:+12.2%}")
    _say("")
    overlap_plot.draw(
        options.plot,
        STEPS,
        [(tau, statistics.fmean(lost), lost) for tau, _, lost in table],
        [(modes.exchange_s, modes.losses, modes.curves) for modes in times],
    )
    worst = max(modes.over_waiting("auto") for modes in times)
    return bars.finish(
        [
            bars.Bar("overlap_auto_over_waiting_worst", worst, 1.01, at_least=False),
            bars.Bar("overlap_auto_over_waiting_long_exchange", times[-1].over_waiting("auto"), 1.0, at_least=False),
        ],
        {
            "workers": WORKERS,
            "local_steps": STEPS,
            "rounds": rounds,
            "costs": [{"tau": tau, "loss_over_tau_0": more, "rounds_lost": lost} for tau, more, lost in table],
            "cost_at_a_whole_round": fitted,
            "crossing": [asdict(modes) for modes in times],
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
