"""One of 8 peers on a thin link: does anybody wait for it? Real p2pd, network namespaces, links shaped by `tc`.

    python -m benchmarks.straggler [--quick] [--thin-share SHARE] [--overlap auto] [--plot FILE] [--json FILE]
        [--strict]

Needs root; makes its namespaces itself and removes them, also when interrupted, and those of a killed run before.

8 peers, a process each, in 8 namespaces on one bridge. Every link carries 40 Mbit/s each way; the straggler's, where
there is one, a tenth of it, or another share: at a thirtieth an exchange takes longer than a round. All train one
small byte-level decoder with `GaslocOptimizer`. A local step is paced to a fixed length, so that the machine's cores
are no bottleneck: the CPU that it took is shown. Two runs, `2-peer` and all-to-all (DiLoCo), each from the same
weights, in phases that alternate: with the straggler, without, with it again. The first 5 rounds after each change, in
which pacing settles, do not count.

A round's time is from the end of the round before, exchange and all. Of each peer the median and the mean (its time
over its rounds, in which no late round is lost) are taken; of peers the median.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks import bars, straggler_figures
from benchmarks.bars import Bar
from benchmarks.children import Nursery, Words, interrupt_on_signals, nursery
from benchmarks.namespaces import Lan, why_not
from benchmarks.straggler_figures import PeerRound

PEERS = 8
STRAGGLER = PEERS
"""The host on the thin link; host 1 begins the run."""
MBIT_PER_S = 40.0
THIN_SHARE = 0.1
STEP_S = 0.1
DISCARD = 5
"""Rounds after a change that do not count: the design gives pacing so many to settle."""
TOPOLOGIES = ("2-peer", "all-to-all")
_PREFIX = "gasloc-straggler"


def recipe(topology: str, overlap: str) -> Words:
    """108,928 parameters in fp32: with two partners 0.87 MB out of each peer and as much in, 0.17 s at 40 Mbit/s."""
    return {
        "name": "straggler",
        "rounds": 100_000,
        "topology": topology,
        "local_steps": 25,
        "model": {"dim": 64, "layers": 2, "heads": 4, "key_value_heads": 2, "hidden_dim": 176, "context_length": 64},
        "inner": {"learning_rate": 3e-3, "final_share": 1.0, "warmup_steps": 20, "batch_size": 4},
        "exchange": {"overlap": overlap},
        "evaluation": {"batches": 4},
    }


@dataclass(frozen=True, slots=True)
class Conditions:
    """What all phases of all runs have in common."""

    overlap: str
    thin_share: float
    """Of the bandwidth, what the straggler's link has."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A span of a run in which links stayed as they were."""

    straggler: bool
    began_s: float
    ended_s: float
    cpu_share: float
    """Of all cores, by our processes."""
    machine_share: float
    """Of all cores, by whatever runs."""


@dataclass(frozen=True, slots=True)
class Run:
    """A topology's run."""

    topology: str
    began_s: float
    phases: list[Phase]
    rounds: list[PeerRound]

    def counted(self, phase: Phase) -> dict[int, list[PeerRound]]:
        """The rounds of a phase that count, by peer."""
        return straggler_figures.within(self.rounds, phase.began_s, phase.ended_s, DISCARD)

    def series(self, phase: Phase, peer: int, *, beside_straggler: bool) -> list[int]:
        """A peer's local steps in a phase, in rounds beside the straggler or in the others. All of its own."""
        rounds = straggler_figures.within(self.rounds, phase.began_s, phase.ended_s, 0).get(peer, [])
        return [each.local_steps for each in rounds if peer == STRAGGLER or each.beside_straggler is beside_straggler]


class Host:
    """One peer's process in its namespace."""

    def __init__(self, lan: Lan, number: int, home: Nursery) -> None:
        self.number = number
        self.ip = lan.ip(number)
        own = home.folder / f"peer-{number}"
        own.mkdir()
        self.child = home.start([*lan.inside(number), sys.executable, "-m", "benchmarks.straggler_peer", str(own)])


