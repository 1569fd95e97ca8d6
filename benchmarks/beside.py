"""Two peers that train one model together, by each of the ways that people would use: what synchronising costs them.

    python -m benchmarks.beside [--quick] [--torchft-python PATH] [--json FILE]

On this machine's loopback, one way after another, two processes each, the same byte-level decoder of 0.8M parameters
from the same weights, the same text, as many local AdamW steps a round (paced to 0.1 s), as many rounds:

- gasloc: `GaslocOptimizer` over p2pd. Between two peers pair averaging is DiLoCo.
- gloo: DiLoCo by hand over `torch.distributed` all-reduce. No encryption, no discovery, nobody may leave.
- hivemind: `hivemind.Optimizer` with local updates, which averages parameters and takes no outer step.
- torchft: torchft 0.2.0's DiLoCo with its lighthouse and gloo. It pins a torch of its own, so it runs in an environment
  of its own, and only if told where that is:

      python -m venv DIR && DIR/bin/pip install torch==2.13.0 torchft==0.2.0 numpy pydantic

Synchronising is the time that calls of the optimizer took beyond their median, a round; the slower peer counts. Bytes
are those that one peer sent a round, headers, discovery and all: counted where root may give the pair a loopback of its
own. Nothing here has a bar: the methods do not do the same.
"""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import bars
from benchmarks.children import Nursery, Words, interrupt_on_signals, nursery
from benchmarks.namespaces import Lan, why_not

KINDS = ("gasloc", "gloo", "hivemind", "torchft")
STEP_S = 0.1
LOCAL_STEPS = 30
_PREFIX = "gasloc-beside"
_MEET_S = 120.0


def recipe(rounds: int) -> Words:
    """771,328 parameters, fp32 on the wire: 3.1 MB."""
    return {
        "name": "beside",
        "rounds": rounds,
        "topology": "2-peer",
        "pacing": False,
        "local_steps": LOCAL_STEPS,
        "model": {"dim": 128, "layers": 4, "heads": 4, "key_value_heads": 2, "hidden_dim": 352, "context_length": 64},
        "inner": {"learning_rate": 3e-3, "final_share": 1.0, "warmup_steps": 20, "batch_size": 4},
        "evaluation": {"batches": 16},
    }


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way's figures; of the two peers the larger."""

    kind: str
    rounds: int
    """Synchronisations that came about."""
    sync_s: float
    """Seconds of each round."""
    seconds: float
    """Of the whole run."""
    sent_bytes: float | None
    """By one peer, a round; None where it was not counted."""
    loss: float
    """Validation loss in the end, mean over both."""


def measure(kind: str, python: str, home: Nursery, lan: Lan | None, rounds: int) -> Outcome:
    """Trains one pair. Raises `RuntimeError` where a process fails."""
    folder = home.folder / kind
    folder.mkdir()
    command = [*(lan.inside(1) if lan else ()), python, "-m", "benchmarks.beside_child", kind]
    pair = [home.start([*command, str(rank), str(folder)]) for rank in (0, 1)]
    hello, _ = [child.answer(_MEET_S)["hello"] for child in pair]
    for child in pair:
        child.ask({"recipe": recipe(rounds), "hello": hello, "step_s": STEP_S})
    limit_s = _MEET_S + 20 * rounds * LOCAL_STEPS * STEP_S
    found = [child.answer(limit_s) for child in pair]
    return Outcome(
        kind=kind,
        rounds=min(each["rounds"] for each in found),
        sync_s=max(each["sync_s"] for each in found),
        seconds=max(each["seconds"] for each in found),
        sent_bytes=max(each["bytes"] for each in found) / 2 / rounds if lan else None,
        loss=sum(each["loss"] for each in found) / len(found),
    )


def table(outcomes: Sequence[Outcome], rounds: int) -> Iterator[str]:
    """A line for each way."""
    yield f"{'':9} {'rounds':>8} {'sync s/round':>13} {'run s':>7} {'MB sent/round':>14} {'loss':>7}"
    for each in outcomes:
        sent = "not counted" if each.sent_bytes is None else f"{each.sent_bytes / 1e6:.2f}"
        done = f"{each.rounds}/{rounds}"
        yield f"{each.kind:9} {done:>8} {each.sync_s:13.3f} {each.seconds:7.1f} {sent:>14} {each.loss:7.4f}"


def main() -> int:
    """Prints the table, and why a way is not in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="6 rounds instead of 20")
    parser.add_argument("--torchft-python", type=Path, help="the interpreter of an environment that has torchft")
    parser.add_argument("--only", nargs="+", choices=KINDS, help="these ways only")
    bars.add_options(parser)
    options = parser.parse_args()
    rounds = 6 if options.quick else 20
    outcomes: list[Outcome] = []
    missing: dict[str, str] = {}
    alone = why_not()
    interrupt_on_signals()
    try:
        with contextlib.ExitStack() as stack:
            lan = None if alone else stack.enter_context(Lan(1, prefix=_PREFIX))
            for kind in options.only or KINDS:
                python = options.torchft_python if kind == "torchft" else sys.executable
                if python is None:
                    missing[kind] = "not run: --torchft-python does not say where it is installed"
                    continue
                try:
                    with nursery("beside") as home:
                        outcomes.append(measure(kind, str(Path(python).absolute()), home, lan, rounds))
                except RuntimeError as error:
                    missing[kind] = f"failed: {error}"
                sys.stderr.write(f"{kind} done\n")
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted; nothing is left\n")
        return 130
    sys.stdout.write(f"2 peers, {LOCAL_STEPS} steps of {STEP_S:g} s a round\n")
    for line in table(outcomes, rounds):
        sys.stdout.write(line + "\n")
    for kind, reason in missing.items():
        sys.stdout.write(f"{kind}: {reason}\n")
    if alone:
        sys.stdout.write(f"bytes were not counted: {alone}\n")
    figures = {
        "rounds": rounds,
        "local_steps": LOCAL_STEPS,
        "outcomes": [asdict(each) for each in outcomes],
        "missing": missing,
    }
    return bars.finish([], figures, json_path=options.json, strict=options.strict)


if __name__ == "__main__":
    sys.exit(main())
