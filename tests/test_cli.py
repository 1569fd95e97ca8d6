"""The command line: quick help, and one plain line for whatever is wrong."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gasloc import cli
from gasloc.recipe import Recipe, load
from tests.processes import ProcessPool
from tests.small_recipe import write_small_recipe

HEAVY = ("torch", "hivemind", "numpy", "pydantic", "peers.node", "gasloc.trainer")
MALFORMED = "/ip4/127.0.0.1/tcp"
ABSENT_ID = "12D3KooWQYV9dGMFoRzNStwpXztXaBUtjPqi6aU76ZgUriHhKust"
GOOD = f"/ip4/127.0.0.1/tcp/1/p2p/{ABSENT_ID}"


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("GASLOC_"):
            monkeypatch.delenv(name)


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code of a command that fails and the one line that it wrote to stderr."""
    code = cli.run(arguments)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("gasloc: ")
    return code, lines[0].removeprefix("gasloc: ")


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from gasloc import cli; assert cli.run(['--help']) == 0\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]; assert not heavy, heavy"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)

    assert done.returncode == 0, done.stderr
    for command in ("start", "join", "launch", "status", "version", "recipe"):
        assert command in done.stdout
    # processor time, as other processes share the machine
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


@pytest.mark.parametrize("command", ["start", "join", "launch", "status", "recipe", "version"])
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([command, "--help"]) == 0
    assert "Usage: gasloc" in capsys.readouterr().out


def test_every_flag_has_the_variable_of_its_name() -> None:
    for parameter in cli.parameters():
        flag = parameter.opts[0]
        if flag.startswith("--"):
            assert parameter.envvar == "GASLOC_" + flag[2:].replace("-", "_").upper(), flag


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["version"]) == 0
    assert capsys.readouterr().out.startswith("gasloc 0.")


def test_recipe_check_tells_what_a_recipe_asks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["recipe", "check", "tiny"]) == 0
    out = capsys.readouterr().out
    for word in ("parameters", "memory", "sent a round", load("tiny").digest[:12]):
        assert word in out


