"""The syncer of Decoupled DiLoCo: keeps Theta, takes in fragments, merges them, and sends them back.

Decisions are those of `gasloc.syncer_rules`; here they meet a clock, tensors and waiting learners. Nothing here
knows libp2p: `layout` and `handle` are given to `peers.courier.Courier.serve`, and work in any event loop.
"""

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gasloc import fragments as fragmentation
from gasloc import pacing, syncer_rules
from gasloc.delivery import ReportCard, read_card
from gasloc.errors import CheckpointError, ModelError
from gasloc.learner import MERGES
from gasloc.outer import OuterStep, make_outer
from gasloc.recipe import Recipe
from gasloc.syncer_rules import Arrival, Merge, SyncerOptions, Verdict, Wait
from peers.courier import Parcel
from peers.donor import Meta
from peers.errors import BehindError, RefusedError
from peers.exchange import Layout, PeerId, Tensors, layout_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Merged:
    """What is told of one merge."""

    fragment: int
    version: int
    """Merges of this fragment so far, this one included."""
    round: int
    """The highest round that a learner has reported."""
    learners: tuple[PeerId, ...]
    shares: Mapping[PeerId, float]
    """Each learner's share of the merge; they sum to 1."""
    tokens: float
    """Trained on for it, by all of them."""
    live: int
    """Learners of the run at the time (M)."""
    waited_s: float
    """From the first report to the decision."""
    merge_s: float
    norm: float
    """Length of the outer gradient."""
    reason: str


@dataclass(frozen=True, slots=True)
class _Result:
    tensors: Tensors
    version: int
    learners: int


@dataclass(slots=True)
class _Learner:
    """What was measured of a learner."""

    step_time_s: float = math.nan
    sync_time_s: float = math.nan
    reported_at_s: float = math.nan


class _Fragment:
    """One fragment: its part of Theta, its outer step, and the reports that wait."""

    def __init__(self, names: Sequence[str], theta: Tensors, recipe: Recipe) -> None:
        self.theta = {name: theta[name].detach().clone() for name in names}
        self.outer = OuterStep(self.theta, make_outer(recipe.outer))
        self.layout = layout_of(self.theta)
        self.version = 0
        """Merges that are in `theta`; changes together with it."""
        self.phis: dict[PeerId, Tensors] = {}
        self.waiting: dict[PeerId, asyncio.Future[_Result]] = {}
        self.news = asyncio.Event()
        self.driver: asyncio.Task[None] | None = None


