"""The loss that each codec comes to, and its bytes: simulated swarms that differ in the exchange alone.

All rows of a seed start from the same parameters and draw the same text and the same partners; each seed's rows train
beside each other in one process. Bytes are those of the tensors under the real codecs, see `peers.lossy`.
"""

import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.bars import Bar
from gasloc import corpus, mixing
from gasloc.events import Event, Round
from gasloc.recipe import Recipe, parse
from gasloc.simulation.conditions import Conditions
from gasloc.simulation.decoder import DecoderProblem
from gasloc.simulation.run import Listener, beside, run_together

WORKERS = 8
HELD_OUT_BATCHES = 256
MOMENTUM = 0.5
DILOCO, CHEAP = "all-to-all, fp32 (DiLoCo)", "1-peer, 3 mixes, modular4"
PLAIN = "2-peer, fp32"

BARRED: dict[str, dict[str, Any]] = {
    PLAIN: {"topology": "2-peer"},
    "2-peer, modular8": {"topology": "2-peer", "exchange": {"codec": "modular8"}},
    "2-peer, modular4": {"topology": "2-peer", "exchange": {"codec": "modular4"}},
    DILOCO: {"topology": "all-to-all"},
    CHEAP: {"topology": "1-peer", "mixes": 3, "exchange": {"codec": "modular4"}},
}
REPORTED: dict[str, dict[str, Any]] = {
    "2-peer, fp16": {"topology": "2-peer", "exchange": {"codec": "fp16"}},
    "2-peer, bf16": {"topology": "2-peer", "exchange": {"codec": "bf16"}},
    "2-peer, int8": {"topology": "2-peer", "exchange": {"codec": "int8"}},
    "1-peer, 3 mixes, fp32": {"topology": "1-peer", "mixes": 3},
}
ROWS = BARRED | REPORTED


def reference(row: str) -> str:
    """The row that another is held against."""
    return PLAIN if row.startswith("2-peer") else DILOCO


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation."""

    row: str
    seed: int
    loss: float
    """Of the held-out text, nats per byte, mean over workers."""
    spread: float
    sent_bytes: float
    """Per worker, mean."""
    resent: float
    """Share of modular blocks that were sent again."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one process is to run: rows of one seed."""

    rows: tuple[str, ...]
    seed: int
    rounds: int


def jobs(seeds: int, rounds: int, *, barred_only: bool) -> list[Job]:
    """Those that bars are held to first, a seed at a time."""
    groups = [BARRED] if barred_only else [BARRED, REPORTED]
    return [Job(tuple(rows), seed, rounds) for rows in groups for seed in range(seeds)]


def recipe_of(row: str, seed: int, rounds: int) -> Recipe:
    """Rounds of 15 steps of a small byte-level decoder."""
    values: dict[str, Any] = {
        "name": "codecs",
        "seed": seed,
        "rounds": rounds,
        "local_steps": 15,
        "pacing": False,
        "outer": {"momentum": MOMENTUM},
        "model": {"dim": 32, "layers": 2, "heads": 2, "key_value_heads": 1, "hidden_dim": 88, "context_length": 32},
        "inner": {"batch_size": 2, "learning_rate": 3e-3, "warmup_steps": 30},
        "evaluation": {"every_rounds": 1_000_000, "batches": 1},
    }
    return parse(values | ROWS[row])


def run(job: Job) -> list[Run]:
    """Runs one job in this process, on one thread."""
    torch.set_num_threads(1)
    recipes = [recipe_of(row, job.seed, job.rounds) for row in job.rows]
    text = corpus.load(recipes[0].data)
    simulations = beside(recipes, DecoderProblem(recipes[0], text), [Conditions()] * WORKERS)
    results = run_together(simulations, _progress(job))
    measured = recipes[0].evaluation.model_copy(update={"batches": HELD_OUT_BATCHES})
    problem = DecoderProblem(recipes[0].model_copy(update={"evaluation": measured}), text)
    runs = []
    for row, simulation, result in zip(job.rows, simulations, results, strict=True):
        hub = simulation.world.hub
        runs.append(
            Run(
                row=row,
                seed=job.seed,
                loss=statistics.fmean(problem.validation_loss(parameters) for parameters in result.parameters),
                spread=mixing.spread(result.parameters),
                sent_bytes=statistics.fmean(result.sent_bytes),
                resent=hub.resent_blocks / max(1, hub.modular_blocks),
            )
        )
    return runs


