"""Hosts on a LAN, in network namespaces: what is printed can be dialled, and who cannot be dialled is not paired."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from peers.address import Reach, reach
from peers.identity import peer_id_of
from tests.namespaces import Lan, lan
from tests.processes import GaslocProcess, ProcessPool, Record
from tests.small_recipe import write_small_recipe

KNOCK = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 4999), 2).close()
except OSError:
    sys.exit(1)
"""
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

START_S = 120.0
# of one id p2pd dials all addresses together, and gives one reason for all
STRANGERS = [peer_id_of(bytes([number] * 32)) for number in range(3)]
SILENT = """
import socket, sys
with socket.create_server((sys.argv[1], 4999)) as server:
    print("listening", flush=True)
    while True:
        kept = server.accept()
"""


@pytest.fixture
def three() -> Iterator[Lan]:
    with lan(3) as made:
        yield made


LARGE = """
name = "large"
rounds = 12
local_steps = 2
data = "own"
[model]
dim = 256
layers = 2
hidden_dim = 1024
context_length = 32
[inner]
batch_size = 1
[exchange]
grace_s = 60.0
"""


def sent_by_interface(net: Lan, number: int) -> int:
    """Bytes that a host's interface has put on its cable so far."""
    words = [*net.inside(number), "cat", "/sys/class/net/eth0/statistics/tx_bytes"]
    return int(subprocess.run(words, check=True, capture_output=True, text=True, timeout=20).stdout)


def start(pool: ProcessPool, net: Lan, number: int) -> GaslocProcess:
    recipe = write_small_recipe(pool.folder, rounds=2000)
    words = ("--recipe", recipe, "--data", pool.folder / "text.txt", "--dir", pool.folder / "first")
    return pool.gasloc("start", *words, "--threads", "1", "--json", prefix=net.inside(number))


def join(pool: ProcessPool, net: Lan, number: int, address: str, *more: str) -> GaslocProcess:
    words = ("--peers", address, "--data", pool.folder / "text.txt", "--dir", pool.folder / f"peer-{number}")
    return pool.gasloc("join", *words, "--threads", "1", "--json", *more, prefix=net.inside(number))


def doctor(pool: ProcessPool, net: Lan, number: int, *words: str) -> tuple[int, list[Record]]:
    process = pool.gasloc("doctor", "--json", *words, prefix=net.inside(number))
    return process.wait(START_S), [json.loads(line) for line in process.output]


def stop_in_order(*processes: GaslocProcess) -> None:
    for process in processes:
        process.signal(signal.SIGINT)
    for process in processes:
        assert process.wait(30) == 0, process.errors


