"""When Decoupled DiLoCo's syncer merges a fragment, and of what: a pure state machine, time given as numbers.

Decoupled DiLoCo (arXiv 2604.21428): learners send a fragment and train on. The syncer merges it when a minimum
quorum has reported, after an adaptive grace window that spends only the network's own slack, so that more
learners are counted at no cost to anyone. Nothing here reads a clock; `now_s` and `at_s` are seconds of one
clock that never goes back.

    state, verdict, reason = receive(state, fragment, arrival, options)       # for each report that comes
    state, decision, reason = advance(state, fragment, now_s, options)        # then, and at `Wait.until_s`
    delta = merge(theta, phis, token_shares(decision.arrivals), ...)          # for a `Merge`; then the outer step
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from torch import Tensor

from gasloc.averaging import rda, token_weights, weighted_mean
from gasloc.errors import RecipeError
from gasloc.mixing import check_layout

MERGE_RULES = ("rda", "mean")
SLOWEST = 8
"""A learner may be so many times `stale_rounds` rounds' worth of merges behind, if it is only slow."""


@dataclass(frozen=True, slots=True)
class SyncerOptions:
    """What the syncer goes by. The two times are measured while it runs: make a new one with `replace`.

    Raises `RecipeError` where the quorum is not from 1 to the learners, or another value is out of its range.
    """

    run: str
    """The recipe's digest. A report of another run is refused."""
    learners: int
    """Learners of the run (M). When all have reported, nothing is waited for."""
    quorum: int = 1
    """Learners that must have reported before a merge (K)."""
    grace_share: float = 0.5
    """Share of the slack that is waited for more learners (g), from 0 to under 1."""
    overlap_steps: int = 2
    """Steps a learner may train before the merged fragment is due back (tau)."""
    step_time_s: float = 0.0
    """A learner's step time. 0 or not finite: not measured yet, and the grace window is 0."""
    sync_time_s: float = 0.0
    """Upload, merge and download of one fragment, without the waiting. Not finite: unknown, the window is 0."""
    stale_versions: int = 5
    """A learner whose fragment is more merges behind than this is refused, and takes fresh state."""
    look_s: float = 1.0
    """How soon to look again while the quorum is short, where only a new report changes anything."""

    def __post_init__(self) -> None:
        if not 1 <= self.quorum <= self.learners:
            raise RecipeError(
                f"quorum = {self.quorum} with {self.learners} learners: "
                "a merge needs from 1 to all of the learners, so change one of the two"
            )
        if not 0 <= self.grace_share < 1:
            raise RecipeError(f"grace_share = {self.grace_share}: it is a share of the slack, from 0 to under 1")
        if self.overlap_steps < 0:
            raise RecipeError(f"overlap_steps = {self.overlap_steps}: it is 0 or more")
        if self.stale_versions < 0:
            raise RecipeError(f"stale_versions = {self.stale_versions}: it is 0 or more")
        if not 0 < self.look_s < math.inf:
            raise RecipeError(f"look_s = {self.look_s}: it is a number of seconds above 0")


@dataclass(frozen=True, slots=True)
class Arrival:
    """One learner's report of one fragment. Its tensors are kept elsewhere, by learner."""

    learner: str
    at_s: float
    """When the whole of it had come."""
    tokens: float
    """Tokens behind it: trained since the learner last took a merge of this fragment, or joined. Above 0."""
    steps: float
    """Local steps behind it. Above 0."""
    run: str
    version: int
    """The version of the fragment that the learner last took."""


@dataclass(frozen=True, slots=True)
class Nothing:
    """Nobody has reported. Only a report changes that."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Look again at `until_s`, or when a report comes, whichever is first."""

    until_s: float


@dataclass(frozen=True, slots=True)
class Merge:
    """Merge with exactly these reports: one a learner, sorted by learner, at least the quorum."""

    arrivals: tuple[Arrival, ...]


Decision = Nothing | Wait | Merge


def grace_s(quorum_time_s: float, options: SyncerOptions) -> float:
    """The grace window in seconds: `g * (tau * step_time - quorum_time - sync_time)`, never below 0.

    `quorum_time_s` is from the first report to the one that made the quorum.
    """
    slack_s = options.overlap_steps * options.step_time_s - quorum_time_s - options.sync_time_s
    return options.grace_share * slack_s if math.isfinite(slack_s) and slack_s > 0 else 0.0


