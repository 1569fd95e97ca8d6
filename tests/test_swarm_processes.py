"""Real processes with real p2pd daemons on loopback."""

import signal
import socket
import time
from statistics import mean

import psutil
import pytest

from peers.membership import LIFE_S
from tests.conftest import wait_gone
from tests.processes import GaslocProcess, ProcessPool
from tests.small_recipe import write_small_recipe

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

START_S = 120.0
LOCAL = ("--host", "127.0.0.1", "--threads", "1", "--json")


def start(
    pool: ProcessPool, *more: str, rounds: int = 100_000, grace_s: float = 10.0, stale_rounds: int = 5
) -> GaslocProcess:
    path = write_small_recipe(pool.folder, rounds=rounds, grace_s=grace_s, stale_rounds=stale_rounds)
    return pool.gasloc(
        "start", "--recipe", path, "--data", pool.folder / "text.txt", "--dir", pool.folder / "first", *LOCAL, *more
    )


def join(pool: ProcessPool, name: str, address: str, *more: str) -> GaslocProcess:
    return pool.gasloc(
        "join", "--peers", address, "--data", pool.folder / "text.txt", "--dir", pool.folder / name, *LOCAL, *more
    )


def address_of(process: GaslocProcess) -> str:
    address = process.event("listening", START_S)["addresses"][0]
    assert isinstance(address, str)
    return address


def take(other: socket.socket, port: int) -> None:
    """Binds a port that a process is just losing."""
    deadline = time.monotonic() + 20
    while True:
        try:
            other.bind(("127.0.0.1", port))
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)  # the threads of a killed process end one after another, and nothing tells the last
        else:
            return


def stop_in_order(processes: list[GaslocProcess]) -> None:
    for process in processes:
        process.signal(signal.SIGINT)
    for process in processes:
        assert process.wait(20) == 0, process.errors
        assert process.events[-1]["event"] == "stopped"


def test_four_start_at_once_one_dies_in_an_exchange_and_a_fifth_joins_late(pool: ProcessPool) -> None:
    first = start(pool, "--wait-for", "4", grace_s=3)
    address = address_of(first)
    begun = time.monotonic()
    others = [join(pool, f"peer-{number}", address, "--wait-for", "4") for number in range(3)]
    assert time.monotonic() - begun < 1.0
    four = [first, *others]
    for process in four:
        process.event("round", START_S, lambda record: record["mixed"])

    # frozen as it begins an exchange, then killed: its partners are in the middle of theirs
    victim = others[0]
    victim.event("exchange_started", START_S, lambda record: record["partners"] and record["round"] >= 3)
    victim.signal(signal.SIGSTOP)
    seen = len(victim.events)
    dead = victim.event("listening", 1)["peer"]
    survivors = [first, others[1], others[2]]
    waiting = max(record["round"] for process in survivors for record in process.of("round"))
    survivors[0].event("round", START_S, lambda record: record["round"] > waiting)
    victim.signal(signal.SIGKILL)
    victim.wait(10)
    assert len(victim.events) <= seen + 2  # what was in the pipe

    after = max(record["round"] for process in survivors for record in process.of("round"))
    for process in survivors:
        process.event("round", START_S, lambda record: record["round"] > after + 1 and record["mixed"])

    fifth = join(pool, "late", address)
    entered = fifth.event("joined", START_S)
    assert entered["source"] == "donor"
    assert entered["round"] >= after
    fifth.event("round", START_S, lambda record: record["mixed"])

    everyone = [*survivors, fifth]
    ends = [process.event("round", START_S, lambda record: record["round"] >= 20) for process in everyone]
    for process in survivors:
        losses = [record["loss"] for record in process.of("round")]
        assert all(loss is not None for loss in losses)
        assert mean(losses[-3:]) < mean(losses[:3]) - 0.5
    assert fifth.of("round")[0]["loss"] < survivors[0].of("round")[0]["loss"] - 0.3, "it starts from what was learned"
    assert all(dead not in record["partners"] for record in ends)
    stop_in_order(everyone)


def test_a_joiner_needs_nothing_but_the_printed_command(pool: ProcessPool) -> None:
    first = pool.gasloc("start", "--dir", "one", "--host", "127.0.0.1", "--threads", "1")
    command = first.line("gasloc join --peers ", START_S)
    second = pool.gasloc(*command.removeprefix("gasloc ").split(), "--json")

    joined = second.event("joined", START_S)
    assert joined["members"] == 2
    second.event("round", START_S, lambda record: record["mixed"])
    stop_in_order([second])
    first.signal(signal.SIGINT)
    assert first.wait(20) == 0, first.errors
    assert any(line.startswith("stopped") for line in first.output)


def test_interrupted_once_nothing_is_left_and_the_port_is_free_again(pool: ProcessPool) -> None:
    first = start(pool)
    address = address_of(first)
    first.event("round", START_S)
    (daemon,) = first.daemons()
    begun = time.monotonic()
    stop_in_order([first])

    assert time.monotonic() - begun < 10
    assert not daemon.is_running()
    assert pool.leftovers() == []
    port = address.split("/tcp/")[1].split("/")[0]
    again = start(pool, "--port", port)
    assert f"/tcp/{port}/" in address_of(again)
    started = again.event("run_started", START_S)
    assert started["resumed"]
    assert started["step"] == first.events[-1]["step"]
    stop_in_order([again])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_told_to_stop_before_training_it_ends_in_good_order(pool: ProcessPool, number: signal.Signals) -> None:
    """While it waits for others that never come."""
    first = start(pool, "--wait-for", "3")
    first.event("run_started", START_S)
    first.signal(number)
    assert first.wait(15) == 0, first.errors
    assert [record["event"] for record in first.events[-2:]] == ["checkpoint", "stopped"]
    assert pool.leftovers() == []


