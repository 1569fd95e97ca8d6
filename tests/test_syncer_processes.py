"""A syncer and its learners as real processes, with real p2pd daemons on loopback."""

import json
import signal
import time
from pathlib import Path
from statistics import mean

import pytest

from gasloc.events import read_events
from tests.processes import GaslocProcess, ProcessPool, Record
from tests.small_recipe import write_small_recipe

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]

START_S = 60.0
LOCAL = ("--host", "127.0.0.1", "--threads", "1", "--json")


def write_recipe(folder: Path, *, rounds: int, quorum: int) -> Path:
    path = write_small_recipe(folder, rounds=rounds)
    path.write_text(f"{path.read_text()}[syncer]\nquorum = {quorum}\n")
    return path


def syncer(pool: ProcessPool, *, rounds: int = 2000, quorum: int = 2) -> GaslocProcess:
    path = write_recipe(pool.folder, rounds=rounds, quorum=quorum)
    return pool.gasloc("syncer", "--recipe", path, "--dir", pool.folder / "hub", *LOCAL)


def learner(pool: ProcessPool, name: str, address: str, *more: str) -> GaslocProcess:
    return pool.gasloc(
        "join", "--peers", address, "--data", pool.folder / "text.txt", "--dir", pool.folder / name, *LOCAL, *more
    )


def hub_and_two(pool: ProcessPool) -> tuple[GaslocProcess, list[GaslocProcess]]:
    """A syncer and two learners, each of which has had a merge."""
    hub = syncer(pool)
    two = [learner(pool, f"learner-{number}", address_of(hub), "--wait-for", "3") for number in range(2)]
    for process in two:
        merged_after(process, 0.0)
    return hub, two


def address_of(process: GaslocProcess) -> str:
    listening = process.event("listening", START_S)
    address = listening["addresses"][0]
    assert listening["join"] == f"gasloc join --peers {address}"
    assert isinstance(address, str)
    return address


def id_of(process: GaslocProcess) -> str:
    return str(process.event("listening", START_S)["peer"])


def after(process: GaslocProcess, name: str) -> float:
    """Unix seconds of the last event of that name; 0 where there is none yet."""
    return max((float(record["time"]) for record in process.of(name)), default=0.0)


def next_merge(hub: GaslocProcess, *learners: GaslocProcess, without: str = "") -> Record:
    """A merge that is yet to come, of some of these learners alone."""
    seen, ids = after(hub, "merge"), {id_of(process) for process in learners}
    return hub.event(
        "merge",
        START_S,
        lambda record: record["time"] > seen and set(record["learners"]) <= ids and without not in record["learners"],
    )


def merged_after(process: GaslocProcess, time: float) -> Record:
    """A round of a learner that ended after `time`, with a merge."""
    return process.event("round", START_S, lambda record: record["mixed"] and record["time"] > time)


def stop_in_order(processes: list[GaslocProcess]) -> None:
    for process in processes:
        process.signal(signal.SIGINT)
    for process in processes:
        assert process.wait(20) == 0, process.errors
        assert process.events[-1]["event"] == "stopped", process.events[-1]


def test_a_learner_dies_and_is_left_out_and_another_joins_with_no_pause_for_the_rest(pool: ProcessPool) -> None:
    hub = syncer(pool)
    address = address_of(hub)
    three = [learner(pool, f"learner-{number}", address, "--wait-for", "4") for number in range(3)]
    for process in three:
        entered = process.event("joined", START_S)
        assert (entered["source"], entered["round"]) == ("donor", 0)
        merged_after(process, 0.0)
    first = next_merge(hub, *three)
    assert len(first["learners"]) >= 2
    assert sum(first["shares"]) == pytest.approx(1.0)

    victim, survivors = three[0], three[1:]
    dead = id_of(victim)
    victim.signal(signal.SIGKILL)
    victim.wait(10)
    # its last report may still be merged once: all of it had come
    next_merge(hub, *survivors, without=dead)
    died = max(after(process, "round") for process in survivors)
    for process in survivors:
        merged_after(process, died)

    late = learner(pool, "late", address)
    entered = late.event("joined", START_S)
    assert entered["source"] == "donor"
    assert entered["round"] >= 1
    came = float(late.event("run_started", START_S)["time"])
    hub.event("merge", START_S, lambda record: id_of(late) in record["learners"])
    for process in survivors:
        merged_after(process, came)
        waits = [record["exchange_s"] for record in process.of("round")]
        assert max(waits) == 0.0, "a learner never waits"

    for process in survivors:
        process.event("round", START_S, lambda record: record["round"] >= 20)
        losses = [record["loss"] for record in process.of("round")]
        assert mean(losses[-3:]) < mean(losses[:3]) - 0.5
    assert late.of("round")[0]["loss"] < survivors[0].of("round")[0]["loss"] - 0.3, "it starts from what was learned"
    stop_in_order([*survivors, late, hub])
    assert pool.leftovers() == []