def run(
    lan: Lan,
    hosts: Sequence[Host],
    topology: str,
    conditions: Conditions,
    plan: Sequence[tuple[bool, int]],
) -> Run:
    """Trains through phases: with the straggler or without, for so many rounds of most peers."""
    _set_links(lan, None)
    for host in hosts:
        host.child.reports.clear()
    begin = {"do": "open", "recipe": recipe(topology, conditions.overlap), "step_s": STEP_S}
    ids: dict[str, int] = {}
    peers: list[str] = []
    for host in hosts:
        host.child.ask({**begin, "host": host.ip, "peers": peers})
        opened = host.child.answer()
        ids[opened["id"]] = host.number
        if not peers:
            peers = opened["addresses"][:1]
            host.child.ask({"do": "enter", "count": 1})
            host.child.answer()
    for host in hosts[1:]:
        host.child.ask({"do": "enter", "count": PEERS})
    for host in hosts[1:]:
        host.child.answer()
    _set_links(lan, conditions.thin_share if plan[0][0] else None)
    for host in hosts:
        host.child.ask({"do": "train"})
    began_s = time.monotonic()
    phases = [
        _phase(lan, hosts, conditions.thin_share if thin else None, rounds, f"{topology}, phase {n + 1} of {len(plan)}")
        for n, (thin, rounds) in enumerate(plan)
    ]
    for host in hosts:
        host.child.ask({"do": "halt"})
    for host in hosts:
        host.child.answer()
    return Run(
        topology, began_s, phases, [_round(host.number, words, ids) for host in hosts for words in host.child.reports]
    )


def _phase(lan: Lan, hosts: Sequence[Host], thin_share: float | None, rounds: int, title: str) -> Phase:
    _set_links(lan, thin_share)
    began_s, before = time.monotonic(), sum(host.child.cpu_s() for host in hosts)
    psutil.cpu_percent()
    known = {host.number: len(host.child.reports) for host in hosts}
    while (done := statistics.median_low(len(host.child.reports) - known[host.number] for host in hosts)) < rounds:
        for host in hosts:
            host.child.check()
        sys.stderr.write(f"\r{title}: {done} of {rounds} rounds   ")
        sys.stderr.flush()
        time.sleep(0.2)
    sys.stderr.write("\n")
    ended_s = time.monotonic()
    cores = psutil.cpu_count() or 1
    share = (sum(host.child.cpu_s() for host in hosts) - before) / (ended_s - began_s) / cores
    return Phase(thin_share is not None, began_s, ended_s, share, psutil.cpu_percent() / 100)


def _set_links(lan: Lan, thin_share: float | None) -> None:
    """`thin_share`: of the bandwidth, what the straggler's link has; None: there is no straggler."""
    for number in range(1, PEERS + 1):
        lan.shape(number, MBIT_PER_S * (thin_share if thin_share and number == STRAGGLER else 1.0))


def _round(peer: int, words: Words, ids: dict[str, int]) -> PeerRound:
    transfers: dict[int, float] = {ids[each]: seconds for each, seconds in words["transfers_s"].items()}
    return PeerRound(
        peer=peer,
        round=words["round"],
        began_s=words["began"],
        ended_s=words["ended"],
        local_steps=words["local_steps"],
        beside_straggler=STRAGGLER in transfers,
        transfer_s=max(transfers.values(), default=float("nan")),
        waited_s=words["waited_s"],
        loss_before=words["loss_before"],
    )


@dataclass(frozen=True, slots=True)
class Figures:
    """A phase of a run in numbers; of peers the median."""

    topology: str
    straggler: bool
    rounds: int
    """That count, over all peers."""
    median_s: float
    mean_s: float
    others_median_s: float
    """Without the straggler's own rounds."""
    others_mean_s: float
    transfer_s: float
    waited_s: float
    steps: float
    """Mean local steps of the others."""
    straggler_steps: float
    straggler_transfer_s: float
    cpu_share: float
    machine_share: float