def decide(now_s: float, arrivals: Iterable[Arrival], options: SyncerOptions) -> tuple[Decision, str]:
    """What to do at `now_s` with the reports of one fragment since its last merge, and the reason in words.

    Merges once all learners have reported, or the quorum has and the grace window after it has passed; never
    below the quorum, and never waits past the window. A learner that reported twice counts once: its latest
    report is merged, its first one sets the times, so that nobody can draw the window out. Reports later than
    `now_s` have not come yet.
    """
    reports = once_each(arrival for arrival in arrivals if arrival.at_s <= now_s)
    count, needed = len(reports), options.quorum
    if count == 0:
        return Nothing(), "no learner has reported"
    if count < needed:
        until_s = now_s + options.look_s
        return Wait(until_s), f"{count} of the {needed} learners of the quorum reported: look again at {until_s:.3f} s"
    if count >= options.learners:
        return Merge(reports), f"all {options.learners} learners reported"
    times_s = sorted(report.at_s for report in reports)
    quorum_at_s = times_s[needed - 1]
    window_s = grace_s(quorum_at_s - times_s[0], options)
    until_s = quorum_at_s + window_s
    have = f"{count} of {options.learners} learners reported, quorum {needed}"
    if now_s < until_s:
        return Wait(until_s), f"{have}: grace window of {window_s:.3f} s, look again at {until_s:.3f} s"
    if window_s == 0:
        return Merge(reports), f"{have}: no slack for a grace window"
    return Merge(reports), f"{have}: the grace window of {window_s:.3f} s has passed"


def once_each(arrivals: Iterable[Arrival]) -> tuple[Arrival, ...]:
    """One report a learner, sorted by learner: its latest, with the time of its first."""
    kept: dict[str, Arrival] = {}
    for arrival in sorted(arrivals, key=lambda arrival: arrival.at_s):
        first = kept.get(arrival.learner)
        kept[arrival.learner] = arrival if first is None else replace(arrival, at_s=first.at_s)
    return tuple(kept[learner] for learner in sorted(kept))


@dataclass(frozen=True, slots=True)
class FragmentState:
    """What the syncer knows of one fragment."""

    version: int = 0
    """Merges so far; a learner tells which one it took last."""
    pending: tuple[Arrival, ...] = ()
    """Reports for the next merge: one a learner, with the time of its first since the last merge."""
    merged_at_s: float | None = None
    merged: tuple[str, ...] = ()
    """The learners of the last merge."""


@dataclass(frozen=True, slots=True)
class SyncerState:
    """All fragments. Never changed: transitions return a new one."""

    fragments: tuple[FragmentState, ...]


class Verdict(StrEnum):
    """What became of a report."""

    ACCEPTED = "accepted"
    AGAIN = "again"
    """Accepted in place of the same learner's earlier report for this merge."""
    LATE = "late"
    """It missed a merge, and counts in the next one."""
    REFUSED = "refused"
    """Not kept."""


def stale_versions(steps: float, learners: int, *, local_steps: int, stale_rounds: int) -> int:
    """How many merges behind a report may be, with `steps` local steps behind it and so many live learners.

    One learner's round may see as many merges as there are learners. A slow learner is behind by its slowness and
    counts all the same, up to `SLOWEST` times; one that trained on for `stale_rounds` rounds without a merge, while
    others had some, was cut off.
    """
    slow = steps <= stale_rounds * local_steps
    return stale_rounds * max(learners, 1) * (SLOWEST if slow else 1)


def start(versions: Sequence[int]) -> SyncerState:
    """A syncer with nothing pending: all zeros for a new run, or each fragment's version from a checkpoint.

    Raises `RecipeError` for no fragments and `ValueError` for a negative version.
    """
    if not versions:
        raise RecipeError("fragments = 0: a syncer needs at least 1")
    for index, version in enumerate(versions):
        if version < 0:
            raise ValueError(f"version {version} of fragment {index} is negative")
    return SyncerState(tuple(FragmentState(version) for version in versions))


def receive(
    state: SyncerState, fragment: int, arrival: Arrival, options: SyncerOptions
) -> tuple[SyncerState, Verdict, str]:
    """Takes in one learner's report of one fragment: the new state, what became of it, and the reason in words.

    Refused, with the state unchanged: another run, no such fragment, tokens or steps that are no number above 0,
    a version over `stale_versions` behind. A version ahead of ours is accepted: it is what the learners hold
    after a syncer restarted from an older checkpoint, and the outer gradient is anchored at our own fragment
    whatever the learner started from.
    """
    who = f"learner {arrival.learner}"
    refusal = _refusal(state, fragment, arrival, options)
    if refusal:
        return state, Verdict.REFUSED, f"{who} refused: {refusal}"
    held = state.fragments[fragment]
    again = any(report.learner == arrival.learner for report in held.pending)
    # The order of arrival decides what is latest here, not at_s: two reports may carry the same time.
    first_at_s = min([arrival.at_s, *(r.at_s for r in held.pending if r.learner == arrival.learner)])
    others = [report for report in held.pending if report.learner != arrival.learner]
    pending = once_each([*others, replace(arrival, at_s=first_at_s)])
    changed = _with(state, fragment, replace(held, pending=pending))
    what = f"fragment {fragment} at version {held.version}"
    if again:
        return changed, Verdict.AGAIN, f"{who} reported {what} again: its latest counts, once"
    if arrival.version < held.version:
        behind = held.version - arrival.version
        return changed, Verdict.LATE, f"{who} is {behind} behind on {what}: it counts in the next merge"
    if arrival.version > held.version:
        ahead = arrival.version - held.version
        return changed, Verdict.ACCEPTED, f"{who} is {ahead} ahead of {what}: the syncer restarted from older state"
    return changed, Verdict.ACCEPTED, f"{who} reported {what}"


