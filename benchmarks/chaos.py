"""A swarm under random kills, freezes, restarts and joins, with a verdict.

    make chaos MINUTES=10        or        python -m benchmarks.chaos --minutes 10 --peers 6 --seed 0

Real `gasloc` processes with real p2pd on 127.0.0.1. Every few seconds something happens to a random peer: SIGKILL
(then a restart in the same folder, or a newcomer in a new one), SIGSTOP for a while, SIGINT and a new start, or its
p2pd alone is killed. At the end everybody is told to stop. Exit code 0 where every line of the verdict is ok.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import safetensors.torch

from gasloc import mixing

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
READY_S = 90.0
STOP_S = 20.0


@dataclass
class Life:
    """One peer's process, and the folder that outlives it."""

    name: str
    folder: Path
    process: subprocess.Popen[bytes]
    begun_s: float
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    """Seconds alive, open descriptors, resident bytes."""

    def events(self) -> Iterator[dict[str, Any]]:
        """What it and those before it in this folder said so far."""
        path = self.folder / "events.jsonl"
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    yield json.loads(line)
                except ValueError:  # the line that a SIGKILL cut
                    continue

    def sample(self, now_s: float) -> None:
        try:
            process = psutil.Process(self.process.pid)
            self.samples.append((now_s - self.begun_s, process.num_fds(), process.memory_info().rss))
        except psutil.Error:
            return


