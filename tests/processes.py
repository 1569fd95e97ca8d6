"""Real gasloc processes for tests: started, read by their events, and checked to leave nothing behind.

Waits are on events with deadlines, never on time.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from gasloc.events import read_events

T = TypeVar("T")
Record = dict[str, Any]
SOCKETS = Path("/tmp")


class GaslocProcess:
    """One `python -m gasloc ...`; its standard output is read as events where it is JSON."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        environment: dict[str, str],
        cwd: Path,
        fellows: "list[GaslocProcess]",
        prefix: Sequence[str] = (),
    ) -> None:
        self.arguments = arguments
        self.fellows = fellows
        variables = {name: value for name, value in os.environ.items() if not name.startswith("GASLOC_")}
        self.events: list[Record] = []
        self.output: list[str] = []
        self.errors: list[str] = []
        self._changed = threading.Condition()
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "gasloc", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=variables | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | environment,
            cwd=cwd,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._readers = [
            threading.Thread(target=self._read_output, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def event(self, name: str, timeout_s: float, where: Callable[[Record], bool] = lambda record: True) -> Record:
        """The first event of that name for which `where` holds; waits for it. Fails if the process ends first."""
        return self._wait(lambda: self._first(name, where), timeout_s, f"event '{name}'")

    def line(self, start: str, timeout_s: float) -> str:
        """The first line on standard output that begins so; waits for it."""
        return self._wait(lambda: next((x for x in self.output if x.startswith(start)), None), timeout_s, start)

    def of(self, name: str) -> list[Record]:
        """All events of that name so far."""
        with self._changed:
            return [record for record in self.events if record["event"] == name]

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def signal_until_gone(self, number: int, timeout_s: float) -> int:
        """Sends a signal again and again until the process has ended; returns the exit code.

        Two signals sent at once may be taken as one.
        """
        deadline = time.monotonic() + timeout_s
        while self.code() is None:
            assert time.monotonic() < deadline, f"still there after {timeout_s} s; {self.describe()}"
            os.kill(self.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.1)
        return self.wait(5)

    def wait(self, timeout_s: float) -> int:
        """The exit code; all output has been read then."""
        code = self._process.wait(timeout_s)
        for reader in self._readers:
            reader.join(5)
        return code

    def daemons(self) -> list[psutil.Process]:
        """The p2pd processes that it started and that run now."""
        try:
            children = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [child for child in children if _is_p2pd(child)]

    def stop(self) -> None:
        """Ends it, whatever state it is in."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(10)
        for reader in self._readers:
            reader.join(5)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def describe(self) -> str:
        """How far it is, for a failing test; and its fellows."""
        return "\n".join(
            f"{' '.join(other.arguments)}: code {other.code()}, "
            f"{[(record['event'], record.get('message')) for record in other.events[-6:]]}, "
            f"errors {other.errors[-3:]}"
            for other in self.fellows
        )

    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def _first(self, name: str, where: Callable[[Record], bool]) -> Record | None:
        return next((record for record in self.events if record["event"] == name and where(record)), None)

    def _wait(self, find: Callable[[], T | None], timeout_s: float, what: str) -> T:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                found = find()
                if found is not None:
                    return found
                left = deadline - time.monotonic()
                ended = self._process.poll() is not None and not self._readers[0].is_alive()
                if left <= 0 or ended:
                    when = "before it ended" if ended else f"within {timeout_s} s"
                    pytest.fail(f"no {what} {when}; {self.describe()}", pytrace=True)
                self._changed.wait(min(left, 0.5))

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.output.append(line.rstrip("\n"))
                if line.startswith("{"):
                    self.events.append(json.loads(line))
                self._changed.notify_all()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.errors.append(line.rstrip("\n"))


class ProcessPool:
    """Starts processes in one folder, and at the end fails if any left a p2pd or a socket behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[GaslocProcess] = []

    def gasloc(
        self, *arguments: str | Path, environment: dict[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> GaslocProcess:
        """Starts `gasloc` with these arguments; `prefix`: a command that executes it, such as `ip netns exec`."""
        process = GaslocProcess(
            [str(argument) for argument in arguments],
            environment=environment or {},
            cwd=self.folder,
            fellows=self._started,
            prefix=prefix,
        )
        self._started.append(process)
        return process

    def close(self) -> None:
        """Ends what still runs."""
        for process in self._started:
            process.stop()

    def check_nothing_left(self, timeout_s: float = 10.0) -> None:
        """Fails if a process or a socket of this pool's folder is still there after `timeout_s`.

        A p2pd needs some seconds to end by itself after its gasloc was killed.
        """
        deadline = time.monotonic() + timeout_s
        while left := self.leftovers():
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.05)

    def leftovers(self) -> list[str]:
        """What there is now: command lines that name our folder (p2pd has its key there), and our sockets."""
        pids = {process.pid for process in self._started}
        for path in self.folder.rglob("events.jsonl"):
            pids |= {int(record["pid"]) for record in read_events(path) if record["event"] == "run_started"}
        marks = tuple(f"hivemind-gasloc-{pid}-" for pid in pids)
        found = [path.name for path in SOCKETS.glob("hivemind-gasloc-*.sock") if path.name.startswith(marks)]
        for process in psutil.process_iter():
            try:
                line = " ".join(process.cmdline())
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
            if str(self.folder) in line and process.pid != os.getpid():
                found.append(line)
        return found


def _is_p2pd(process: psutil.Process) -> bool:
    try:
        return bool(process.name() == "p2pd")
    except psutil.NoSuchProcess:
        return False
