"""Every algorithm of the family in the simulator: loss, replica spread, bytes and virtual time, on the same tokens.

    python -m benchmarks.topologies --quick     # under 10 minutes on two cores
    python -m benchmarks.topologies --full      # DESIGN's setting: 30 rounds of 15 steps, about an hour

Eight workers train a byte-level decoder of 109,000 parameters. Each row runs with three seeds on even links, and with
one worker at a tenth of the bandwidth. Writes topologies.md, .csv, .json, topologies-bytes.png and
topologies-time.png into benchmarks/results/. Losses are those of the held-out text, nats per byte, mean over workers.
"""

import argparse
import csv
import json
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import comparison_plots
from gasloc import corpus, mixing
from gasloc.events import Evaluation, Event, Round
from gasloc.recipe import Recipe, parse
from gasloc.simulation.conditions import Conditions
from gasloc.simulation.decoder import DecoderProblem
from gasloc.simulation.run import Simulation

WORKERS = 8
STEP_TIME_S = 1.0
BANDWIDTH = 400_000.0
"""Bytes a second: a whole model takes about one step."""
LATENCY_S = 0.05
THIN_SHARE = 0.1

ROWS: dict[str, dict[str, Any]] = {
    "all-to-all (DiLoCo)": {"topology": "all-to-all"},
    "2-peer": {"topology": "2-peer"},
    "1-peer": {"topology": "1-peer"},
    "1-peer, 3 mixes": {"topology": "1-peer", "mixes": 3},
    "2-peer, 5 fragments": {"topology": "2-peer", "fragments": 5},
    "2-peer as published": {"topology": "2-peer", "outer": {"rule": "published", "momentum": 0.5}},
    "syncer, 5 fragments": {
        "topology": "syncer",
        "fragments": 5,
        "syncer": {"quorum": 4, "overlap_steps": 5},
    },
    "noloco": {"topology": "noloco"},
    "local-dadam, ring": {"topology": "local-dadam"},
    "dadam, ring": {"topology": "dadam"},
    "ddp": {"topology": "ddp"},
    "none": {"topology": "none"},
}