def test_the_syncer_dies_and_comes_back_from_its_checkpoint_while_learners_train_on(pool: ProcessPool) -> None:
    hub, two = hub_and_two(pool)
    saved = hub.event("checkpoint", START_S, lambda record: record["round"] >= 1)
    versions = max(record["version"] for record in hub.of("merge"))
    hub.signal(signal.SIGKILL)
    hub.wait(10)
    died = time.time()

    def alone(record: Record) -> bool:
        return record["time"] > died and not record["mixed"] and "fragment 0: " in record["reason"]

    for process in two:  # rounds go on, and say why they are not merged
        process.event("round", START_S, alone)

    again = pool.gasloc("syncer", "--dir", pool.folder / "hub", *LOCAL)
    assert address_of(again) == address_of(hub), "the same identity at the same port"
    started = again.event("run_started", START_S)
    assert started["resumed"]
    assert started["round"] >= saved["round"]
    first = again.event("merge", START_S)
    assert first["version"] <= versions + 2, "it goes on from its own checkpoint"
    for process in two:
        merged_after(process, first["time"])
    stop_in_order([*two, again])
    assert pool.leftovers() == []


def test_only_the_syncers_p2pd_dies_and_it_merges_on(pool: ProcessPool) -> None:
    hub, two = hub_and_two(pool)
    (daemon,) = hub.daemons()
    daemon.kill()
    told = hub.event("warning", START_S, lambda record: "restarted in" in record["message"])
    merge = hub.event("merge", START_S, lambda record: record["time"] > told["time"])
    assert set(merge["learners"]) <= {id_of(process) for process in two}
    for process in two:
        merged_after(process, told["time"])
    assert len(hub.of("run_started")) == 1
    (again,) = hub.daemons()
    assert again.pid != daemon.pid
    stop_in_order([*two, hub])
    assert pool.leftovers() == []


def test_launched_together_they_merge_to_the_end_and_the_syncer_keeps_theta(pool: ProcessPool) -> None:
    # a round takes some 25 ms here: enough of them that both learners are there for most of the run
    path = write_recipe(pool.folder, rounds=200, quorum=2)
    run = pool.folder / "run"
    data = pool.folder / "text.txt"
    launch = pool.gasloc(
        "launch", "--topology", "syncer", "--workers", "2", "--dir", run, "--recipe", path, "--data", data
    )
    assert launch.wait(110) == 0, (launch.errors, launch.output[-5:])

    result = json.loads((run / "summary.json").read_text())
    assert (result["peers"], result["workers"], result["rounds"]) == (2, 2, 200)
    assert result["validation_loss_last"] < result["validation_loss_first"] - 0.5
    assert 0 <= result["replica_spread"] < 0.5
    for worker in sorted(run.glob("worker-*")):
        rounds = [event for event in read_events(worker / "events.jsonl") if event["event"] == "round"]
        assert any(event["mixed"] for event in rounds)
    of_syncer = read_events(run / "syncer" / "events.jsonl")
    assert any(event["event"] == "merge" and len(event["learners"]) == 2 for event in of_syncer)
    ended = of_syncer[-1]
    assert (ended["event"], ended["round"]) == ("finished", 200)
    assert (run / "syncer" / "model.safetensors").stat().st_size > 10_000
    assert not any("syncer" in line and "ended" in line for line in launch.output)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("launch", "--topology", "syncer", "--workers", "2"), "syncer.quorum = 3 with --workers 2"),
        (("start", "--topology", "syncer"), "its syncer begins the run, with 'gasloc syncer'"),
    ],
)
def test_wrong_use_is_one_plain_line(pool: ProcessPool, arguments: tuple[str, ...], words: str) -> None:
    path = write_recipe(pool.folder, rounds=3, quorum=3)
    process = pool.gasloc(*arguments, "--recipe", path, "--dir", pool.folder / "wrong")
    assert process.wait(START_S) == 2
    assert len(process.errors) == 1
    assert words in process.errors[0]


def test_a_folder_of_another_kind_is_refused(pool: ProcessPool) -> None:
    path = write_recipe(pool.folder, rounds=3, quorum=1)
    folder = pool.folder / "gossip"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"run": "tiny-1", "digest": "d", "recipe": {"name": "tiny"}}))
    process = pool.gasloc("syncer", "--recipe", path, "--dir", folder)
    assert process.wait(START_S) == 2
    assert "the folder holds a run with" in process.errors[0]
