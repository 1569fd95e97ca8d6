"""`gasloc launch`: several peers on this machine."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from gasloc.events import read_events
from tests.processes import ProcessPool, Record
from tests.small_recipe import write_small_recipe

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

START_S = 120.0
"""Interpreters that load torch and hivemind: some seconds, much more where the machine is busy with others."""


def arguments(folder: Path, workers: int, rounds: int = 6, grace_s: float = 10.0) -> list[str | Path]:
    path = write_small_recipe(folder, rounds=rounds, grace_s=grace_s)
    data = folder / "text.txt"
    return ["launch", "--workers", str(workers), "--dir", folder / "run", "--recipe", path, "--data", data]


def by_worker(name: str) -> Callable[[Record], bool]:
    return lambda record: bool(record["worker"] == name)


def test_workers_train_together_to_a_summary_and_a_second_launch_repeats_it(pool: ProcessPool) -> None:
    launch = pool.gasloc(*arguments(pool.folder, 3))
    assert launch.wait(200) == 0, launch.errors

    result = json.loads((pool.folder / "run" / "summary.json").read_text())
    assert (result["peers"], result["workers"], result["rounds"]) == (3, 3, 6)
    assert result["validation_loss_last"] < result["validation_loss_first"] - 0.5
    assert result["mixed_share"] > 0.5
    assert 0 <= result["replica_spread"] < 0.5
    ends = [
        record
        for path in (pool.folder / "run").glob("worker-*/events.jsonl")
        for record in read_events(path)
        if record["event"] == "finished"
    ]
    assert (
        result["tokens"] == sum(record["tokens"] for record in ends) == sum(record["step"] for record in ends) * 4 * 32
    )
    assert (pool.folder / "run" / "loss.png").stat().st_size > 1000
    text = "\n".join(launch.output)
    assert str(pool.folder / "run" / "summary.json") in text
    assert "validation loss" in text
    runs = {
        record["run"]
        for path in (pool.folder / "run").glob("worker-*/events.jsonl")
        for record in read_events(path)
        if record["event"] == "run_started"
    }
    assert len(runs) == 1, "all workers are in one run"

    again = pool.gasloc("launch", "--dir", pool.folder / "run")
    assert again.wait(START_S) == 0
    assert "this run is finished" in again.output[0]
    assert any("validation loss" in line for line in again.output)


def test_interrupted_once_every_worker_saves_and_a_second_launch_goes_on(pool: ProcessPool) -> None:
    given = [*arguments(pool.folder, 2, rounds=40), "--json"]
    launch = pool.gasloc(*given)
    launch.event("round", START_S, lambda record: record["round"] >= 2)
    launch.signal(signal.SIGINT)

    assert launch.wait(20) == 0, launch.errors
    for name in ("worker-0", "worker-1"):
        events = read_events(pool.folder / "run" / name / "events.jsonl")
        assert [record["event"] for record in events[-2:]] == ["checkpoint", "stopped"]
    assert not (pool.folder / "run" / "summary.json").exists()
    pool.check_nothing_left()

    again = pool.gasloc(*given)
    resumed = [again.event("run_started", START_S, by_worker(name)) for name in ("worker-0", "worker-1")]
    assert all(record["resumed"] and record["round"] >= 2 for record in resumed)
    again.signal(signal.SIGINT)
    assert again.wait(20) == 0


def test_killed_without_warning_it_takes_its_workers_along(pool: ProcessPool) -> None:
    launch = pool.gasloc(*arguments(pool.folder, 2, rounds=400), "--json")
    launch.event("round", START_S)
    workers = psutil.Process(launch.pid).children()
    assert len(workers) == 2
    launch.signal(signal.SIGKILL)

    launch.wait(10)
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive
    pool.check_nothing_left()


def test_interrupted_twice_it_is_gone_at_once(pool: ProcessPool) -> None:
    launch = pool.gasloc(*arguments(pool.folder, 2, rounds=400), "--json")
    launch.event("round", START_S)
    launch.signal(signal.SIGINT)
    launch.event("launch", 10, lambda record: "stopping" in record["message"])

    # the second signal may come after the orderly end, which is quick
    assert launch.signal_until_gone(signal.SIGINT, 10) in (130, 0)
    pool.check_nothing_left()


def test_a_worker_that_dies_is_named_and_the_others_go_on(pool: ProcessPool) -> None:
    launch = pool.gasloc(*arguments(pool.folder, 3, rounds=12, grace_s=3), "--json")
    started = launch.event("run_started", START_S, by_worker("worker-2"))
    launch.event("round", START_S, by_worker("worker-2"))
    psutil.Process(started["pid"]).kill()

    ended = launch.event("launch", 20, lambda record: "worker-2" in record["message"])
    assert "was killed by SIGKILL" in ended["message"]
    assert launch.wait(120) == 0, launch.errors
    result = json.loads((pool.folder / "run" / "summary.json").read_text())
    assert (result["peers"], result["workers"]) == (2, 3)


def test_another_count_of_workers_is_refused(pool: ProcessPool) -> None:
    run = pool.folder / "run"
    for name in ("worker-0", "worker-1"):
        (run / name).mkdir(parents=True)
    document = {"run": "tiny-1", "digest": "d", "recipe": {"name": "tiny"}}
    (run / "run.json").write_text(json.dumps(document))

    launch = pool.gasloc("launch", "--dir", run, "--workers", "3")
    assert launch.wait(20) == 2
    assert launch.errors == [
        f"gasloc: folder '{run}' holds 2 workers, not 3: choose another --dir, or leave --workers out"
    ]