@dataclass(frozen=True, slots=True)
class Point:
    """Where a run stood when its workers evaluated; means over workers."""

    round: int
    seconds: float
    sent_bytes: float
    loss: float


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation."""

    row: str
    seed: int
    thin: bool
    """Whether one worker had a tenth of the bandwidth."""
    loss: float
    spread: float
    sent_bytes: float
    """Per worker, mean."""
    tokens: float
    """Per worker, mean."""
    seconds: float
    """Virtual."""
    wall_seconds: float
    curve: list[Point]


@dataclass(frozen=True, slots=True)
class Job:
    """What one process is to run."""

    row: str
    seed: int
    thin: bool
    rounds: int
    context_length: int
    batch_size: int


def recipe_of(job: Job) -> Recipe:
    """The recipe of a row: rounds of 15 steps of the demo's model."""
    values: dict[str, Any] = {
        "name": "bench",
        "seed": job.seed,
        "rounds": job.rounds,
        "local_steps": 15,
        "model": {
            "dim": 64,
            "layers": 2,
            "heads": 4,
            "key_value_heads": 2,
            "hidden_dim": 176,
            "context_length": job.context_length,
        },
        "inner": {"batch_size": job.batch_size, "learning_rate": 3e-3, "warmup_steps": 30},
        "exchange": {"overlap": "off"},  # algorithms are compared as they are, and all of them wait
        "evaluation": {"every_rounds": max(1, job.rounds // 5), "batches": 8},
    }
    return parse(values | ROWS[job.row])


def run(job: Job) -> Run:
    """Runs one job in this process, on one thread."""
    torch.set_num_threads(1)
    recipe = recipe_of(job)
    even = Conditions(step_time_s=STEP_TIME_S, bandwidth=BANDWIDTH, latency_s=LATENCY_S)
    last = replace(even, bandwidth=BANDWIDTH * THIN_SHARE) if job.thin else even
    problem = DecoderProblem(recipe, corpus.load(recipe.data))
    evaluations: dict[int, list[tuple[float, float, float]]] = {}
    sent: dict[str, int] = {}

    def listen(peer: str, now_s: float, event: Event) -> None:
        if isinstance(event, Round):
            sent[peer] = sent.get(peer, 0) + event.bytes_sent
        elif isinstance(event, Evaluation):
            evaluations.setdefault(event.round, []).append((now_s, sent.get(peer, 0), event.validation_loss))

    began = time.monotonic()
    result = Simulation(recipe, problem, [even] * (WORKERS - 1) + [last]).run(listen)
    curve = [
        Point(number, *(statistics.fmean(column) for column in zip(*measured, strict=True)))
        for number, measured in sorted(evaluations.items())
    ]
    return Run(
        row=job.row,
        seed=job.seed,
        thin=job.thin,
        loss=statistics.fmean(problem.validation_loss(parameters) for parameters in result.parameters),
        spread=mixing.spread(result.parameters),
        sent_bytes=statistics.fmean(result.sent_bytes),
        tokens=statistics.fmean(result.tokens),
        seconds=result.seconds,
        wall_seconds=time.monotonic() - began,
        curve=curve,
    )


def table(runs: list[Run]) -> list[dict[str, Any]]:
    """One line a row: means over seeds, the losses' standard deviation, and the time with a thin link."""
    lines = []
    for row in ROWS:
        even = [each for each in runs if each.row == row and not each.thin]
        thin = [each for each in runs if each.row == row and each.thin]
        thin_seeds = {each.seed for each in thin}
        losses = [each.loss for each in even]
        lines.append(
            {
                "row": row,
                "loss": statistics.fmean(losses),
                "loss_deviation": statistics.stdev(losses) if len(losses) > 1 else 0.0,
                "spread": statistics.fmean(each.spread for each in even),
                "sent_megabytes": statistics.fmean(each.sent_bytes for each in even) / 1e6,
                "tokens": round(statistics.fmean(each.tokens for each in even)),
                "seconds": statistics.fmean(each.seconds for each in even),
                "thin_seconds": statistics.fmean(each.seconds for each in thin),
                # by the recipe's pacing, those who trade with the thin link take fewer steps
                "thin_tokens": round(statistics.fmean(each.tokens for each in thin)),
                "thin_loss": statistics.fmean(each.loss for each in thin),
                # loss varies with the seed, so a thin link is held against even links with its own seeds
                "even_loss_of_thin_seeds": statistics.fmean(each.loss for each in even if each.seed in thin_seeds),
            }
        )
    return lines


def markdown(lines: list[dict[str, Any]]) -> str:
    """The table for a README."""
    head = (
        "| | loss | ± | spread | MB sent a worker | seconds | thin: seconds | thin: tokens, share of even "
        "| thin: loss, against even links, same seeds |"
    )
    rule = "|---|---|---|---|---|---|---|---|---|"
    body = [
        f"| {line['row']} | {line['loss']:.3f} | {line['loss_deviation']:.3f} | {line['spread']:.4f} "
        f"| {line['sent_megabytes']:.1f} | {line['seconds']:.0f} | {line['thin_seconds']:.0f} "
        f"| {line['thin_tokens'] / line['tokens']:.2f} "
        f"| {line['thin_loss']:.3f}, {line['even_loss_of_thin_seeds']:.3f} |"
        for line in lines
    ]
    return "\n".join([head, rule, *body]) + "\n"


def main() -> None:
    """Runs all rows and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="12 rounds of 8 x 64 bytes a step; the default")
    size.add_argument("--full", action="store_true", help="30 rounds of 16 x 64 bytes a step")
    parser.add_argument("--rounds", type=int, help="rounds, over those of the size")
    parser.add_argument("--seeds", type=int, default=3, help="seeds a row")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once, one thread each")
    parser.add_argument("--dir", type=Path, default=Path(__file__).parent / "results", help="where results go")
    options = parser.parse_args()
    rounds = options.rounds or (30 if options.full else 12)
    batch_size = 16 if options.full else 8
    # one seed in the quick size, to end in ten minutes: the time hardly depends on it, the loss does
    thin_seeds = options.seeds if options.full else 1
    jobs = [
        Job(row, seed, thin, rounds, context_length=64, batch_size=batch_size)
        for row in ROWS
        for thin, seeds in ((False, options.seeds), (True, thin_seeds))
        for seed in range(seeds)
    ]
    began = time.monotonic()
    runs = []
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in pool.map(run, jobs):
            runs.append(done)
            link = "one thin link" if done.thin else "even links"
            print(
                f"{time.monotonic() - began:6.0f} s  {done.row}, seed {done.seed}, {link}: loss {done.loss:.4f}, "
                f"spread {done.spread:.4f}, {done.sent_bytes / 1e6:.1f} MB, {done.seconds:.0f} virtual s",
                flush=True,
            )
    lines = table(runs)
    write(options.dir, lines, runs)
    print()
    print(markdown(lines))
    print(f"{len(jobs)} runs in {time.monotonic() - began:.0f} s; results in {options.dir}")


def write(folder: Path, lines: list[dict[str, Any]], runs: list[Run]) -> None:
    """Writes the table as Markdown, CSV and JSON, and the two plots."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "topologies.md").write_text(markdown(lines))
    with (folder / "topologies.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    document = {"table": lines, "runs": [asdict(each) for each in runs]}
    (folder / "topologies.json").write_text(json.dumps(document, indent=1) + "\n")
    even = {row: _mean_curve([each for each in runs if each.row == row and not each.thin]) for row in ROWS}
    thin = {row: _mean_curve([each for each in runs if each.row == row and each.thin]) for row in ROWS}
    comparison_plots.loss_against_bytes(
        folder / "topologies-bytes.png",
        {row: [(point.sent_bytes / 1e6, point.loss) for point in curve] for row, curve in even.items()},
    )
    comparison_plots.loss_against_time(
        folder / "topologies-time.png",
        [
            (title, {row: [(point.seconds, point.loss) for point in curve] for row, curve in curves.items()})
            for title, curves in (("even links", even), ("one worker at a tenth of the bandwidth", thin))
        ],
    )


def _mean_curve(runs: list[Run]) -> list[Point]:
    """The mean over seeds at each round that all of them evaluated at."""
    by_round: dict[int, list[Point]] = {}
    for each in runs:
        for point in each.curve:
            by_round.setdefault(point.round, []).append(point)
    return [
        Point(
            number,
            statistics.fmean(point.seconds for point in points),
            statistics.fmean(point.sent_bytes for point in points),
            statistics.fmean(point.loss for point in points),
        )
        for number, points in sorted(by_round.items())
        if len(points) == len(runs)
    ]


if __name__ == "__main__":
    main()