def test_interrupted_twice_it_exits_at_once(pool: ProcessPool) -> None:
    first = start(pool, grace_s=60)
    second = join(pool, "second", address_of(first))
    second.event("round", START_S, lambda record: record["mixed"])
    daemons = first.daemons()
    # the orderly end is quick, and may come before the second signal does
    assert first.signal_until_gone(signal.SIGINT, 10) in (130, 0)
    psutil.wait_procs(daemons, timeout=5)
    stop_in_order([second])


def test_a_state_left_behind_is_not_forgotten(pool: ProcessPool) -> None:
    """The only trained peer leaves and comes back: a newcomer never begins from fresh weights."""
    first = start(pool)
    address_of(first)
    first.event("round", START_S, lambda record: record["round"] >= 3)
    stop_in_order([first])
    again = start(pool)
    late = join(pool, "late", address_of(again))
    joined = late.event("joined", START_S)
    assert joined["source"] == "donor"
    assert joined["round"] >= 3
    stop_in_order([again, late])


def test_a_peer_without_peers_flag_finds_the_swarm_again(pool: ProcessPool) -> None:
    first = start(pool)
    second = join(pool, "second", address_of(first))
    second.event("round", START_S, lambda record: record["mixed"])
    stop_in_order([second])
    again = pool.gasloc("join", "--dir", pool.folder / "second", "--data", pool.folder / "text.txt", *LOCAL)
    again.event("round", START_S, lambda record: record["mixed"])
    assert again.event("run_started", 1)["resumed"]
    stop_in_order([first, again])


def test_only_p2pd_dies_and_training_never_stops(pool: ProcessPool) -> None:
    # the others end some ten rounds a second meanwhile: of that alone nobody is to count as too old
    first = start(pool, grace_s=3, stale_rounds=500)
    address = address_of(first)
    second, third = (join(pool, name, address) for name in ("second", "third"))
    everyone = [first, second, third]
    for process in everyone:
        process.event("round", START_S, lambda record: record["mixed"])
    (dead,) = second.daemons()
    entries = len(second.of("joined"))
    me = second.event("listening", 1)
    dead.kill()
    told = second.event("warning", 30, lambda record: "restarted in" in record["message"])

    (daemon,) = second.daemons()
    assert daemon.pid != dead.pid
    port = me["addresses"][0].split("/tcp/")[1].split("/")[0]
    assert f"-hostAddrs=/ip4/127.0.0.1/tcp/{port}" in daemon.cmdline()
    second.event("round", START_S, lambda record: record["mixed"] and record["time"] > told["time"])
    for other in (first, third):
        other.event("round", START_S, lambda record: me["peer"] in record["partners"] and record["time"] > told["time"])
    rounds = [record["round"] for record in second.of("round")]
    assert rounds == sorted(set(rounds))
    assert len(second.of("joined")) == entries, "it takes nobody's state"
    assert not [record for record in second.of("warning") if "took the swarm's state" in record["message"]]
    stop_in_order(everyone)


def test_p2pd_that_cannot_be_started_again_ends_the_run_with_a_checkpoint(pool: ProcessPool) -> None:
    """Another program takes its port while it is down."""
    first = start(pool)
    port = int(address_of(first).split("/tcp/")[1].split("/")[0])
    first.event("round", START_S)
    (daemon,) = first.daemons()
    first.signal(signal.SIGSTOP)
    daemon.kill()
    wait_gone([daemon], 10)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        take(other, port)
        other.listen()
        first.signal(signal.SIGCONT)
        assert first.wait(60) == 1
    assert [record["event"] for record in first.events[-2:]] == ["checkpoint", "failed"]
    (line,) = first.errors
    assert line.startswith("gasloc: p2pd, the network daemon, ended 3 times within ")
    assert f"port {port} is already in use" in line
    assert pool.leftovers() == []


def test_a_peer_that_was_asleep_takes_the_swarms_state_before_it_mixes(pool: ProcessPool) -> None:
    """Python and its p2pd frozen for longer than a record's life; the others see it go, and come back."""
    first = start(pool, grace_s=2)
    address = address_of(first)
    sleeper, third = (join(pool, name, address) for name in ("sleeper", "third"))
    for process in (first, sleeper, third):
        process.event("round", START_S, lambda record: record["mixed"])
    me = sleeper.event("listening", 1)["peer"]
    frozen = [psutil.Process(sleeper.pid), *sleeper.daemons()]
    for process in frozen:
        process.suspend()
    asleep = time.time()
    third.event("round", START_S, lambda record: record["time"] > asleep + LIFE_S + 2)
    gone = [record for record in third.of("round") if record["time"] > asleep + LIFE_S + 1]
    assert all(me not in record["partners"] for record in gone)
    for process in frozen:
        process.resume()
    told = sleeper.event("warning", START_S, lambda record: "did not run for" in record["message"])
    caught_up = sleeper.event("warning", START_S, lambda record: "took the swarm's state" in record["message"])
    # a trade that was whole when it fell asleep is a trade of then, told of when it wakes
    under_way = max(record["round"] for record in sleeper.of("exchange_started") if record["time"] < asleep)
    mixed = sleeper.event(
        "round",
        START_S,
        lambda record: record["mixed"] and record["time"] > asleep + LIFE_S and record["round"] > under_way,
    )
    assert caught_up["time"] <= mixed["time"]
    assert mixed["round"] >= gone[-1]["round"] - 1, "nothing old is averaged as new"
    assert told["time"] - asleep < 60
    for other in (first, third):
        other.event("round", START_S, lambda record: me in record["partners"] and record["time"] > told["time"])
    stop_in_order([first, sleeper, third])