class Swarm:
    """The peers of one chaos run."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root = root
        self.random = random.Random(seed)
        self.mark = uuid.uuid4().hex
        self.lives: list[Life] = []
        self.past: list[Life] = []
        self.count = 0
        (root / "chaos.toml").write_text(RECIPE)

    def spawn(self, arguments: list[str], folder: Path) -> Life:
        log = (folder.parent / f"{folder.name}.log").open("ab")
        process = subprocess.Popen(
            [sys.executable, "-m", "gasloc", *arguments, "--dir", str(folder), "--host", "127.0.0.1", "--threads", "1"],
            env={**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
        log.close()
        life = Life(folder.name, folder, process, time.monotonic())
        self.lives.append(life)
        return life

    def begin(self) -> Life:
        return self.spawn(["start", "--recipe", str(self.root / "chaos.toml")], self.root / "peer-0")

    def join(self, folder: Path | None = None) -> Life:
        """A newcomer, or one that comes back to its folder."""
        if folder is None:
            self.count += 1
            folder = self.root / f"peer-{self.count}"
        addresses = [address for life in self.lives for address in self.addresses(life)]
        self.random.shuffle(addresses)
        return self.spawn(["join", "--peers", ",".join(addresses[:3])], folder)

    def addresses(self, life: Life) -> list[str]:
        listening = [event for event in life.events() if event["event"] == "listening"]
        return [str(address) for address in listening[-1]["addresses"][:1]] if listening else []

    def end(self, life: Life) -> int:
        """Waits for a peer that was told to end; kills it if it does not. Returns its exit code."""
        try:
            code = life.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            life.process.kill()
            life.process.wait()
            code = -999
        self.lives.remove(life)
        self.past.append(life)
        return code

    def descendants(self, life: Life) -> list[psutil.Process]:
        try:
            return psutil.Process(life.process.pid).children(recursive=True)
        except psutil.Error:
            return []

    def leftovers(self) -> list[str]:
        """Processes that bear our mark and should be gone."""
        found = []
        for process in psutil.process_iter(["pid", "name"]):
            try:
                if process.environ().get(MARK) == self.mark:
                    found.append(f"{process.info['name']} ({process.info['pid']})")
            except psutil.Error:
                continue
        return found


def trained_rounds(life: Life) -> int:
    return sum(event["event"] == "round" for event in life.events())


def wait_until(done: Callable[[], bool], timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if done():
            return True
        time.sleep(0.2)
    return done()


def disturb(swarm: Swarm) -> str:
    """One random misfortune; returns it in words. The peer that began is as mortal as the others."""
    victim = swarm.random.choice(swarm.lives)
    what = swarm.random.choice(["kill-return", "kill-replace", "freeze", "leave-return", "daemon"])
    if what == "freeze":
        seconds = swarm.random.uniform(2, 12)
        processes = [psutil.Process(victim.process.pid), *swarm.descendants(victim)]
        for process in processes:
            process.suspend()
        time.sleep(seconds)
        for process in processes:
            process.resume()
        return f"{victim.name} frozen for {seconds:.0f} s"
    if what == "daemon":
        for process in swarm.descendants(victim):
            if process.name() == "p2pd":
                process.kill()
        try:
            victim.process.wait(10)
        except subprocess.TimeoutExpired:
            return f"{victim.name}: p2pd killed, it got over it"
        swarm.lives.remove(victim)
        swarm.past.append(victim)
        swarm.join(victim.folder)
        return f"{victim.name}: p2pd killed, it stopped with code {victim.process.returncode} and was started again"
    if what == "leave-return":
        victim.process.send_signal(signal.SIGINT)
        code = swarm.end(victim)
        swarm.join(victim.folder)
        return f"{victim.name} left with code {code} and came back"
    victim.process.kill()
    swarm.end(victim)
    swarm.join(victim.folder if what == "kill-return" else None)
    return f"{victim.name} killed; " + ("it came back" if what == "kill-return" else f"{swarm.lives[-1].name} came")


def flat(values: list[int], slack: float, least: float) -> bool:
    """Whether the second half of a series is no higher than the first, give or take."""
    if len(values) < 20:
        return True
    warm = values[len(values) // 4 :]
    first, last = statistics.median(warm[: len(warm) // 3]), statistics.median(warm[-len(warm) // 3 :])
    return last <= max(first * (1 + slack), first + least)


def verdict(swarm: Swarm, codes: dict[str, int], spread: float | None) -> list[tuple[str, str, bool]]:
    """Each line: what, the figure, whether it is as it should be."""
    everybody = [*swarm.lives, *swarm.past]
    folders = {life.folder: life for life in everybody}
    events = [event for life in folders.values() for event in life.events()]
    validation = sorted((e["time"], e["validation_loss"]) for e in events if e["event"] == "evaluation")
    first = [loss for _, loss in validation[:3]]
    last = [loss for _, loss in validation[-6:]]
    rounds = [event for event in events if event["event"] == "round"]
    tried = [event for event in rounds if event["tried"]]
    mixed = [event for event in tried if event["mixed"]]
    share = len(mixed) / len(tried) if tried else 0.0
    long_lived = [life for life in everybody if len(life.samples) >= 20]
    descriptors = all(flat([s[1] for s in life.samples], 0.1, 8) for life in long_lived)
    memory = all(flat([s[2] for s in life.samples], 0.15, 30e6) for life in long_lived)
    leftovers = swarm.leftovers()
    fell = bool(first and last) and statistics.mean(last) < 0.75 * statistics.mean(first)
    loss = f"{statistics.mean(first):.3f} -> {statistics.mean(last):.3f}" if validation else "none"
    return [
        ("validation loss fell by a quarter", loss, fell),
        (
            "replica spread under 0.2",
            "unknown" if spread is None else f"{spread:.4f}",
            spread is not None and spread < 0.2,
        ),
        ("rounds mixed, of those with somebody in sight, over 0.6", f"{share:.3f} of {len(tried)}", share > 0.6),
        ("told to stop, everybody exits 0", str(sorted(set(codes.values()))), set(codes.values()) == {0}),
        ("no process left", ", ".join(leftovers) or "none", not leftovers),
        (f"descriptors flat ({len(long_lived)} long-lived peers)", "yes" if descriptors else "no", descriptors),
        (f"memory flat ({len(long_lived)} long-lived peers)", "yes" if memory else "no", memory),
    ]


def final_spread(lives: list[Life]) -> float | None:
    """Spread of the anchors in the last checkpoints of those that stopped in order."""
    states = []
    for life in lives:
        found = sorted((life.folder / "checkpoints").glob("*/*.safetensors"))
        if found and life.process.returncode == 0:
            tensors = safetensors.torch.load_file(found[-1])
            states.append({name: t for name, t in tensors.items() if name.startswith("anchor/")})
    return mixing.spread(states) if len(states) > 1 else None


def main() -> int:
    parser = argparse.ArgumentParser(description="A swarm under random kills, freezes and joins, with a verdict.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--peers", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dir", type=Path, help="keep everything here; default: a temporary folder, removed if all is ok"
    )
    options = parser.parse_args()
    root = options.dir or Path(tempfile.mkdtemp(prefix="gasloc-chaos-"))
    root.mkdir(parents=True, exist_ok=True)
    swarm = Swarm(root, options.seed)
    try:
        first = swarm.begin()
        if not wait_until(lambda: bool(swarm.addresses(first)), READY_S):
            print(f"the first peer did not start: see {root}/peer-0.log")
            return 1
        for _ in range(options.peers - 1):
            swarm.join()
        wait_until(lambda: all(trained_rounds(life) > 2 for life in swarm.lives), READY_S)
        begun_s = time.monotonic()
        end_s = begun_s + 60 * options.minutes
        while time.monotonic() < end_s:
            pause_s = swarm.random.uniform(5, 15)
            until_s = min(time.monotonic() + pause_s, end_s)
            while time.monotonic() < until_s:
                for life in swarm.lives:
                    life.sample(time.monotonic())
                time.sleep(1.0)
            dead = [life for life in swarm.lives if life.process.poll() is not None]
            for life in dead:
                print(
                    f"{time.monotonic() - begun_s:6.0f} s  {life.name} ended by itself, code {life.process.returncode}"
                )
                swarm.lives.remove(life)
                swarm.past.append(life)
                swarm.join(life.folder)
            ready = [life for life in swarm.lives if swarm.addresses(life)]
            if time.monotonic() < end_s and len(ready) >= max(2, options.peers // 2):
                print(f"{time.monotonic() - begun_s:6.0f} s  {disturb(swarm)}", flush=True)
        wait_until(lambda: all(trained_rounds(life) for life in swarm.lives), READY_S)
        time.sleep(10.0)
        last = list(swarm.lives)
        for life in last:
            life.process.send_signal(signal.SIGINT)
        codes = {life.name: swarm.end(life) for life in last}
        lines = verdict(swarm, codes, final_spread(last))
    finally:
        for life in swarm.lives:
            life.process.kill()
    for what, figure, ok in lines:
        print(f"{'ok  ' if ok else 'FAIL'}  {what}: {figure}")
    whole = all(ok for _, _, ok in lines)
    if whole and options.dir is None:
        shutil.rmtree(root)
    else:
        print(f"everything lies in {root}")
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
