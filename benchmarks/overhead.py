"""What being in a swarm costs a peer that trains on one core: its throughput beside the same loop alone.

    python -m benchmarks.overhead [--quick] [--batch N] [--loops LOOP ...] [--json FILE] [--strict]

Two processes, each pinned to a core of its own together with its p2pd and all of its threads, train the recipe
`small` (9.5M parameters, fp16 on the wire) at H = 30. In turn: both in one swarm on 127.0.0.1, with `GaslocOptimizer`,
under overlap of a step and as `auto` chooses, which waits for an exchange as short as this; and both alone, with plain
AdamW and no network at all, not even an idle one. Timed are as many steps as a round has, from the middle of one to
the middle of the next, after a round and a half; the swarm is joined before, and left after. A round's tokens decide
what an exchange weighs: they are shown.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

from benchmarks import bars
from benchmarks.bars import Bar
from benchmarks.children import Child, Nursery, Words, interrupt_on_signals, nursery
from gasloc.overlap import Overlap
from gasloc.recipe import load

LOCAL_STEPS = 30


@dataclass
class Loop:
    """All measurements of one loop; a list for each repeat, of a figure for each peer."""

    name: str
    overlap: Overlap | None
    """As in a recipe; None: alone."""
    tokens_per_s: list[list[float]] = field(default_factory=list)
    waited_share: list[list[float]] = field(default_factory=list)
    """Of the time, what training stood still for."""
    step_cpu_s: list[list[float]] = field(default_factory=list)
    """CPU seconds of a local step, with its share of everything else, p2pd included."""
    other_cpu_share: list[list[float]] = field(default_factory=list)
    """Of those CPU seconds, what the training thread did not use: the exchange, the swarm, p2pd."""
    overlap_steps: int = 0
    """The most that were taken while an exchange was under way."""
    mixed_share: list[float] = field(default_factory=list)
    """Of the rounds, those with a mix."""

    def median(self, peer: int) -> float:
        """A peer's tokens a second."""
        return statistics.median(both[peer] for both in self.tokens_per_s)


def measure(pair: Sequence[Child], loop: Loop, recipe: Words, rounds: int) -> None:
    """Adds one measurement: both processes at the same time."""
    peers: list[str] = []
    recipe = {**recipe, "exchange": {**recipe["exchange"], "overlap": loop.overlap or "off"}}
    for child in pair:
        child.ask({"do": "open", "recipe": recipe, "swarm": loop.overlap is not None, "peers": peers})
        peers = child.answer()["addresses"][:1]
    for child in pair:
        child.ask({"do": "train", "rounds": rounds, "local_steps": LOCAL_STEPS})
    found = [child.answer() for child in pair]
    for child in pair:
        child.ask({"do": "close"})
    for child in pair:
        child.answer()
    step_tokens = recipe["inner"]["batch_size"] * recipe["model"]["context_length"]
    loop.tokens_per_s.append([each["steps"] * step_tokens / each["seconds"] for each in found])
    loop.step_cpu_s.append([each["cpu_s"] / each["steps"] for each in found])
    loop.other_cpu_share.append([1 - each["training_cpu_s"] / each["cpu_s"] for each in found])
    loop.waited_share.append([each["waited_s"] / each["seconds"] for each in found])
    loop.overlap_steps = max([loop.overlap_steps, *(each["overlap_steps"] for each in found)])
    loop.mixed_share.append(sum(each["mixed"] for each in found) / max(sum(each["rounds"] for each in found), 1))


def _start(home: Nursery, core: int) -> Child:
    folder = home.folder / f"core-{core}"
    folder.mkdir()
    return home.start([sys.executable, "-m", "benchmarks.overhead_child", str(core), str(folder)])