@pytest.fixture
def silent(three: Lan) -> Iterator[str]:
    """The address of a port on host 3 that accepts connections and says nothing."""
    command = [*three.inside(3), sys.executable, "-c", SILENT, three.ip(3)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        yield f"/ip4/{three.ip(3)}/tcp/4999/p2p/{STRANGERS[0]}"
        process.kill()


def test_a_default_start_prints_an_address_that_another_host_can_dial(
    pool: ProcessPool, three: Lan, silent: str
) -> None:
    bridge = three.add_bridge(1)
    first = start(pool, three, 1)
    listening = first.event("listening", START_S)
    addresses = listening["addresses"]
    assert addresses[0].startswith(f"/ip4/{three.ip(1)}/tcp/")
    assert listening["join"] == f"gasloc join --peers {addresses[0]}"
    assert not listening["local_only"]
    assert [a.split("/")[2] for a in addresses if reach(a) is not Reach.LOOPBACK][-1] == bridge
    assert not any("/tcp/0/" in address for address in addresses)

    closed = f"/ip4/{three.ip(1)}/tcp/1/p2p/{STRANGERS[1]}"
    wrong = addresses[0].replace(listening["peer"], STRANGERS[2])
    code, records = doctor(pool, three, 2, "--peers", f"{addresses[0]},{closed},{wrong},{silent}")
    assert code == 1
    said = [record["text"] for record in records if record["check"] == "peer"]
    assert said == [
        f"{addresses[0]} answers",
        f"{closed}: connection refused",
        f"{wrong}: answers with another id: {listening['peer']}",
        f"{silent}: silent for 5 s",
    ]
    (dialback,) = [record for record in records if record["check"] == "dial-back"]
    assert dialback["ok"], dialback
    assert {record["check"] for record in records if not record["ok"]} == {"peer"}

    code, records = doctor(pool, three, 2, "--peers", addresses[0], "--host", "127.0.0.1")
    assert code == 1
    (failed,) = [record for record in records if not record["ok"]]
    assert failed["check"] == "dial-back"
    assert failed["text"] == f"this peer listens on this machine only, and others see it at {three.ip(2)}"
    stop_in_order(first)


def test_two_that_cannot_be_dialled_are_never_paired_and_say_why(pool: ProcessPool, three: Lan) -> None:
    first = start(pool, three, 1)
    address = first.event("listening", START_S)["addresses"][0]
    clients = [join(pool, three, number, address, "--host", "127.0.0.1") for number in (2, 3)]
    ids = [client.event("run_started", START_S)["peer"] for client in clients]
    for client, other in zip(clients, reversed(ids), strict=True):
        client.event("warning", START_S, lambda record: "others cannot dial this peer" in record["message"])
        said = client.event("warning", START_S, lambda record: "not paired with" in record["message"])
        assert said["message"] == f"not paired with {other}: neither can be dialled, and no relay carries both"
        client.event("round", START_S, lambda record: record["mixed"])
    stop_in_order(first, *clients)
    for client, other in zip(clients, reversed(ids), strict=True):
        told = client.events.index(client.event("warning", 1, lambda record: "not paired" in record["message"]))
        assert all(other not in record["partners"] for record in client.of("round"))
        assert not any(
            other in record["partners"] for record in client.events[told:] if record["event"] == "exchange_started"
        )
    assert any(set(record["partners"]) & set(ids) for record in first.of("round"))


def test_what_rounds_say_they_sent_is_what_the_interface_sent(pool: ProcessPool, three: Lan) -> None:
    write_small_recipe(pool.folder)
    recipe = pool.folder / "large.toml"
    recipe.write_text(LARGE)
    data = ("--data", pool.folder / "text.txt", "--threads", "1", "--json", "--wait-for", "2")
    first = pool.gasloc("start", "--recipe", recipe, "--dir", "first", *data, prefix=three.inside(1))
    address = first.event("listening", START_S)["addresses"][0]
    second = pool.gasloc("join", "--peers", address, "--dir", "second", *data, prefix=three.inside(2))
    for process in (first, second):
        process.event("finished", START_S)
        assert process.wait(30) == 0, process.errors
    for number, process in ((1, first), (2, second)):
        told = sum(record["bytes_sent"] for record in process.of("round"))
        assert told > 4 * 2_000_000 * 4, "some rounds should have mixed"
        counted = sent_by_interface(three, number)
        assert 0.95 < told / counted < 1.0, f"{told} bytes are told, {counted} were sent"


def test_a_cut_lets_nothing_across_until_it_is_healed(three: Lan) -> None:
    def reaches(one: int, other: int) -> bool:
        words = [*three.inside(one), sys.executable, "-c", KNOCK, three.ip(other)]
        return subprocess.run(words, timeout=30).returncode == 0

    command = [*three.inside(1), sys.executable, "-c", SILENT, three.ip(1)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        assert reaches(2, 1)
        three.cut([2])
        assert not reaches(2, 1)
        assert reaches(3, 1)
        three.heal()
        assert reaches(2, 1)
        process.kill()


def test_a_link_has_the_width_that_it_is_given(three: Lan) -> None:
    for mbit_per_s in (16, 8):
        three.shape(1, mbit_per_s)
        shown = subprocess.run(
            [*three.inside(1), "tc", "qdisc", "show", "dev", "eth0"], capture_output=True, text=True, check=True
        )
        assert "qdisc tbf" in shown.stdout
        assert f"rate {mbit_per_s}Mbit" in shown.stdout


def test_namespaces_of_a_killed_process_are_swept_with_what_runs_inside() -> None:
    script = """
import signal, subprocess
from benchmarks.namespaces import Lan
with Lan(1) as made:
    inside = subprocess.Popen([*made.inside(1), "sleep", "600"], start_new_session=True)
    print(made.inside(1)[-1], inside.pid, flush=True)
    signal.pause()
"""
    with lan(1):
        pass  # or the test is skipped
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        name, pid = killed.stdout.readline().split()
        killed.kill()
        killed.wait(30)
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        assert name in listed
        with lan(1):
            listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
            assert name not in listed
            assert not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
