"""What a chaos run came to: a line for each thing that must hold."""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import safetensors.torch

from benchmarks.chaos_swarm import Life
from gasloc import mixing

MOST_HEAL_S = 60.0
MOST_SPREAD = 0.2
LEAST_MIXED = 0.6
WARM_S = 30.0
"""What a process takes in its first seconds, while it loads and warms up, is not judged."""
LONG_LIVED_SAMPLES = 60

Records = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that must hold, and what was found."""

    what: str
    figure: str
    ok: bool

    def __str__(self) -> str:
        return f"{'ok  ' if self.ok else 'FAIL'}  {self.what}: {self.figure}"


@dataclass(frozen=True, slots=True)
class Cut:
    """Two halves that could not see each other for a while, by peer id; times in unix seconds."""

    one: frozenset[str]
    other: frozenset[str]
    began: float
    healed: float


def loss(events: Records) -> Line:
    """The validation loss fell by a quarter."""
    values = [v for _, v in sorted((e["time"], e["validation_loss"]) for e in events if e["event"] == "evaluation")]
    if not values:
        return Line("validation loss fell by a quarter", "none was measured", False)
    first, last = statistics.mean(values[:3]), statistics.mean(values[-6:])
    return Line("validation loss fell by a quarter", f"{first:.3f} -> {last:.3f}", last < 0.75 * first)


def finite(events: Records) -> Line:
    """Nobody honest ever had a loss or a distance that is not a number, or had to roll back."""
    rounds = [event for event in events if event["event"] == "round"]
    bad = [event for event in rounds if not math.isfinite(event["loss"]) or event["rolled_back"]]
    return Line("every honest peer's state stayed finite", f"{len(rounds) - len(bad)} of {len(rounds)} rounds", not bad)


def goodput(events: Records) -> Line:
    """The share of rounds that mixed, of those with somebody in sight."""
    tried = [event for event in events if event["event"] == "round" and event["tried"]]
    share = sum(bool(event["mixed"]) for event in tried) / len(tried) if tried else 0.0
    what = f"rounds mixed, of those with somebody in sight, over {LEAST_MIXED}"
    return Line(what, f"{share:.3f} of {len(tried)}", share > LEAST_MIXED)


def spread(lives: Collection[Life]) -> Line:
    """Of the anchors in the last checkpoints of honest peers that stopped in order."""
    states = []
    for life in lives:
        found = sorted((life.folder / "checkpoints").glob("*/*.safetensors"))
        if found and life.process.returncode == 0:
            tensors = safetensors.torch.load_file(found[-1])
            states.append({name: tensor for name, tensor in tensors.items() if name.startswith("anchor/")})
    value = mixing.spread(states) if len(states) > 1 else math.nan
    return Line(f"replica spread under {MOST_SPREAD}", f"{value:.4f} of {len(states)}", value < MOST_SPREAD)


def flat(what: str, column: int, slack: float, least: float, lives: Collection[Life]) -> Line:
    """Whether a column of the samples is no higher at the end than after warm-up, give or take."""
    series = [(life, [sample[column] for sample in life.samples if sample[0] > WARM_S]) for life in lives]
    long = [(life, values) for life, values in series if len(values) >= LONG_LIVED_SAMPLES]
    risen = []
    for life, values in long:
        third = len(values) // 3
        first, last = statistics.median(values[:third]), statistics.median(values[-third:])
        if last > max(first * (1 + slack), first + least):
            risen.append(f"{life.name} {first:.0f} -> {last:.0f}")
    most = max((len(life.rounds()) for life, _ in long), default=0)
    figure = ", ".join(risen) or f"{len(long)} peers, up to {most} rounds"
    return Line(f"{what} flat after warm-up", figure, bool(long) and not risen)


def healed(cuts: Collection[Cut], events_of: Mapping[str, Records]) -> Line:
    """After each cut, how long until one of a half mixed with one of the other; and both halves trained meanwhile."""
    what = f"halves mix again within {MOST_HEAL_S:g} s of a heal, and trained while apart"
    if not cuts:
        return Line(what, "nobody was cut off", True)
    rounds_of = {peer: [e for e in events if e["event"] == "round"] for peer, events in events_of.items()}
    waits_s = [_crossing(cut, rounds_of) - cut.healed for cut in cuts]
    idle = sum(not _trained(half, cut, rounds_of) for cut in cuts for half in (cut.one, cut.other))
    figure = f"{len(cuts)} cuts, at most {max(waits_s):.0f} s" + (f", {idle} halves stood still" if idle else "")
    return Line(what, figure, max(waits_s) <= MOST_HEAL_S and not idle)


def _crossing(cut: Cut, rounds_of: Mapping[str, Records]) -> float:
    """When the first round after the heal ended that mixed across the cut; infinite where none did."""
    across = [(peer, cut.other) for peer in cut.one] + [(peer, cut.one) for peer in cut.other]
    return min(
        (
            float(event["time"])
            for peer, others in across
            for event in rounds_of.get(peer, ())
            if event["time"] > cut.healed and others & set(event["partners"])
        ),
        default=math.inf,
    )


def _trained(half: Collection[str], cut: Cut, rounds_of: Mapping[str, Records]) -> bool:
    """Whether one of these ended a round while they were apart."""
    return any(cut.began < event["time"] < cut.healed for peer in half for event in rounds_of.get(peer, ()))


def liar(events: Records, liars: Collection[str]) -> Line:
    """Those who lied were clipped, refused or set aside by others."""
    rounds = [event for event in events if event["event"] == "round"]
    clipped = sum(bool(set(event["clipped"]) & set(liars)) for event in rounds)
    refused = sum(any(peer in event["reason"] for peer in liars) and "refused" in event["reason"] for event in rounds)
    aside = sum(event["event"] == "warning" and any(peer in event["message"] for peer in liars) for event in events)
    figure = f"clipped in {clipped} rounds, refused in {refused}, told of {aside} times"
    return Line("the liar was noticed", figure, clipped + refused + aside > 0)