def test_recipe_check_refuses_peers_that_drift_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "wild.toml"
    file.write_text('topology = "1-peer"\n[outer]\nlearning_rate = 1.0\nmomentum = 0.9\n')
    code, line = complaint(capsys, "recipe", "check", str(file))
    assert code == 2
    assert "drift apart" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["start", "--rounds", "0"], ["rounds = 0", "greater than or equal to 1"]),
        (["start", "--rounds", "many"], ["--rounds", "many", "integer"]),
        (["start", "--topology", "star"], ["topology = 'star'"]),
        (["start", "--recipe", "huge"], ["recipe 'huge'", "tiny"]),
        (["start", "--port", "99999"], ["--port", "99999"]),
        (["start", "--host", "localhost"], ["--host 'localhost'", "not an IP address"]),
        (["start", "--public-ip", "1.2.3"], ["--public-ip '1.2.3'"]),
        (["start", "--nonsense"], ["--nonsense"]),
        (["strat"], ["strat"]),
        (["join"], ["--peers is needed"]),
        (["status"], ["--peers is needed"]),
        (["join", "--peers", MALFORMED], [MALFORMED, "peer id"]),
        (["join", "--peers", f"{GOOD},{MALFORMED}"], [MALFORMED]),
        (["status", "--initial-peers", "10.0.0.1:31337"], ["10.0.0.1:31337", "must start with '/'"]),
        (["start", "--initial_peers", MALFORMED], [MALFORMED]),
        (["launch", "--workers", "0"], ["--workers", "0"]),
        (["recipe", "check", "huge"], ["recipe 'huge'"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_usage_is_one_line_and_code_2(
    arguments: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, line = complaint(capsys, *arguments)
    assert code == 2
    for word in words:
        assert word in line
    assert list(tmp_path.iterdir()) == [], "nothing may be made for a command that cannot run"


def test_a_recipe_file_with_an_unknown_value_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "typo.toml"
    file.write_text("[inner]\nlearning_rat = 0.1\n")
    code, line = complaint(capsys, "start", "--recipe", str(file))
    assert code == 2
    assert "inner.learning_rat = 0.1" in line


@pytest.mark.parametrize(
    ("name", "nearest"), [("GASLOC_PERS", "GASLOC_PEERS"), ("GASLOC_LOCALSTEPS", "GASLOC_LOCAL_STEPS")]
)
def test_an_unknown_variable_is_an_error_that_names_the_nearest(
    name: str, nearest: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    code, line = complaint(capsys, "version")
    assert code == 2
    assert line == f"environment variable {name} is not known; the nearest known one is {nearest}"


def test_a_variable_stands_for_its_flag(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GASLOC_ROUNDS", "0")
    code, line = complaint(capsys, "start")
    assert code == 2
    assert "rounds = 0" in line


@pytest.mark.parametrize("command", [["start"], ["join", "--peers", GOOD], ["launch"]], ids=str)
def test_a_folder_that_cannot_be_written_is_one_line(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    path = tmp_path / "file" / "run"
    code, line = complaint(capsys, *command, "--dir", str(path))
    assert code == 2
    assert line == f"folder '{path}' cannot be written: Not a directory"


def test_a_used_folder_is_not_given_another_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lay_down_card(tmp_path, load("tiny"))
    code, line = complaint(capsys, "start", "--dir", str(tmp_path), "--rounds", "31")
    assert code == 2
    assert "rounds = 30, not 31" in line


def lay_down_card(folder: Path, recipe: Recipe) -> None:
    """Makes `folder` one that holds a run."""
    from gasloc.run_folder import RunFolder, StoredCard

    run_folder = RunFolder(folder)
    run_folder.write_card(StoredCard(run="tiny-0123", digest=recipe.digest, document=recipe.model_dump_json().encode()))
    run_folder.close()


def test_a_folder_in_use_is_refused_with_the_process_that_uses_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from gasloc.run_folder import RunFolder

    held = RunFolder(tmp_path)
    code, line = complaint(capsys, "start", "--dir", str(tmp_path))
    held.close()
    assert code == 2
    assert f"in use by process {os.getpid()}" in line


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def limit_s() -> float:
    """20 s, or more where the machine is so busy that torch and hivemind alone take longer than 3 s to load."""
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", "import gasloc.worker"], check=True)
    return 20.0 * max(1.0, (time.monotonic() - begun) / 3.0)


@pytest.mark.processes
@pytest.mark.timeout(300)
class TestAddresses:
    """Each ends within 20 s with one line and without a p2pd, whatever the address."""

    @staticmethod
    def refused(pool: ProcessPool, limit_s: float, *arguments: str) -> tuple[int, str]:
        """Exit code and line of a command that must fail in time."""
        begun = time.monotonic()
        process = pool.gasloc(*arguments)
        code = process.wait(60)
        assert time.monotonic() - begun < limit_s
        assert len(process.errors) == 1, process.errors
        assert process.errors[0].startswith("gasloc: ")
        assert pool.leftovers() == []
        return code, process.errors[0]

    @pytest.mark.parametrize("command", ["join", "status"])
    def test_dead(self, pool: ProcessPool, limit_s: float, command: str) -> None:
        address = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{ABSENT_ID}"
        code, line = self.refused(pool, limit_s, command, "--initial_peers", address)
        assert code == 1
        assert address in line
        assert "connection refused" in line

    def test_a_port_that_accepts_and_says_nothing(self, pool: ProcessPool, limit_s: float) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{ABSENT_ID}"
            code, line = self.refused(pool, limit_s, "join", "--peers", address)
        assert code == 1
        assert address in line

    def test_wrong_peer_id_and_a_dead_one_beside_a_live_one(self, pool: ProcessPool, limit_s: float) -> None:
        recipe = write_small_recipe(pool.folder, rounds=3000)
        data = pool.folder / "text.txt"
        first = pool.gasloc(
            "start", "--recipe", recipe, "--data", data, "--host", "127.0.0.1", "--dir", "first", "--json"
        )
        live = first.event("listening", 60)["addresses"][0]
        wrong = live.split("/p2p/")[0] + f"/p2p/{ABSENT_ID}"
        dead = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{ABSENT_ID}"

        begun = time.monotonic()
        process = pool.gasloc("join", "--peers", wrong)
        assert process.wait(60) == 1
        assert time.monotonic() - begun < limit_s
        assert len(process.errors) == 1, process.errors
        assert wrong in process.errors[0]
        assert "another id" in process.errors[0]
        assert process.daemons() == []

        # `--data` is missing, and the recipe wants each peer's own: an error after the network is up
        process = pool.gasloc("join", "--peers", live)
        assert process.wait(60) == 2
        assert process.errors == ["gasloc: this run trains on each peer's own text: give it with --data PATH"]

        both = pool.gasloc(
            "join", "--peers", f"{dead},{live}", "--data", data, "--host", "127.0.0.1", "--dir", "both", "--json"
        )
        warning = both.event("warning", 60)
        assert dead in warning["message"]
        assert "connection refused" in warning["message"]
        both.event("round", 60, lambda record: record["mixed"])

        status = pool.gasloc("status", "--peers", live, "--dir", "both", "--json")
        assert status.wait(60) == 0, status.errors
        (line,) = status.output
        told = json.loads(line)
        assert told["local"]["held"] == []
        assert {peer["peer"] for peer in told["peers"]} == {
            process.event("listening", 1)["peer"] for process in (first, both)
        }
        assert all(peer["state"] == "training" and peer["reachable"] for peer in told["peers"])
        seen = pool.gasloc("status", "--peers", live)
        assert seen.wait(60) == 0, seen.errors
        assert "2 peers" in seen.output[0]
        for process in (both, first):
            process.signal(signal.SIGINT)
            assert process.wait(20) == 0