class Syncer:
    """Merges the learners' fragments. All methods but `snapshot` and `state_dict` belong to one event loop.

    A learner's report is answered with the merge that it went into, after the quorum and the grace window. The
    quorum is the recipe's, or the number of live learners where those are fewer, so that no death stops a merge.
    """

    def __init__(
        self,
        recipe: Recipe,
        theta: Tensors,
        *,
        embeddings: Collection[str] = (),
        learners: Callable[[], Collection[PeerId]] = tuple,
        on_merge: Callable[[Merged], None] = lambda merged: None,
    ) -> None:
        """`theta`: the initial parameters, float32 or float64, copied.

        `embeddings` are averaged plainly under "rda". `learners` tells who is live now; a learner whose report
        waits is counted in any case. `on_merge` is called on the event loop after each merge. Raises
        `RecipeError` where there are more fragments than tensors.
        """
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in theta.items()}
        cut = fragmentation.fragment(sizes, recipe.fragments)
        self.imbalance = cut.imbalance
        """Largest fragment over the mean one."""
        self.round = 0
        """The highest round that a learner has reported."""
        self.merges = 0
        """Since this process began."""
        self._recipe = recipe
        self._fragments = [_Fragment(names, theta, recipe) for names in cut.parts]
        self._state = syncer_rules.start([0] * len(self._fragments))
        self._embeddings = frozenset(embeddings)
        self._live = learners
        self._on_merge = on_merge
        self._known: dict[PeerId, _Learner] = {}
        self._lock = threading.Lock()
        """Held while Theta, outer state and versions change, so that a snapshot is of one merge or the next."""
        self._closed = False

    def layout(self, peer: PeerId, meta: Meta) -> Layout:
        """The layout that a learner's report must have. Raises `RefusedError` for one that cannot count.

        `BehindError` where the learner needs fresh state. Nothing is kept: the report has not come yet.
        """
        card = read_card(meta)
        self._receive(peer, card)
        return self._fragments[card.fragment].layout

    async def handle(self, peer: PeerId, parcel: Parcel) -> Parcel:
        """Takes in a learner's fragment; returns the merged one once it is merged.

        Raises `RefusedError` for a report that cannot count, and for one that a later one of the same learner
        replaced. When this is cancelled the fragment still counts: all of it has come.
        """
        began_s = self._now()
        card = read_card(parcel.meta)
        state, verdict, reason = self._receive(peer, card)
        fragment = self._fragments[card.fragment]
        if layout_of(parcel.tensors) != fragment.layout:
            raise RefusedError(f"its tensors are not those of fragment {card.fragment}")
        self._state = state
        _log.debug("%s", reason)
        if verdict is Verdict.AGAIN:
            self._replace(fragment, peer)
        self._measure(peer, card)
        self.round = max(self.round, card.round)
        fragment.phis[peer] = parcel.tensors
        result = fragment.waiting[peer] = asyncio.get_running_loop().create_future()
        self._wake(card.fragment)
        merged = await asyncio.shield(result)
        meta = {"version": merged.version, "learners": merged.learners, "held_s": self._now() - began_s}
        return Parcel(merged.tensors, meta)

    async def close(self) -> None:
        """Refuses what waits and what comes; ends after the merges that are under way."""
        self._closed = True
        drivers = [fragment.driver for fragment in self._fragments if fragment.driver is not None]
        for fragment in self._fragments:
            fragment.news.set()
        await asyncio.gather(*drivers, return_exceptions=True)
        for fragment in self._fragments:
            for waiting in fragment.waiting.values():
                _refuse(waiting, "the syncer is leaving")
            fragment.waiting.clear()

    def snapshot(self) -> tuple[int, dict[str, Tensor]]:
        """Round and state for a learner: `anchor/NAME`, and the versions as `outer/merges`. Copies; any thread."""
        with self._lock:
            theta = {f"anchor/{name}": tensor.clone() for name, tensor in self._theta().items()}
            versions = [fragment.version for fragment in self._fragments]
            return self.round, theta | {f"outer/{MERGES}": torch.tensor(versions, dtype=torch.int64)}

    def state_dict(self) -> dict[str, Any]:
        """`{"meta": plain values, "tensors": copies}`: what a restart needs. May be called from any thread."""
        with self._lock:
            tensors = {f"anchor/{name}": tensor.clone() for name, tensor in self._theta().items()}
            for fragment in self._fragments:
                state = fragment.outer.momentum_tensors()
                tensors |= {f"outer/{name}": tensor.clone() for name, tensor in state.items()}
            return {
                "meta": {"round": self.round, "versions": [fragment.version for fragment in self._fragments]},
                "tensors": tensors,
            }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave; before any report. Raises `CheckpointError` where it does not fit."""
        tensors: Mapping[str, Tensor] = state["tensors"]
        anchor = {name.removeprefix("anchor/"): t for name, t in tensors.items() if name.startswith("anchor/")}
        outer = {name.removeprefix("outer/"): t for name, t in tensors.items() if name.startswith("outer/")}
        versions = [int(version) for version in state["meta"]["versions"]]
        if layout_of(anchor) != layout_of(self._theta()) or len(versions) != len(self._fragments):
            raise CheckpointError(
                "the syncer's checkpoint is of another model or other fragments; choose another --dir"
            )
        try:
            for fragment, version in zip(self._fragments, versions, strict=True):
                own = {label: t for label, t in outer.items() if label.partition("/")[2] in fragment.theta}
                fragment.outer.load_momentum(own)
                for name, tensor in fragment.theta.items():
                    tensor.copy_(anchor[name])
                fragment.version = version
        except ModelError as error:
            raise CheckpointError(f"the syncer's checkpoint does not fit: {error}") from None
        self.round = int(state["meta"]["round"])
        self._state = syncer_rules.start(versions)

    def _receive(self, peer: PeerId, card: ReportCard) -> tuple[syncer_rules.SyncerState, Verdict, str]:
        if self._closed:
            raise RefusedError("the syncer is leaving")
        arrival = Arrival(peer, self._now(), card.tokens, card.steps, self._recipe.digest, card.version)
        limit = syncer_rules.stale_versions(
            card.steps,
            len(self._live()),
            local_steps=self._recipe.local_steps,
            stale_rounds=self._recipe.stale_rounds,
        )
        options = self._options({*self._live(), peer}, stale_versions=limit)
        state, verdict, reason = syncer_rules.receive(self._state, card.fragment, arrival, options)
        if verdict is Verdict.REFUSED:
            known = card.fragment < len(self._fragments)
            behind = known and self._state.fragments[card.fragment].version - card.version > limit
            raise BehindError(reason) if behind else RefusedError(reason)
        return state, verdict, reason

    def _options(self, learners: Collection[PeerId], *, stale_versions: int = 0) -> SyncerOptions:
        """What holds now, with these learners."""
        config = self._recipe.syncer
        count = max(len(learners), 1)
        return SyncerOptions(
            run=self._recipe.digest,
            learners=count,
            quorum=min(config.quorum, count),
            grace_share=config.grace_share,
            overlap_steps=config.overlap_steps,
            step_time_s=_over(min, [self._known[peer].step_time_s for peer in learners if peer in self._known]),
            sync_time_s=_over(median, [self._known[peer].sync_time_s for peer in learners if peer in self._known]),
            stale_versions=stale_versions,
        )

    def _learners(self, index: int) -> set[PeerId]:
        """The live learners and those whose reports of this fragment wait."""
        return {*self._live(), *(arrival.learner for arrival in self._state.fragments[index].pending)}

    def _measure(self, peer: PeerId, card: ReportCard) -> None:
        """A learner's step time out of the time between its reports of a fragment, and what it says of the way."""
        known = self._known.setdefault(peer, _Learner())
        known.sync_time_s = card.sync_time_s
        now_s = self._now()
        if card.fragment == 0:
            passed_s = now_s - known.reported_at_s
            if math.isfinite(passed_s):
                before_s = known.step_time_s if math.isfinite(known.step_time_s) else 0.0
                known.step_time_s = pacing.smooth(before_s, passed_s / card.steps)
            known.reported_at_s = now_s

    def _replace(self, fragment: _Fragment, peer: PeerId) -> None:
        earlier = fragment.waiting.pop(peer, None)
        if earlier is not None:
            _refuse(earlier, "a later report of this learner takes its place")

    def _wake(self, index: int) -> None:
        """Has the fragment's driver look again; starts it where none runs."""
        fragment = self._fragments[index]
        fragment.news.set()
        if fragment.driver is None or fragment.driver.done():
            fragment.driver = asyncio.create_task(self._drive(index))

    async def _drive(self, index: int) -> None:
        """Decides and merges until nothing waits."""
        fragment = self._fragments[index]
        while not self._closed:
            fragment.news.clear()
            options = self._options(self._learners(index))
            self._state, decision, reason = syncer_rules.advance(self._state, index, self._now(), options)
            if isinstance(decision, Merge):
                await self._merge(index, decision, options, reason)
            elif isinstance(decision, Wait):
                await _wait_for(fragment.news, decision.until_s)
            else:
                return

    async def _merge(self, index: int, decision: Merge, options: SyncerOptions, reason: str) -> None:
        """Merges exactly these reports, and answers them."""
        fragment = self._fragments[index]
        began_s = self._now()
        arrivals = decision.arrivals
        phis = {arrival.learner: fragment.phis.pop(arrival.learner) for arrival in arrivals}
        waiting = [fragment.waiting.pop(arrival.learner) for arrival in arrivals]
        version = self._state.fragments[index].version
        weights = syncer_rules.token_shares(arrivals)
        try:
            tensors, norm = await asyncio.to_thread(self._compute, fragment, phis, weights, version)
        except Exception as error:
            _log.exception("fragment %d could not be merged", index)
            for each in waiting:
                _refuse(each, f"the syncer could not merge it: {error}")
            return
        for each in waiting:
            if not each.done():
                each.set_result(_Result(tensors, version, len(arrivals)))
        self.merges += 1
        total = math.fsum(weights.values())
        self._on_merge(
            Merged(
                fragment=index,
                version=version,
                round=self.round,
                learners=tuple(phis),
                shares={learner: weight / total for learner, weight in weights.items()},
                tokens=math.fsum(arrival.tokens for arrival in arrivals),
                live=options.learners,
                waited_s=began_s - min(arrival.at_s for arrival in arrivals),
                merge_s=self._now() - began_s,
                norm=norm,
                reason=reason + self._lowered(options),
            )
        )

    def _lowered(self, options: SyncerOptions) -> str:
        wanted = self._recipe.syncer.quorum
        if options.quorum == wanted:
            return ""
        return f"; quorum {wanted} is lowered to {options.quorum}, as no more learners are here"

    def _compute(
        self, fragment: _Fragment, phis: Mapping[PeerId, Tensors], weights: Mapping[PeerId, float], version: int
    ) -> tuple[dict[str, Tensor], float]:
        """On a worker thread: the outer step; returns a copy of the new Theta and the outer gradient's length."""
        rule = self._recipe.syncer.merge
        delta = syncer_rules.merge(fragment.theta, phis, weights, rule, self._embeddings & fragment.theta.keys())
        norm = math.sqrt(math.fsum(float(tensor.double().square().sum()) for tensor in delta.values()))
        if not math.isfinite(norm):
            raise ModelError("the outer gradient is not finite")
        # `delta` becomes the mix whose difference to Theta it is
        mix = {name: theta - delta[name] for name, theta in fragment.theta.items()}
        with self._lock:
            fragment.outer.step(mix)
            fragment.version = version
            return {name: tensor.detach().clone() for name, tensor in fragment.theta.items()}, norm

    def _theta(self) -> dict[str, Tensor]:
        return {name: tensor for fragment in self._fragments for name, tensor in fragment.theta.items()}

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


async def _wait_for(news: asyncio.Event, until_s: float) -> None:
    """Until there is news, or it is `until_s` on the loop's clock."""
    try:
        async with asyncio.timeout_at(until_s):
            await news.wait()
    except TimeoutError:
        pass


def _refuse(waiting: "asyncio.Future[_Result]", reason: str) -> None:
    if not waiting.done():
        waiting.set_exception(RefusedError(reason))
        waiting.exception()  # nobody may be there to read it, which is no fault


def _over(pick: Callable[[list[float]], float], values: Sequence[float]) -> float:
    """Over the values that are known; NaN where none is."""
    known = [value for value in values if math.isfinite(value)]
    return pick(known) if known else math.nan