def figures(run: Run, phase: Phase) -> Figures:
    """What a phase came to."""
    counted = run.counted(phase)
    others = {peer: rounds for peer, rounds in counted.items() if peer != STRAGGLER}
    flat = [each for rounds in others.values() for each in rounds]
    own = counted.get(STRAGGLER, [])
    return Figures(
        topology=run.topology,
        straggler=phase.straggler,
        rounds=sum(map(len, counted.values())),
        median_s=_median([straggler_figures.median_round_s(rounds) for rounds in counted.values()]),
        mean_s=_median([straggler_figures.mean_round_s(rounds) for rounds in counted.values()]),
        others_median_s=_median([straggler_figures.median_round_s(rounds) for rounds in others.values()]),
        others_mean_s=_median([straggler_figures.mean_round_s(rounds) for rounds in others.values()]),
        transfer_s=_median([each.transfer_s for each in flat]),
        waited_s=statistics.fmean(each.waited_s for each in flat),
        steps=statistics.fmean(each.local_steps for each in flat),
        straggler_steps=_median([each.local_steps for each in own]),
        straggler_transfer_s=_median([each.transfer_s for each in own]),
        cpu_share=phase.cpu_share,
        machine_share=phase.machine_share,
    )


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


def table(rows: Sequence[Figures]) -> Iterator[str]:
    """A line for each phase."""
    yield (
        f"{'':12} {'':10} {'round s':>16} {'without it':>16} {'':>6} {'transfer':>9} {'stood':>6} {'local':>6}"
        f" {'straggler':>16} {'CPU':>4} {'machine':>8}"
    )
    yield (
        f"{'topology':12} {'links':10} {'median':>8}{'mean':>8} {'median':>8}{'mean':>8} {'rounds':>6}"
        f" {'s':>9} {'s':>6} {'steps':>6} {'steps':>6}{'transfer s':>11} {'':4}"
    )
    for row in rows:
        yield (
            f"{row.topology:12} {'one thin' if row.straggler else 'equal':10} {row.median_s:8.3f}{row.mean_s:8.3f}"
            f" {row.others_median_s:8.3f}{row.others_mean_s:8.3f} {row.rounds:6} {row.transfer_s:9.3f}"
            f" {row.waited_s:6.2f} {row.steps:6.1f} {row.straggler_steps:6.1f}{row.straggler_transfer_s:10.2f}"
            f" {row.cpu_share:5.0%} {row.machine_share:7.0%}"
        )


def ratio(rows: Sequence[Figures], topology: str, what: str) -> float:
    """A figure under the straggler over the same with equal links; medians over phases."""
    thin = [getattr(row, what) for row in rows if row.topology == topology and row.straggler]
    equal = [getattr(row, what) for row in rows if row.topology == topology and not row.straggler]
    return _median(thin) / _median(equal)


def settling(run: Run) -> Iterator[str]:
    """How the local steps went after each change, a line for each phase and kind of round."""
    for number, phase in enumerate(run.phases):
        change = "start" if number == 0 else "change"
        yield f"{run.topology}, {'one thin' if phase.straggler else 'equal'}, local steps after the {change}:"
        for peer in range(1, PEERS + 1):
            for beside in (False, True):
                steps = run.series(phase, peer, beside_straggler=beside)
                if not steps or (peer == STRAGGLER and beside):
                    continue
                settled = straggler_figures.settled_after(steps)
                kind = "straggler" if peer == STRAGGLER else "beside it" if beside else "others"
                words = "not settled" if settled is None else f"settled after {settled}"
                turned = straggler_figures.reversals(steps[settled or 0 :])
                yield f"  peer {peer} {kind:9} {words:15} turned {turned:2}  {' '.join(map(str, steps))}"


def judge(rows: Sequence[Figures]) -> list[Bar]:
    """What this is held to."""
    names = {
        "round_time_all_peers": "median_s",
        "round_time_other_peers": "others_median_s",
        "mean_round_time_other_peers": "others_mean_s",
    }
    return [Bar(name, ratio(rows, "2-peer", what), 1.05, at_least=False) for name, what in names.items()]


def plot(path: Path, runs: Sequence[Run], loss: float, thin_share: float) -> None:
    """Loss against wall-clock, in the phase under the straggler that comes first."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for run, color, side in zip(runs, ("C0", "C3"), (-1, 1), strict=True):
        curve = first_curve(run)
        axes.plot(*zip(*curve, strict=True), color=color, label=run.topology)
        reached = straggler_figures.time_to(curve, loss)
        axes.plot([reached], [loss], "o", color=color)
        axes.annotate(
            f"{reached:.0f} s",
            (reached, loss),
            color=color,
            ha="center",
            va="top" if side < 0 else "bottom",
            xytext=(0, 8 * side),
            textcoords="offset points",
        )
    axes.set_ylim(loss - 0.1, loss + 1.0)  # the first round falls far, and tells nothing apart
    axes.axhline(loss, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xlabel(f"seconds; one of {PEERS} links at {thin_share:.0%} of {MBIT_PER_S:g} Mbit/s")
    axes.set_ylabel("validation loss, nats per byte, mean over peers")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def first_curve(run: Run) -> list[tuple[float, float]]:
    """Loss against time in a run's first phase."""
    first = run.phases[0]
    rounds = [each for each in run.rounds if each.began_s <= first.ended_s]
    return straggler_figures.loss_curve(rounds, run.began_s)


