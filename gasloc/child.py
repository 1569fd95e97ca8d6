"""A peer in a process of its own, started and read by `gasloc launch`."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gasloc import environment


@dataclass(frozen=True, slots=True)
class Message:
    """An event that a child printed."""

    child: str
    event: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ended:
    """A child is gone."""

    child: str
    code: int
    last_line: str
    """The last line that it wrote to stderr, or empty."""

    def in_words(self) -> str:
        """How it ended, fit for a log line."""
        how = f"was killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"ended with code {self.code}"
        return f"{self.child} {how}" + (f": {self.last_line}" if self.last_line else "")


class Child:
    """One `python -m gasloc ... --json --stop-on-eof`, in a session of its own.

    Ctrl-C in the terminal does not reach it; we pass it on. It stops in good order when its standard input
    ends, so it does not outlive us however we end.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        folder: Path,
        threads: int,
        messages: "queue.Queue[Message | Ended]",
    ) -> None:
        """Starts it. What it prints is put into `messages`, and at last how it ended."""
        self.name = name
        self._messages = messages
        self._errors_path = folder / "stderr.log"
        variables = environment.without_ours(os.environ.items()) | {"OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-m", "gasloc", *arguments, "--threads", str(threads), "--json", "--stop-on-eof"]
        folder.mkdir(parents=True, exist_ok=True)
        with self._errors_path.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=variables,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, name=name, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def interrupt(self) -> None:
        """Tells it once to stop; told again, it exits at once."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def wait_until(self, deadline: float) -> None:
        """Waits until it is gone, or `time.monotonic()` is past the deadline."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(deadline - time.monotonic(), 0.0))

    def kill(self) -> None:
        """Ends it without asking. Its p2pd ends by itself within seconds."""
        if self._process.poll() is None:
            self._process.kill()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # a library's stray print; the event file is what counts
            if isinstance(event, dict) and "event" in event:
                self._messages.put(Message(self.name, event))
        code = self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._messages.put(Ended(self.name, code, self._last_error()))

    def _last_error(self) -> str:
        try:
            lines = self._errors_path.read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
