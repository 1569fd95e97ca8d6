"""`gasloc simulate`: many workers in one process, under virtual time."""

import json as jsonlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gasloc.commands import options
from gasloc.loading import loading
from gasloc.run_folder import default_path

if TYPE_CHECKING:
    from gasloc.recipe import Recipe

_EACH = "One value for all workers, or one a worker, separated by commas."


def simulate(
    workers: Annotated[
        int, typer.Option("--workers", envvar="GASLOC_WORKERS", min=1, max=4096, help="How many workers.")
    ] = 8,
    dir: options.Dir = None,
    recipe: options.RecipeName = None,
    rounds: options.Rounds = None,
    local_steps: options.LocalSteps = None,
    topology: options.Topology = None,
    seed: options.Seed = None,
    mixes: Annotated[
        int | None, typer.Option("--mixes", envvar="GASLOC_MIXES", help="Mixes a round (k), over the recipe's.")
    ] = None,
    fragments: Annotated[
        int | None,
        typer.Option("--fragments", envvar="GASLOC_FRAGMENTS", help="Parts of the model (P), over the recipe's."),
    ] = None,
    quorum: Annotated[
        int | None,
        typer.Option("--quorum", envvar="GASLOC_QUORUM", help="Learners that the syncer waits for (K)."),
    ] = None,
    graph: Annotated[
        str | None,
        typer.Option("--graph", envvar="GASLOC_GRAPH", help="Graph of dadam and local-dadam: ring, exponential, ..."),
    ] = None,
    pacing: Annotated[
        bool | None,
        typer.Option(
            "--pacing/--no-pacing", envvar="GASLOC_PACING", help="Whether slow workers take fewer local steps a round."
        ),
    ] = None,
    step_time: Annotated[
        str, typer.Option("--step-time", envvar="GASLOC_STEP_TIME", help=f"Seconds of a local step. {_EACH}")
    ] = "1",
    bandwidth: Annotated[
        str, typer.Option("--bandwidth", envvar="GASLOC_BANDWIDTH", help=f"Bytes a second, each way. {_EACH}")
    ] = "inf",
    latency: Annotated[
        str, typer.Option("--latency", envvar="GASLOC_LATENCY", help=f"One-way delay of a link, seconds. {_EACH}")
    ] = "0",
    mtbf: Annotated[
        str, typer.Option("--mtbf", envvar="GASLOC_MTBF", help=f"Mean seconds between failures. {_EACH}")
    ] = "inf",
    mttr: Annotated[
        str, typer.Option("--mttr", envvar="GASLOC_MTTR", help=f"Mean seconds until a repair. {_EACH}")
    ] = "60",
    join: Annotated[
        str, typer.Option("--join", envvar="GASLOC_JOIN", help=f"Second at which a worker joins. {_EACH}")
    ] = "0",
    cut: Annotated[
        list[str] | None,
        typer.Option(
            "--cut",
            envvar="GASLOC_CUT",
            metavar="FROM-TO:WORKERS",
            help="Seconds in which the workers of these numbers reach nobody but each other, such as 60-300:5,6; "
            "may be given again.",
        ),
    ] = None,
    data: options.Data = None,
    threads: options.Threads = 0,
    json: options.Json = False,
) -> None:
    """Simulate many workers in one process: the same algorithms, links and failures to order, virtual time."""
    changes: dict[str, object] = {
        "rounds": rounds,
        "local_steps": local_steps,
        "topology": topology,
        "seed": seed,
        "mixes": mixes,
        "fragments": fragments,
        "pacing": pacing,
    }
    chosen = _recipe(recipe, changes, quorum)
    with loading():
        from gasloc.simulation.conditions import conditions_of, numbers
        from gasloc.simulation.cut import cut_of

    conditions = conditions_of(
        workers,
        step_time_s=numbers("step-time", step_time),
        bandwidth=numbers("bandwidth", bandwidth),
        latency_s=numbers("latency", latency),
        mtbf_s=numbers("mtbf", mtbf),
        mttr_s=numbers("mttr", mttr),
        join_s=numbers("join", join),
    )
    cuts = tuple(cut_of(text) for text in cut or ())
    with loading():
        import torch

        from gasloc import corpus
        from gasloc.simulation.decoder import DecoderProblem
        from gasloc.simulation.record import Record
        from gasloc.simulation.run import Simulation, Variant

    if threads:
        torch.set_num_threads(threads)
    began = time.monotonic()
    simulation = Simulation(
        chosen,
        DecoderProblem(chosen, corpus.load(data or chosen.data)),
        conditions,
        variant=Variant(graph=graph, cuts=cuts),
    )
    folder = dir or default_path(time.time())
    record = Record(folder, workers, echo=_echo_json if json else _echo_plain)
    try:
        result = simulation.run(record.listen)
    finally:
        record.close()
    _show(record.finish(chosen, result, time.monotonic() - began), folder, json=json)


def _recipe(name: str | None, changes: dict[str, object], quorum: int | None) -> "Recipe":
    from gasloc.recipe import load, override

    loaded = load(name or "tiny")
    if quorum is not None:
        changes = changes | {"syncer": loaded.syncer.model_dump(mode="json") | {"quorum": quorum}}
    return override(loaded, changes)


def _echo_json(worker: str, line: str) -> None:
    typer.echo(jsonlib.dumps({"worker": worker, **jsonlib.loads(line)}))


def _echo_plain(worker: str, line: str) -> None:
    record = jsonlib.loads(line)
    at = f"{record['time']:10.1f} s  {worker}"
    if record["event"] == "evaluation":
        typer.echo(f"{at}  after {record['round']} rounds: validation loss {record['validation_loss']:.4f}")
    elif record["event"] == "warning":
        typer.echo(f"{at}  {record['message']}")


def _show(values: dict[str, Any], folder: Path, *, json: bool) -> None:
    if json:
        typer.echo(jsonlib.dumps({"event": "summary", **values}))
        return
    from dataclasses import fields

    from gasloc import summary

    known = {field.name: values[field.name] for field in fields(summary.Summary)}
    for line in (*summary.lines(summary.Summary(**known)), f"simulated in     {values['wall_seconds']:.1f} s"):
        typer.echo(line)
    typer.echo("results:")
    for path in ("summary.json", "loss.png", "worker-*/events.jsonl"):
        typer.echo(f"  {folder}/{path}")
