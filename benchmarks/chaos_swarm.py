"""The peers of a chaos run: their processes, their hosts, and what they said."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks import namespaces

RECIPE = """
name = "chaos"
rounds = 1000000
local_steps = 10
data = "stdlib"
[model]
dim = 32
layers = 1
heads = 2
key_value_heads = 1
hidden_dim = 64
context_length = 64
[inner]
batch_size = 4
warmup_steps = 20
learning_rate = 1e-2
[exchange]
grace_s = 5.0
[evaluation]
every_rounds = 20
batches = 4
"""
MARK = "GO_TRACE_OF_CHAOS"
"""An environment variable that every process of this run inherits, by which leftovers are found."""
STOP_S = 20.0


@dataclass
class Life:
    """One peer's process, and the folder that outlives it."""

    name: str
    folder: Path
    host: int
    process: subprocess.Popen[bytes]
    begun_s: float
    honest: bool = True
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    """Seconds alive, open descriptors, resident bytes."""
    lines_before: int = 0
    """Lines that those before it in this folder wrote."""

    def events(self) -> Iterator[dict[str, Any]]:
        """What it and those before it in this folder said so far."""
        return read_lines(written(self.folder))

    def own_events(self) -> Iterator[dict[str, Any]]:
        """What it said itself so far."""
        return read_lines(written(self.folder)[self.lines_before :])

    def joined(self) -> bool:
        """Whether it has become a member."""
        return any(event["event"] == "joined" for event in self.own_events())

    def rounds(self) -> list[dict[str, Any]]:
        """The rounds that it ended, with what came of them."""
        return [event for event in self.own_events() if event["event"] == "round"]

    def peer_id(self) -> str:
        """Empty before it listens."""
        return next((str(event["peer"]) for event in self.events() if event["event"] == "listening"), "")

    def addresses(self) -> list[str]:
        """Where others can dial it; the best alone. Nowhere before it listens."""
        listening = [event for event in self.own_events() if event["event"] == "listening"]
        return [str(address) for address in listening[-1]["addresses"][:1]] if listening else []

    def sample(self, now_s: float) -> None:
        """Notes its descriptors and its memory."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.process.pid)
            self.samples.append((now_s - self.begun_s, process.num_fds(), process.memory_info().rss))

    def processes(self) -> list[psutil.Process]:
        """Itself and its children."""
        try:
            process = psutil.Process(self.process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.Error:
            return []

    def daemons(self) -> list[psutil.Process]:
        """Its p2pd."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if process.name() == "p2pd":
                    found.append(process)
        return found


def written(folder: Path) -> list[str]:
    """The lines of a folder's events."""
    path = folder / "events.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def read_lines(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The events in these lines, but for one that a SIGKILL cut."""
    for line in lines:
        with contextlib.suppress(ValueError):
            yield json.loads(line)


class Swarm:
    """The peers of one run; a `with` block, after which none of them is left.

    Each has a host of its own where this process may make network namespaces; `lan` is None, and all are on
    127.0.0.1, where it may not.
    """

    def __init__(self, root: Path, seed: int, peers: int, *, alone: bool) -> None:
        """`alone`: on 127.0.0.1 in any case."""
        self.root = root
        self.random = random.Random(seed)
        self.mark = uuid.uuid4().hex
        self.lives: list[Life] = []
        self.past: list[Life] = []
        self.lan = None if alone or namespaces.why_not() else namespaces.Lan(peers + 1, prefix="gasloc-chaos")
        self._free = list(range(peers + 1, 0, -1))
        self._count = 0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        (self.root / "chaos.toml").write_text(RECIPE)
        if self.lan is not None:
            self._stack.enter_context(self.lan)
        return self

    def __exit__(self, *_: object) -> None:
        for life in list(self.lives):
            life.process.kill()
            life.process.wait()
        self._stack.close()

    def begin(self) -> Life:
        """The first peer."""
        return self._spawn(["gasloc", "start", "--recipe", str(self.root / "chaos.toml")], self.root / "peer-0")

    def join(self, folder: Path | None = None) -> Life:
        """A newcomer, or one that comes back to its folder."""
        if folder is None:
            self._count += 1
            folder = self.root / f"peer-{self._count}"
        return self._spawn(["gasloc", "join", "--peers", self._known()], folder)

    def join_liar(self, seed: int) -> Life:
        """A member that lies, in every way in turn; see `benchmarks.liar`."""
        return self._spawn(
            ["benchmarks.liar", "--peers", self._known(), "--seed", str(seed)], self.root / f"liar-{seed}", honest=False
        )

    def end(self, life: Life) -> int:
        """Waits for a peer that was told to end; kills it if it does not. Returns its exit code."""
        try:
            code = life.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            life.process.kill()
            life.process.wait()
            code = -int(signal.SIGKILL)
        self.bury(life)
        return code

    def bury(self, life: Life) -> None:
        """It has ended: its host is free again."""
        self.lives.remove(life)
        self.past.append(life)
        self._free.append(life.host)

    def honest(self) -> list[Life]:
        """Those that do not lie."""
        return [life for life in self.lives if life.honest]

    def cut(self, lives: Collection[Life]) -> None:
        """Parts these from the others."""
        assert self.lan is not None, "on 127.0.0.1 nobody can be cut off"
        self.lan.cut([life.host for life in lives])

    def heal(self) -> None:
        """Ends every cut."""
        assert self.lan is not None, "on 127.0.0.1 nobody can be cut off"
        self.lan.heal()

    def leftovers(self) -> list[str]:
        """Processes that bear our mark and should be gone."""
        found = []
        for process in psutil.process_iter(["pid", "name"]):
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark:
                    found.append(f"{process.info['name']} ({process.info['pid']})")
        return found

    def _known(self) -> str:
        addresses = [address for life in self.honest() for address in life.addresses()]
        self.random.shuffle(addresses)
        return ",".join(addresses[:3])

    def _spawn(self, words: list[str], folder: Path, *, honest: bool = True) -> Life:
        host = self._free.pop()
        prefix, address = (self.lan.inside(host), self.lan.ip(host)) if self.lan else ([], "127.0.0.1")
        threads = ["--threads", "1"] if honest else []
        lines_before = len(written(folder))
        with (folder.parent / f"{folder.name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*prefix, sys.executable, "-m", *words, "--dir", str(folder), "--host", address, *threads],
                env={**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        life = Life(folder.name, folder, host, process, time.monotonic(), honest, lines_before=lines_before)
        self.lives.append(life)
        return life