def measure(plans: Mapping[str, Sequence[tuple[bool, int]]], conditions: Conditions) -> list[Run]:
    """Makes the network and runs the topologies over it, one after another."""
    with Lan(PEERS, prefix=_PREFIX) as lan, nursery("straggler") as home:
        hosts = [Host(lan, number, home) for number in range(1, PEERS + 1)]
        for host in hosts:
            host.child.answer()
        return [run(lan, hosts, topology, conditions, plan) for topology, plan in plans.items()]


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share of the bandwidth; give more than 0 and at most 1")
    return share


def main() -> int:
    """Prints tables and bars; 1 where a bar is short and that was to be strict, 2 without the right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: under 4 minutes")
    parser.add_argument("--overlap", choices=("off", "auto"), default="off", help="as in a recipe (off)")
    parser.add_argument("--thin-share", type=_share, default=THIN_SHARE, help="of the bandwidth, the straggler's (0.1)")
    parser.add_argument("--plot", type=Path, help="draw loss against wall-clock there (PNG)")
    bars.add_options(parser)
    options = parser.parse_args()
    reason = why_not()
    if reason:
        sys.stderr.write(f"benchmarks.straggler cannot run: {reason}\n")
        return 2
    interrupt_on_signals()
    long, short = (15, 13) if options.quick else (40, 25)
    plans = {
        "2-peer": [(True, long), (False, short), (True, short)],
        "all-to-all": [(True, short), (False, short)],
    }
    if options.quick:
        del plans["2-peer"][2]
    try:
        runs = measure(plans, Conditions(options.overlap, options.thin_share))
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted; nothing is left\n")
        return 130
    except RuntimeError as error:
        sys.stderr.write(f"\nbenchmarks.straggler: {error}\n")
        return 1
    return report(runs, options)


def report(runs: Sequence[Run], options: argparse.Namespace) -> int:
    """Writes everything; returns the exit code."""
    rows = [figures(run, phase) for run in runs for phase in run.phases]
    curves = {run.topology: first_curve(run) for run in runs}
    loss = straggler_figures.common_loss(curves)
    to_loss = {name: straggler_figures.time_to(curve, loss) for name, curve in curves.items()}
    speed_up = to_loss["all-to-all"] / to_loss["2-peer"]
    all_to_all = ratio(rows, "all-to-all", "others_mean_s")
    lines = [
        *table(rows),
        "",
        *(line for run in runs for line in settling(run)),
        "",
        f"2-peer, mean round under the straggler over equal links: {ratio(rows, '2-peer', 'others_mean_s'):.3f}",
        f"all-to-all, the same: {all_to_all:.3f}",
        f"to a loss of {loss:.3f} under the straggler: 2-peer {to_loss['2-peer']:.1f} s, all-to-all "
        f"{to_loss['all-to-all']:.1f} s, {speed_up:.2f} times as long",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    if options.plot:
        plot(options.plot, runs, loss, options.thin_share)
    written = {
        "mbit_per_s": MBIT_PER_S,
        "thin_share": options.thin_share,
        "step_s": STEP_S,
        "discarded_rounds": DISCARD,
        "overlap": options.overlap,
        "phases": [asdict(row) for row in rows],
        "loss": loss,
        "seconds_to_loss": to_loss,
        "curves": curves,
        "local_steps": {
            run.topology: [
                {peer: run.series(phase, peer, beside_straggler=False) for peer in range(1, PEERS + 1)}
                for phase in run.phases
            ]
            for run in runs
        },
    }
    return bars.finish(judge(rows), written, json_path=options.json, strict=options.strict)


if __name__ == "__main__":
    sys.exit(main())