def advance(
    state: SyncerState, fragment: int, now_s: float, options: SyncerOptions
) -> tuple[SyncerState, Decision, str]:
    """Decides on one fragment at `now_s`. On a merge its reports leave the state and its version rises by one.

    So no report is merged twice, and what comes while the tensors are being merged counts in the next merge.
    Raises `IndexError` for a fragment that is not there.
    """
    if not 0 <= fragment < len(state.fragments):
        raise IndexError(f"there is no fragment {fragment}, they go from 0 to {len(state.fragments) - 1}")
    held = state.fragments[fragment]
    decision, reason = decide(now_s, held.pending, options)
    if not isinstance(decision, Merge):
        return state, decision, reason
    learners = tuple(report.learner for report in decision.arrivals)
    changed = FragmentState(
        version=held.version + 1,
        pending=tuple(report for report in held.pending if report.learner not in learners),
        merged_at_s=now_s,
        merged=learners,
    )
    return _with(state, fragment, changed), decision, reason


def token_shares(arrivals: Sequence[Arrival]) -> dict[str, float]:
    """Each learner's token weight, `tokens * (tokens / steps)`, not normalised.

    Raises `ValueError` for tokens or steps that are not a finite number above 0.
    """
    weights = token_weights([arrival.tokens for arrival in arrivals], [arrival.steps for arrival in arrivals])
    return dict(zip((arrival.learner for arrival in arrivals), weights, strict=True))


def merge(
    theta: Mapping[str, Tensor],
    phis: Mapping[str, Mapping[str, Tensor]],
    weights: Mapping[str, float],
    rule: str = "rda",
    embeddings: Collection[str] = (),
) -> dict[str, Tensor]:
    """The outer gradient Delta of one fragment, anchored at the syncer's own `theta`: new tensors.

    `phis` are the learners' fragments by learner, any shapes as in `theta`; `weights` one for each of them.
    `rule` is "rda" (Radial-Directional Averaging, with the plain weighted mean for the tensors named in
    `embeddings`) or "mean" (plain everywhere). Float32, or float64 where `theta` is; float16 and bfloat16 phis
    are widened. Sums go in sorted order of learners, so the result does not depend on who came first. Memory:
    one fragment a learner beside the result.

    Raises `RecipeError` for another rule, `ModelError` where a phi does not fit theta, `ValueError` for no phis,
    for weights of other learners than phis, or a weight not above 0.
    """
    if rule not in MERGE_RULES:
        raise RecipeError(f"merge = '{rule}' is not one of: {', '.join(MERGE_RULES)}")
    if phis.keys() != weights.keys():
        raise ValueError(f"fragments of {sorted(phis)} but weights of {sorted(weights)}: give one weight a learner")
    learners = sorted(phis)
    for learner in learners:
        check_layout(theta, phis[learner], of=f"learner {learner}")
    differences = [
        {name: tensor - phis[learner][name].to(tensor) for name, tensor in theta.items()} for learner in learners
    ]
    shares = [weights[learner] for learner in learners]
    return weighted_mean(differences, shares) if rule == "mean" else rda(differences, shares, embeddings)


def _refusal(state: SyncerState, fragment: int, arrival: Arrival, options: SyncerOptions) -> str:
    """Why a report cannot be kept; empty where it can."""
    if arrival.run != options.run:
        return f"it is of run {arrival.run}, this syncer of run {options.run}"
    if not 0 <= fragment < len(state.fragments):
        return f"there is no fragment {fragment}, they go from 0 to {len(state.fragments) - 1}"
    for what, value in (("tokens", arrival.tokens), ("steps", arrival.steps)):
        if not (value > 0 and math.isfinite(value)):
            return f"{what} = {value} is not a number above 0"
    if not math.isfinite(arrival.at_s):
        return f"its time {arrival.at_s} is not a number"
    behind = state.fragments[fragment].version - arrival.version
    if behind > options.stale_versions:
        return f"fragment {fragment} is {behind} merges behind, more than {options.stale_versions}: take fresh state"
    return ""


def _with(state: SyncerState, fragment: int, changed: FragmentState) -> SyncerState:
    return SyncerState((*state.fragments[:fragment], changed, *state.fragments[fragment + 1 :]))
