"""Processes that benchmarks start: asked and answering in JSON, a line each, and gone afterwards, whatever happens.

A child ends as its stdin does. What it says is an answer to the next request that has none yet, or `{"report": ...}`.
"""

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil

Words = dict[str, Any]

_ANSWER_S = 600.0
_END_S = 15.0


class Child:
    """One process. Its threads are OpenMP's one, unless `environment` says otherwise."""

    def __init__(self, command: Sequence[str], log: int, environment: Mapping[str, str] | None = None) -> None:
        """Starts it; its stderr goes to `log`."""
        self.reports: list[Any] = []
        """What it reported so far, in order."""
        self._answers: queue.SimpleQueue[Words | None] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            start_new_session=True,  # Ctrl-C is ours: it ends as its stdin does
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def ask(self, request: Words) -> None:
        """Sends a request. Raises `RuntimeError` where it has ended."""
        assert self.process.stdin
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except OSError:
            raise RuntimeError(f"process {self.process.pid} has ended") from None

    def answer(self, timeout_s: float = _ANSWER_S) -> Words:
        """The next answer. Raises `RuntimeError` where it ends first, or none comes in time."""
        try:
            found = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise RuntimeError(f"process {self.process.pid} does not answer within {timeout_s:g} s") from None
        if found is None:
            raise RuntimeError(f"process {self.process.pid} ended early")
        return found

    def check(self) -> None:
        """Raises `RuntimeError` where it has ended."""
        if self.process.poll() is not None:
            raise RuntimeError(f"process {self.process.pid} ended early")

    def family(self) -> list[psutil.Process]:
        """The process and all that it started, as far as they run."""
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        return []

    def cpu_s(self) -> float:
        """CPU seconds of the family so far."""
        total = 0.0
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def release(self) -> None:
        """Once it has ended: waits for it and lets go of its output."""
        self.process.wait()
        self._reader.join(_END_S)
        if self.process.stdout and not self._reader.is_alive():
            self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("{"):  # libraries may print
                words = json.loads(line)
                if "report" in words:
                    self.reports.append(words["report"])
                else:
                    self._answers.put(words)
        self._answers.put(None)


class Nursery:
    """A folder, a log, and the children that share them. Made by `nursery`."""

    def __init__(self, folder: Path, log: int) -> None:
        self.folder = folder
        self.children: list[Child] = []
        self._log = log

    def start(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Child:
        """Starts one more."""
        child = Child(command, self._log, environment)
        self.children.append(child)
        return child

    def close(self) -> None:
        """Tells all to end, and ends those that do not, with all that they started."""
        families = [process for child in self.children for process in child.family()]
        for child in self.children:
            with contextlib.suppress(OSError):
                assert child.process.stdin
                child.process.stdin.close()
        _, alive = psutil.wait_procs(families, timeout=_END_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for child in self.children:
            child.release()


@contextlib.contextmanager
def nursery(name: str) -> Iterator[Nursery]:
    """A nursery; its children are ended and its folder is gone however the block is left.

    A `RuntimeError` passes on with the last words of the children. Folders of processes that were killed go as well.
    """
    _sweep(name)
    with (
        tempfile.TemporaryDirectory(prefix=f"gasloc-{name}-{os.getpid()}-") as folder,
        (Path(folder) / "log").open("w") as log,
    ):
        made = Nursery(Path(folder), log.fileno())
        try:
            yield made
        except RuntimeError as error:
            raise RuntimeError(f"{error}; the last words: {(Path(folder) / 'log').read_text()[-3000:]}") from None
        finally:
            made.close()


def _sweep(name: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"gasloc-{name}-*-*"):
        owner = folder.name.split("-")[-2]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def interrupt_on_signals() -> None:
    """Has SIGINT and SIGTERM raise `KeyboardInterrupt` once; another one does not disturb the clearing up."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt
