"""A pair's exchange of parameters beside what people would use instead, in one run, taking turns.

    python -m benchmarks.exchange [--quick] [--repeats N] [--json FILE] [--strict]

Two processes on 127.0.0.1 hold 32 times 2^20 float32 parameters each, near each other as in a real round. Measured:

- gasloc: `StreamExchange` over p2pd, under each codec; and with the mix of both sides' parameters after it.
- `hivemind.DecentralizedAverager` averaging the same pair, as it is and under its own 8-bit compression: the faster of
  the two that need no further package. Timed from the trigger on: its group was found before.
- a bare full-duplex p2pd binary stream of hivemind's, moving as many bytes over the same p2pd; nothing is checked.
- `torch.distributed` gloo all-reduce of the same pair: no encryption, no p2pd.

The order differs from one repeat to the next. A time is that of the slower side; the table shows medians. CPU is that
of all processes of the pair together.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks import bars
from benchmarks.bars import Bar

CODECS = ("fp32", "fp16", "int8", "modular8", "modular4")
CASES = (
    *(("gasloc", codec) for codec in CODECS),
    ("gasloc", "bare"),
    ("averager", "averager"),
    ("averager", "averager_uniform8"),
    ("gloo", "gloo"),
    ("averager", "averager_quantile8"),
)
DEFAULT = tuple(name for _, name in CASES if name != "averager_quantile8")
"""Without the slower one of the averager's own compressions."""
PARAMETERS = 32 * 2**20
_END_S = 15.0


@dataclass
class Case:
    """All measurements of one case."""

    kind: str
    name: str
    seconds: list[float] = field(default_factory=list)
    mixed_seconds: list[float] = field(default_factory=list)
    """With the mix that follows an exchange; where the case averages by itself, the same as `seconds`."""
    cpu_seconds: list[float] = field(default_factory=list)
    sent_bytes: int = 0
    """By one side."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def median_mixed_s(self) -> float:
        return statistics.median(self.mixed_seconds)


class Pair:
    """The two processes of one kind."""

    def __init__(self, kind: str, parameters: int, folder: Path, log: int) -> None:
        self._children = [_start(kind, rank, parameters, folder, log) for rank in (0, 1)]

    def meet(self) -> None:
        """Waits until both run, and connects them."""
        hellos = [_answer(child) for child in self._children]
        self._both([{"do": "meet", "other": hello} for hello in reversed(hellos)])

    def measure(self, case: Case) -> None:
        """Adds one measurement."""
        self._both([{"do": "prepare", "what": case.name}] * 2)
        before = self._cpu_s()
        figures = self._both([{"do": "go"}] * 2)
        case.cpu_seconds.append(self._cpu_s() - before)
        case.seconds.append(max(each["seconds"] for each in figures))
        case.mixed_seconds.append(max(each.get("mixed_seconds", each["seconds"]) for each in figures))
        case.sent_bytes = max(each.get("sent_bytes", 0) for each in figures)

    def _both(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        for child, request in zip(self._children, requests, strict=True):
            assert child.stdin
            child.stdin.write(json.dumps(request) + "\n")
            child.stdin.flush()
        return [_answer(child) for child in self._children]

    def _cpu_s(self) -> float:
        total = 0.0
        for child in self._children:
            family = psutil.Process(child.pid)
            for process in (family, *family.children(recursive=True)):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def close(self) -> None:
        """Tells both to end; ends those that do not, with all that they started."""
        started = [child for each in self._children for child in _family(each.pid)]
        for child in self._children:
            if child.stdin:
                with contextlib.suppress(OSError):
                    child.stdin.close()
        _, alive = psutil.wait_procs(started, timeout=_END_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for child in self._children:
            child.wait()


def _family(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _start(kind: str, rank: int, parameters: int, folder: Path, log: int) -> "subprocess.Popen[str]":
    words = [sys.executable, "-m", "benchmarks.exchange_child", kind, str(rank), str(parameters), str(folder)]
    return subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,  # Ctrl-C is ours: they end as their stdin does
    )


def _answer(child: "subprocess.Popen[str]") -> dict[str, Any]:
    assert child.stdout
    line = child.stdout.readline()
    if not line:
        raise RuntimeError("a process of a pair ended early")
    answer: dict[str, Any] = json.loads(line)
    return answer


@contextlib.contextmanager
def pairs(parameters: int, kinds: Sequence[str]) -> Iterator[dict[str, Pair]]:
    """The pairs, connected; ended also when interrupted. Raises `RuntimeError` with a process's last words."""
    with tempfile.TemporaryDirectory(prefix="gasloc-exchange-") as name, (Path(name) / "log").open("w") as log:
        try:
            with contextlib.ExitStack() as stack:
                started: dict[str, Pair] = {}
                for kind in kinds:
                    started[kind] = Pair(kind, parameters, Path(name), log.fileno())
                    stack.callback(started[kind].close)
                for pair in started.values():
                    pair.meet()
                yield started
        except RuntimeError as error:
            raise RuntimeError(f"{error}; the last words: {(Path(name) / 'log').read_text()[-2000:]}") from None


