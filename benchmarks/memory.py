"""What a peer's exchanges and outer steps add to the memory of local AdamW training, at peak and phase by phase.

    python -m benchmarks.memory [--quick] [--fragments N] [--overlap STEPS] [--json FILE] [--strict]

Three processes, one thread each: one that trains alone, then two peers of one run on 127.0.0.1, with real p2pd
daemons, of which one begins the run and the other takes over its state. Same model, same batch; random bytes as text.
The batch is small, so that activations do not hide what the exchange needs: a larger one only adds to both sides.
Memory is the peak of the resident set (VmHWM, set back at each phase), in float32 copies of the parameters. What is
counted includes the code of the network's libraries; p2pd's own memory is told beside. With `--overlap`, training goes
on during each exchange, so what an exchange needs is there together with gradients, and phases run into each other.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import bars, memory_child
from benchmarks.bars import Bar

LIMIT = 2.25
OVERLAP_LIMIT = 3.25
_END_S = 30.0

Figures = dict[str, Any]


def main() -> int:
    """Prints the table and the bars; 1 where a bar is short and that was to be strict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    memory_child.add_options(parser)
    parser.add_argument("--quick", action="store_true", help="the small recipe's model: libraries weigh more there")
    bars.add_options(parser)
    options = parser.parse_args()
    if options.quick:
        options.recipe = "small"
    with tempfile.TemporaryDirectory() as folder:
        alone = _alone(options, Path(folder))
        peers = _peers(options, Path(folder))
    unmixed = [
        reason for peer in peers for mixed, reason in zip(peer["mixed"], peer["reasons"], strict=True) if not mixed
    ]
    if unmixed:
        raise SystemExit(f"a round went by without an exchange, so nothing was measured: {unmixed[0]}")

    copy_bytes = 4 * alone["parameters"]
    base = max(alone["peaks"].values())
    write = sys.stdout.write
    write(
        f"{alone['parameters']:,} parameters, {options.tokens} tokens a batch; a copy is {copy_bytes / 2**20:.0f} MiB\n"
    )
    write(f"{'':42}{'peak, copies':>14}{'over training alone':>21}\n")
    write(f"{'training alone, local step':42}{base / copy_bytes:14.2f}{0.0:21.2f}\n")
    for which, peer in zip(("first", "second"), peers, strict=True):
        for phase, peak in peer["peaks"].items():
            write(f"{which + ' peer, ' + phase:42}{peak / copy_bytes:14.2f}{(peak - base) / copy_bytes:21.2f}\n")
    write(f"code and libraries before the model: {max(peer['code_bytes'] for peer in peers) / 2**20:.0f} MiB a peer, ")
    write(f"p2pd beside it: {max(peer['daemon_bytes'] for peer in peers) / 2**20:.0f} MiB\n")
    training = ("local step", "exchange and mix", "outer step", "between")
    added = max(max(peer["peaks"][phase] for phase in training) - base for peer in peers) / copy_bytes
    bar = Bar("memory_added_copies", added, LIMIT, at_least=False)
    if options.overlap:
        write(f"training went on for up to {max(peer['overlap_steps'] for peer in peers)} steps during an exchange\n")
        bar = Bar("memory_added_copies_under_overlap", added, OVERLAP_LIMIT, at_least=False)
    return bars.finish(
        [bar],
        {"copy_bytes": copy_bytes, "alone": alone, "peers": peers},
        json_path=options.json,
        strict=options.strict,
    )


def _alone(options: argparse.Namespace, folder: Path) -> Figures:
    child = _start("alone", options, folder)
    figures = _answer(child)
    _end(child)
    return figures


def _peers(options: argparse.Namespace, folder: Path) -> list[Figures]:
    first = _start("peer", options, folder / "first")
    children = [first]
    try:
        address = _answer(first)["address"]
        children.append(_start("peer", options, folder / "second", "--peers", address))
        _answer(children[1])
        return [_answer(child) for child in children]
    finally:
        for child in children:
            _end(child)


def _start(role: str, options: argparse.Namespace, folder: Path, *more: str) -> "subprocess.Popen[str]":
    folder.mkdir(exist_ok=True)
    names = ("recipe", "fragments", "tokens", "local_steps", "rounds", "alone_steps", "overlap")
    chosen = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.memory_child", role, "--folder", str(folder), *chosen, *more],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _answer(child: "subprocess.Popen[str]") -> Figures:
    """The next line that a child tells."""
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise SystemExit(f"a process of the benchmark ended with code {child.wait(_END_S)}, see above")
    figures: Figures = json.loads(line)
    return figures


def _end(child: "subprocess.Popen[str]") -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.close()
    try:
        child.wait(_END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    child.stdout.close()


if __name__ == "__main__":
    sys.exit(main())