def _progress(job: Job) -> Listener:
    """Tells now and then how far a job is, on stderr: it may take long."""
    began = time.monotonic()
    told: set[int] = set()

    def listen(peer: str, now_s: float, event: Event) -> None:
        if isinstance(event, Round) and (event.round + 1) % 20 == 0 and event.round not in told:
            told.add(event.round)
            took_s = time.monotonic() - began
            sys.stderr.write(f"seed {job.seed}, {len(job.rows)} rows: {event.round + 1} rounds in {took_s:.0f} s\n")

    return listen


def run_all(todo: Sequence[Job], processes: int) -> Iterator[tuple[Job, list[Run], float]]:
    """Runs jobs, each as it ends, with the seconds since the beginning."""
    began = time.monotonic()
    if processes == 1:
        for job in todo:
            yield job, run(job), time.monotonic() - began
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(run, job): job for job in todo}
        for future in as_completed(running):
            yield running[future], future.result(), time.monotonic() - began


@dataclass(frozen=True, slots=True)
class Line:
    """One row over all seeds."""

    row: str
    losses: tuple[float, ...]
    loss_ratio: float
    """To the reference's, minus 1: mean over seeds of the ratio at equal seeds."""
    loss_ratios: tuple[float, ...]
    sent_megabytes: float
    """Per worker, mean."""
    bytes_ratio: float
    """To the reference's."""
    resent: float
    spread: float


def table(runs: Sequence[Run]) -> list[Line]:
    """One line for each row that ran; a row's reference must have run with its seeds."""
    lines = []
    for row in ROWS:
        own = {each.seed: each for each in runs if each.row == row}
        others = {each.seed: each for each in runs if each.row == reference(row)}
        seeds = sorted(own.keys() & others.keys())
        if not seeds:
            continue
        ratios = [own[seed].loss / others[seed].loss - 1 for seed in seeds]
        lines.append(
            Line(
                row=row,
                losses=tuple(own[seed].loss for seed in seeds),
                loss_ratio=statistics.fmean(ratios),
                loss_ratios=tuple(ratios),
                sent_megabytes=statistics.fmean(own[seed].sent_bytes for seed in seeds) / 1e6,
                bytes_ratio=statistics.fmean(own[seed].sent_bytes / others[seed].sent_bytes for seed in seeds),
                resent=statistics.fmean(own[seed].resent for seed in seeds),
                spread=statistics.fmean(own[seed].spread for seed in seeds),
            )
        )
    return lines


def text(lines: Sequence[Line]) -> str:
    """The table, to be read."""
    head = f"{'row':27} {'loss, by seed':>24} {'loss':>8} {'MB/worker':>10} {'bytes':>7} {'resent':>7} {'spread':>8}"
    body = [
        f"{line.row:27} {' '.join(f'{loss:.4f}' for loss in line.losses):>24} {line.loss_ratio:+8.2%} "
        f"{line.sent_megabytes:10.2f} {line.bytes_ratio:7.3f} {line.resent:7.2%} {line.spread:8.4f}"
        for line in lines
    ]
    return "\n".join([head, *body])


def bars(lines: Sequence[Line]) -> list[Bar]:
    """What the rows are held to."""
    by_row = {line.row: line for line in lines}
    return [
        Bar("three_mixes_modular4_loss", by_row[CHEAP].loss_ratio, 0.005, at_least=False),
        Bar("three_mixes_modular4_bytes", by_row[CHEAP].bytes_ratio, 0.25, at_least=False),
        Bar("modular8_loss", by_row["2-peer, modular8"].loss_ratio, 0.002, at_least=False),
        Bar("modular4_loss", by_row["2-peer, modular4"].loss_ratio, 0.005, at_least=False),
    ]


def figures(runs: Sequence[Run], rounds: int, seconds: float) -> dict[str, object]:
    """Everything, fit for JSON."""
    recipe = recipe_of(PLAIN, 0, rounds)
    return {
        "rounds": rounds,
        "workers": WORKERS,
        "local_steps": recipe.local_steps,
        "momentum": MOMENTUM,
        "model": recipe.model.model_dump(mode="json"),
        "inner": recipe.inner.model_dump(mode="json"),
        "seconds": seconds,
        "loss_runs": [asdict(each) for each in runs],
        "loss_table": [asdict(line) for line in table(runs)],
    }


def save(path: Path, values: Mapping[str, object]) -> None:
    """What is known so far, so that a run that is interrupted leaves it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=1) + "\n")
