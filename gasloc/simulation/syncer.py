"""The simulated syncer: takes in fragments, merges them by `gasloc.syncer_rules`, and sends them back."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from gasloc import pacing, syncer_rules
from gasloc.outer import MakeOptimizer, OuterStep
from gasloc.recipe import Recipe
from gasloc.simulation.link import Network
from gasloc.simulation.rules import Parts
from gasloc.syncer_rules import Arrival, Merge, SyncerOptions, Verdict, Wait
from peers.exchange import PeerId, Tensors

SYNCER: PeerId = "syncer"


@dataclass(frozen=True, slots=True)
class Report:
    """One learner's fragment, on its way to the syncer."""

    learner: PeerId
    part: int
    phi: Tensors
    """As it arrives."""
    size_bytes: int
    tokens: float
    steps: float
    version: int
    number: int
    """The learner's own count of reports, by which it knows which one was merged."""
    deliver: Callable[["Merged | None"], None]
    """Called with what came of it; None where it was refused and the learner needs fresh state."""


@dataclass(frozen=True, slots=True)
class Merged:
    """A merged fragment, as a learner gets it."""

    part: int
    theta: dict[str, Tensor]
    version: int
    number: int
    size_bytes: int


class Syncer:
    """Keeps Theta and the outer state of every fragment. It does not fail here, and merging takes no time."""

    def __init__(
        self,
        recipe: Recipe,
        initial: Tensors,
        parts: Parts,
        make: MakeOptimizer,
        network: Network,
        learners: Callable[[], list[float]],
        most_learners: int,
        parcel: Callable[[Tensors], tuple[dict[str, Tensor], int]],
    ) -> None:
        """`learners` gives the step times, seconds, of the learners that are up now, of `most_learners`.

        `parcel` gives what arrives of tensors, and in how many bytes.
        """
        self._theta = [{name: initial[name].detach().clone() for name in part} for part in parts]
        self._outer = [OuterStep(theta, make) for theta in self._theta]
        self._recipe = recipe
        self._options = options_of(recipe, most_learners)
        self._state = syncer_rules.start([0] * len(self._theta))
        self._reports: list[dict[PeerId, Report]] = [{} for _ in self._theta]
        self._merge_rule = recipe.syncer.merge
        self._network = network
        self._learners = learners
        self._parcel = parcel
        self._embeddings = {name for name in initial if name.endswith("embedding.weight")}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._upload_s = self._download_s = 0.0
        self._sending: set[asyncio.Task[None]] = set()

    async def report(self, report: Report) -> None:
        """Takes a learner's fragment over the links; `report.deliver` is called in good time, or never."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await self._network.transfer(report.learner, SYNCER, report.size_bytes)
        self._upload_s = pacing.smooth(self._upload_s, loop.time() - began_s)
        arrival = Arrival(
            learner=report.learner,
            at_s=loop.time(),
            tokens=report.tokens,
            steps=report.steps,
            run=self._options.run,
            version=report.version,
        )
        limit = syncer_rules.stale_versions(
            report.steps,
            len(self._learners()),
            local_steps=self._recipe.local_steps,
            stale_rounds=self._recipe.stale_rounds,
        )
        options = replace(self._options, stale_versions=limit)
        self._state, verdict, _ = syncer_rules.receive(self._state, report.part, arrival, options)
        if verdict is Verdict.REFUSED:
            report.deliver(None)
            return
        self._reports[report.part][report.learner] = report
        self._advance(report.part)

    def _advance(self, part: int) -> None:
        loop = asyncio.get_running_loop()
        timer = self._timers.pop(part, None)
        if timer is not None:
            timer.cancel()
        times_s = self._learners()
        self._options = replace(
            self._options,
            learners=max(len(times_s), self._options.quorum),
            step_time_s=sum(times_s) / len(times_s) if times_s else 0.0,
            sync_time_s=self._upload_s + self._download_s,
        )
        self._state, decision, _ = syncer_rules.advance(self._state, part, loop.time(), self._options)
        match decision:
            case Merge(arrivals):
                self._merge(part, arrivals)
            case Wait(until_s):
                # a window without end is woken by the next report alone
                if until_s > loop.time() and len(self._reports[part]) >= self._options.quorum:
                    self._timers[part] = loop.call_at(until_s, self._advance, part)

    def _merge(self, part: int, arrivals: tuple[Arrival, ...]) -> None:
        reports = {arrival.learner: self._reports[part].pop(arrival.learner) for arrival in arrivals}
        theta = self._theta[part]
        delta = syncer_rules.merge(
            theta,
            {learner: report.phi for learner, report in reports.items()},
            syncer_rules.token_shares(arrivals),
            self._merge_rule,
            self._embeddings,
        )
        self._outer[part].step({name: tensor - delta[name] for name, tensor in theta.items()})
        merged = {name: tensor.clone() for name, tensor in theta.items()}
        version = self._state.fragments[part].version
        for report in reports.values():
            task = asyncio.ensure_future(self._send(report, merged, version))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send(self, report: Report, theta: dict[str, Tensor], version: int) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        arriving, size_bytes = self._parcel(theta)
        try:
            await self._network.transfer(SYNCER, report.learner, size_bytes)
        except ConnectionError:
            return  # the learner died; it takes state from another when it is back
        self._download_s = pacing.smooth(self._download_s, loop.time() - began_s)
        report.deliver(Merged(report.part, arriving, version, report.number, size_bytes))


def options_of(recipe: Recipe, learners: int) -> SyncerOptions:
    """The syncer's options for a number of learners. Raises `RecipeError` where the quorum is more than that."""
    return SyncerOptions(
        run=recipe.digest,
        learners=learners,
        quorum=recipe.syncer.quorum,
        grace_share=recipe.syncer.grace_share,
        overlap_steps=recipe.syncer.overlap_steps,
    )


def versions_in(state: Mapping[str, Tensor], parts: int) -> list[int]:
    """The fragments' versions out of a learner's state."""
    return [int(state[f"version/{part}"]) for part in range(parts)]
