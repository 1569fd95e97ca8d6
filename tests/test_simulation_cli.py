"""`gasloc simulate` from the command line."""

import json
from pathlib import Path

import pytest

from gasloc import cli
from tests.small_recipe import write_small_recipe


def arguments(folder: Path, *more: str) -> list[str]:
    recipe = write_small_recipe(folder, rounds=2, local_steps=3)
    text = str(folder / "text.txt")
    return ["simulate", "--recipe", str(recipe), "--data", text, "--dir", str(folder / "run"), *more]


def test_a_run_leaves_events_models_summary_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.run(
        arguments(
            tmp_path, "--workers", "3", "--seed", "5", "--step-time", "1,1,2", "--bandwidth", "1e6", "--threads", "1"
        )
    )
    assert code == 0
    assert "validation loss" in capsys.readouterr().out
    values = json.loads((tmp_path / "run" / "summary.json").read_text())
    wanted = {"validation_loss_first", "validation_loss_last", "mixed_share", "replica_spread", "rounds", "peers"}
    assert wanted | {"tokens", "seconds", "wall_seconds", "bytes_sent_per_worker"} <= values.keys()
    assert values["seconds"] > 6
    assert len(values["bytes_sent_per_worker"]) == 3
    assert (tmp_path / "run" / "worker-2" / "model.safetensors").exists()
    assert cli.run(arguments(tmp_path, "--workers", "3")) == 2
    assert "choose another --dir" in capsys.readouterr().err


def test_json_is_one_object_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments(tmp_path, "--workers", "2", "--topology", "syncer", "--json")) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert records[-1]["event"] == "summary"
    assert {record["worker"] for record in records[:-1]} == {"worker-0", "worker-1"}
    times = [record["time"] for record in records[:-1]]
    assert times == sorted(times)


def test_workers_that_are_cut_off_mix_with_nobody_until_it_heals(tmp_path: Path) -> None:
    assert cli.run(arguments(tmp_path, "--workers", "3", "--rounds", "4", "--cut", "0-7:2", "--cut", "0-7:0")) == 0
    lines = (tmp_path / "run" / "worker-2" / "events.jsonl").read_text().splitlines()
    rounds = [event for event in map(json.loads, lines) if event["event"] == "round"]
    assert [event["mixed"] for event in rounds if event["time"] < 7] == [False, False]
    assert all(event["mixed"] for event in rounds if event["time"] > 7)


def test_two_runs_with_one_seed_leave_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    more = ("--workers", "3", "--mtbf", "5", "--mttr", "2", "--latency", "0.1", "--bandwidth", "1e6")
    for folder in (tmp_path / "a", tmp_path / "b"):
        assert cli.run(arguments(folder, *more)) == 0
    for number in range(3):
        for name in ("events.jsonl", "model.safetensors"):
            left, right = (tmp_path / side / "run" / f"worker-{number}" / name for side in "ab")
            assert left.read_bytes() == right.read_bytes()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--topology", "star"], "star"),
        (["--topology", "syncer", "--quorum", "4"], "quorum = 4 with 3 learners"),
        (["--fragments", "4"], "fragments 4 is more than local_steps 3"),
        (["--local-steps", "50", "--fragments", "40"], "a model of"),
        (["--mixes", "0"], "mixes"),
        (["--mixes", "2", "--topology", "ddp"], "mixes = 2"),
        (["--step-time", "0"], "step_time_s 0"),
        (["--step-time", "1,2"], "--step-time has 2 values for 3 workers"),
        (["--bandwidth", "-1"], "bandwidth -1"),
        (["--bandwidth", "fast"], "'fast' is not a number"),
        (["--latency", "-1"], "latency_s -1"),
        (["--mtbf", "0"], "mtbf_s 0"),
        (["--mttr", "nan"], "mttr_s nan"),
        (["--workers", "0"], "workers"),
        (["--graph", "ring"], "--graph ring"),
        (["--cut", "60-300"], "--cut '60-300' is not FROM-TO:WORKERS"),
        (["--cut", "60:1"], "--cut '60:1' is not FROM-TO:WORKERS"),
        (["--cut", "60-300:one"], "--cut '60-300:one' is not FROM-TO:WORKERS"),
        (["--cut", "9-3:1"], "a cut from 9 s to 3 s"),
        (["--cut", "1-3:3"], "names worker 3, but there are 3 workers"),
        (["--topology", "dadam", "--graph", "star"], "star"),
    ],
)
def test_bad_input_is_one_plain_line_and_nothing_starts(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = [] if "--workers" in flags else ["--workers", "3"]
    assert cli.run(arguments(tmp_path, *workers, *flags)) == 2
    told = capsys.readouterr().err.strip()
    assert words in told
    assert "\n" not in told
    assert not (tmp_path / "run").exists()