def table(loops: Sequence[Loop], peers: int) -> Iterator[str]:
    """The figures, a line each."""
    columns = " ".join(f"{f'peer {peer} tokens/s':>16}" for peer in range(peers))
    yield f"{'loop':14} {columns} {'stood':>7} {'CPU s/step':>11} {'others':>7} {'overlap':>8} {'mixed':>6}"
    for loop in loops:
        rates = " ".join(f"{loop.median(peer):16.1f}" for peer in range(peers))
        stood = statistics.median(share for both in loop.waited_share for share in both)
        cpu = statistics.median(seconds for both in loop.step_cpu_s for seconds in both)
        others = statistics.median(share for both in loop.other_cpu_share for share in both)
        rest = f"{loop.overlap_steps:8} {statistics.fmean(loop.mixed_share):6.0%}" if loop.overlap else ""
        yield f"{loop.name:14} {rates} {stood:7.1%} {cpu:11.4f} {others:7.1%} {rest}"


def shares(swarm: Loop, alone: Loop) -> list[float]:
    """Throughput in the swarm over throughput alone, a figure for each repeat and peer: neighbours in time."""
    return [
        ours / theirs
        for both, others in zip(swarm.tokens_per_s, alone.tokens_per_s, strict=True)
        for ours, theirs in zip(both, others, strict=True)
    ]


def _overlap(text: str) -> Overlap:
    if text in ("auto", "off"):
        return "auto" if text == "auto" else "off"
    return int(text)


def main() -> int:
    """Prints the table and the bars; 1 where a bar is short and that was to be strict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--quick", action="store_true", help="batches of 1 sequence instead of 4, 2 repeats instead of 3"
    )
    parser.add_argument("--batch", type=int, help="sequences of 256 bytes in a batch (4)")
    parser.add_argument(
        "--loops",
        nargs="+",
        type=_overlap,
        default=[1, "auto"],
        help="overlap in swarms; the first is held to the bar",
    )
    parser.add_argument("--repeats", type=int, help="measurements of each loop (3)")
    bars.add_options(parser)
    options = parser.parse_args()
    batch = options.batch or (1 if options.quick else 4)
    rounds, repeats = 2 if options.quick else 1, 2 if options.quick else 3
    recipe = load("small").model_dump(mode="json")
    recipe["local_steps"] = LOCAL_STEPS
    recipe["inner"]["batch_size"] = batch
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        sys.stderr.write("benchmarks.overhead cannot run: it needs two cores\n")
        return 2
    interrupt_on_signals()
    alone = Loop("alone", None)
    swarms = [Loop(f"swarm, {each}", each) for each in options.loops]
    loops = [swarms[0], alone, *swarms[1:]]
    try:
        with nursery("overhead") as home:
            pair = [_start(home, core) for core in cores]
            for child in pair:
                child.answer()
            for repeat in range(options.repeats or repeats):
                for loop in loops if repeat % 2 == 0 else reversed(loops):
                    measure(pair, loop, recipe, rounds)
                sys.stderr.write(f"\r{repeat + 1} of {options.repeats or repeats}")
        sys.stderr.write("\n")
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        return 130
    except RuntimeError as error:
        sys.stderr.write(f"\nbenchmarks.overhead: {error}\n")
        return 1
    step_tokens = batch * recipe["model"]["context_length"]
    sys.stdout.write(f"{LOCAL_STEPS} steps of {step_tokens} tokens a round, {rounds} rounds a measurement\n")
    for line in table(loops, len(cores)):
        sys.stdout.write(line + "\n")
    by_loop = {loop.name: statistics.median(shares(loop, alone)) for loop in swarms}
    for name, share in by_loop.items():
        sys.stdout.write(f"{name}: throughput over that alone {share:.3f}\n")
    figures = {
        "step_tokens": step_tokens,
        "rounds": rounds,
        "shares": by_loop,
        "loops": [asdict(loop) for loop in loops],
    }
    bar = Bar("throughput_share_of_training_alone", by_loop[swarms[0].name], 0.97, at_least=True)
    return bars.finish([bar], figures, json_path=options.json, strict=options.strict)


if __name__ == "__main__":
    sys.exit(main())
