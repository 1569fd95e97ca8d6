"""From `gasloc join` to the first local step, stage by stage: the small recipe, real processes on 127.0.0.1.

    python -m benchmarks.startup [--recipe NAME] [--repeats N] [--json FILE] [--strict]

One peer begins a run and trains it; then, one after another, newcomers join it, each in a fresh process that starts
with nothing. A stage ends with what the newcomer
tells or leaves behind, by the clock of this machine: its p2pd, the card in its folder, its events. The model and the
swarm are as the recipe says; rounds and batches are shorter, so that a state to give and the first step come soon.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import bars
from benchmarks.bars import Bar
from gasloc import recipe
from gasloc.events import read_events

LIMIT_S = 10.0
_END_S = 30.0
_LOOK_S = 0.05
_LOCAL_STEPS = 2
_ROUNDS = 10_000

Record = dict[str, Any]


@dataclass(frozen=True)
class Newcomer:
    """One peer that joined."""

    stages_s: dict[str, float]
    """In order."""
    cpu_s: float
    """Of its process, up to the end of its first round."""


def main() -> int:
    """Prints the table and the bars; 1 where a bar is short and that was to be strict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--recipe", default="small")
    parser.add_argument("--batch", type=int, default=2, help="instead of the recipe's: the first step is one of many")
    parser.add_argument("--repeats", type=int, default=3, help="newcomers, one after another")
    bars.add_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        recipe_path = folder / "recipe.toml"
        recipe_path.write_text(_shortened(options.recipe, options.batch))
        with _process("start", folder / "first", "--recipe", str(recipe_path)) as first:
            address = _event(first, folder / "first", "listening")["addresses"][0]
            _event(first, folder / "first", "round")
            newcomers = [_newcomer(folder / f"newcomer-{number}", address) for number in range(options.repeats)]

    write = sys.stdout.write
    write(f"recipe {options.recipe} with batches of {options.batch}; medians of {len(newcomers)} newcomers; ")
    write(f"{os.cpu_count()} processors, {os.getloadavg()[0]:.1f} processes wanted them in the last minute\n")
    for stage in newcomers[0].stages_s:
        write(f"{stage:44}{statistics.median(each.stages_s[stage] for each in newcomers):8.2f} s\n")
    total_s = statistics.median(sum(each.stages_s.values()) for each in newcomers)
    write(f"{'all':44}{total_s:8.2f} s\n")
    cpu_s = statistics.median(each.cpu_s for each in newcomers)
    write(f"{'CPU of the newcomer, first round and all':44}{cpu_s:8.2f} s\n")
    return bars.finish(
        [Bar("join_to_first_step_s", total_s, LIMIT_S, at_least=False)],
        {"newcomers": [asdict(each) for each in newcomers]},
        json_path=options.json,
        strict=options.strict,
    )


def _shortened(name: str, batch: int) -> str:
    """The recipe with short rounds, so that its first peer has a state to give soon; the model is as it was."""
    chosen = recipe.load(name)
    inner = chosen.inner.model_copy(update={"batch_size": batch})
    evaluation = chosen.evaluation.model_copy(update={"batches": 1})
    fragments = min(chosen.fragments, _LOCAL_STEPS)
    lines = [f'name = "{chosen.name}"', f'topology = "{chosen.topology}"', f"rounds = {_ROUNDS}"]
    lines += [f"local_steps = {_LOCAL_STEPS}", f"fragments = {fragments}", 'data = "stdlib"']
    sections = {"model": chosen.model, "inner": inner, "outer": chosen.outer, "exchange": chosen.exchange}
    for title, section in {**sections, "evaluation": evaluation}.items():
        lines += [f"[{title}]", *(f"{key} = {json.dumps(value)}" for key, value in section.model_dump().items())]
    return "\n".join(lines) + "\n"


def _newcomer(folder: Path, address: str) -> Newcomer:
    began = time.time()
    with _process("join", folder, "--peers", address) as child:
        daemon_began = _first_daemon(child)
        joined, started, round_ = (_event(child, folder, name) for name in ("joined", "run_started", "round"))
        carded = (folder / "run.json").stat().st_mtime
        used = psutil.Process(child.pid).cpu_times()
        evaluations = [each for each in read_events(folder / "events.jsonl") if each["event"] == "evaluation"]
    evaluated_s = sum(each["seconds"] for each in evaluations if each["time"] <= round_["time"] - round_["seconds"])
    entered = joined["time"] - joined["seconds"]
    stages = {
        "Python and imports": daemon_began - began,
        "p2pd, contact, the run's card": carded - daemon_began,
        "text and model": entered - carded,
        "entry: members, the state's download": joined["time"] - entered,
        "last preparations": started["time"] - joined["time"],
        "evaluation before the first step": evaluated_s,
        "the first local step": (round_["seconds"] - round_["exchange_s"]) / round_["local_steps"],
    }
    return Newcomer(stages, used.user + used.system)


@contextmanager
def _process(command: str, folder: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """One `gasloc start` or `join`; ended in good order afterwards."""
    child = subprocess.Popen(
        [sys.executable, "-m", "gasloc", command, "--dir", str(folder), "--host", "127.0.0.1", *arguments],
        stdout=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        yield child
    finally:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _event(child: "subprocess.Popen[str]", folder: Path, name: str) -> Record:
    """The first event of that name in the child's folder; waits for it."""
    path = folder / "events.jsonl"
    while child.poll() is None:
        records = read_events(path) if path.exists() else []
        found = next((record for record in records if record["event"] == name), None)
        if found is not None:
            return found
        time.sleep(_LOOK_S)
    raise SystemExit(f"gasloc ended before it told '{name}', see above")


def _first_daemon(child: "subprocess.Popen[str]") -> float:
    """When the child's first p2pd began, unix seconds; waits for it."""
    process = psutil.Process(child.pid)
    while child.poll() is None:
        began = [each.create_time() for each in process.children() if each.name() == "p2pd"]
        if began:
            return float(min(began))
        time.sleep(_LOOK_S)
    raise SystemExit("gasloc ended before it started p2pd, see above")


if __name__ == "__main__":
    sys.exit(main())