def run(parameters: int, repeats: int, chosen: Sequence[tuple[str, str]]) -> list[Case]:
    """Measures all cases in turn, `repeats` times after one that does not count."""
    cases = [Case(kind, name) for kind, name in chosen]
    with pairs(parameters, list(dict.fromkeys(kind for kind, _ in chosen))) as started:
        for repeat in range(repeats + 1):
            for case in _in_turn(cases, repeat):
                started[case.kind].measure(case)
            sys.stderr.write(f"\r{repeat} of {repeats}")
        sys.stderr.write("\n")
    for case in cases:
        for times in (case.seconds, case.mixed_seconds, case.cpu_seconds):
            del times[0]
    return cases


def _in_turn(cases: Sequence[Case], repeat: int) -> list[Case]:
    """The cases in another order each time, so that none has always the same one before it."""
    turn = list(cases)
    random.Random(repeat).shuffle(turn)
    return turn


def table(cases: Sequence[Case], payload_bytes: int) -> Iterator[str]:
    """The figures, a line each."""
    yield f"{'case':20} {'seconds':>9} {'with mix':>9} {'MiB/s each way':>15} {'CPU s':>7} {'sent/fp32':>10}"
    for case in cases:
        rate = payload_bytes / case.median_s / 2**20
        sent = f"{case.sent_bytes / payload_bytes:10.4f}" if case.sent_bytes else f"{'':10}"
        cpu = statistics.median(case.cpu_seconds)
        yield f"{case.name:20} {case.median_s:9.3f} {case.median_mixed_s:9.3f} {rate:15.0f} {cpu:7.2f} {sent}"


def judge(cases: Sequence[Case], payload_bytes: int) -> list[Bar]:
    """What this is held to, for the cases that were measured."""
    by_name = {case.name: case for case in cases}
    found = []
    if {"fp32", "averager"} <= by_name.keys():
        ratio = by_name["averager"].median_s / by_name["fp32"].median_mixed_s
        found.append(Bar("fp32_over_averager", ratio, 1.7, at_least=True))
    if {"modular8", "averager_uniform8"} <= by_name.keys():
        ratio = by_name["averager_uniform8"].median_s / by_name["modular8"].median_mixed_s
        found.append(Bar("modular8_over_averager_8bit", ratio, 2.5, at_least=True))
    if {"fp32", "bare"} <= by_name.keys():
        share = by_name["bare"].median_s / by_name["fp32"].median_s
        found.append(Bar("fp32_share_of_bare_stream", share, 0.85, at_least=True))
    for name, limit in (("fp32", 1.01), ("int8", 0.27), ("modular8", 0.27), ("modular4", 0.14)):
        if name in by_name:
            found.append(Bar(f"{name}_bytes", by_name[name].sent_bytes / payload_bytes, limit, at_least=False))
    return found


def main() -> int:
    """Prints the table and the bars; 1 where a bar is short and that was to be strict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="an eighth of the parameters, 3 repeats")
    parser.add_argument("--repeats", type=int, help="measurements of each case (7)")
    parser.add_argument("--only", nargs="+", choices=[name for _, name in CASES], help="measure these cases only")
    bars.add_options(parser)
    options = parser.parse_args()
    parameters = PARAMETERS // 8 if options.quick else PARAMETERS
    repeats = options.repeats or (3 if options.quick else 7)
    chosen = [(kind, name) for kind, name in CASES if name in (options.only or DEFAULT)]
    began = time.monotonic()
    try:
        cases = run(parameters, repeats, chosen)
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        return 130
    payload_bytes = 4 * parameters
    sys.stdout.write(f"{parameters:,} float32 parameters, medians of {repeats}, {time.monotonic() - began:.0f} s\n")
    for line in table(cases, payload_bytes):
        sys.stdout.write(line + "\n")
    figures = {"parameters": parameters, "repeats": repeats, "cases": [asdict(case) for case in cases]}
    return bars.finish(judge(cases, payload_bytes), figures, json_path=options.json, strict=options.strict)


if __name__ == "__main__":
    sys.exit(main())
