"""A simulated learner of Decoupled DiLoCo: it sends fragments and trains on; what is merged is applied as it comes."""

import asyncio
import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from gasloc.simulation.gossip import schedule
from gasloc.simulation.life import download
from gasloc.simulation.rules import Parts, assign
from gasloc.simulation.syncer import SYNCER, Merged, Report, Syncer, versions_in
from gasloc.simulation.worker import Worker
from peers.exchange import Answer, Swap, Tensors


@dataclass(slots=True)
class _Part:
    names: list[str]
    version: int = 0
    """The merge that the learner last took."""
    tokens: float = 0.0
    """Since then."""
    steps: float = 0.0


class Learning:
    """A learner's parameters, and what it knows of each fragment."""

    def __init__(self, parameters: dict[str, Tensor], parts: Parts) -> None:
        self._parameters = parameters
        self.parts = [_Part(list(part)) for part in parts]

    def sent(self, part: int) -> dict[str, Tensor]:
        """The fragment as it is now, copied: training goes on."""
        return {name: self._parameters[name].clone() for name in self.parts[part].names}

    def take(self, part: int, mix: Tensors) -> None:
        """Sets the fragment."""
        assign(self._parameters, mix)

    @torch.no_grad()
    def keep(self, part: int, theta: Tensors, phi: Tensors) -> None:
        """Takes a merged fragment and keeps the progress since `phi` was sent: `theta + (current - phi)`."""
        self.take(part, {name: theta[name] + (self._parameters[name] - phi[name]) for name in theta})

    def count(self, steps: int, tokens: int) -> None:
        """Counts training behind every fragment."""
        for part in self.parts:
            part.steps += steps
            part.tokens += tokens

    def state(self) -> dict[str, Tensor]:
        """Parameters and versions, as copies."""
        versions = {f"version/{index}": torch.tensor(part.version) for index, part in enumerate(self.parts)}
        return {f"anchor/{name}": tensor.clone() for name, tensor in self._parameters.items()} | versions

    def load(self, state: Tensors) -> None:
        """Takes over another learner's `state`."""
        assign(self._parameters, {name: state[f"anchor/{name}"] for name in self._parameters})
        for part, version in zip(self.parts, versions_in(state, len(self.parts)), strict=True):
            part.version, part.tokens, part.steps = version, 0.0, 0.0


async def learn(worker: Worker) -> None:
    """Rounds of local steps; each fragment is reported when it is due. Waits only where the overlap is 0."""
    syncer, learning = worker.world.syncer, worker.rule
    assert syncer is not None, "the recipe's topology is syncer"
    assert isinstance(learning, Learning), "a learner's rule is Learning"
    learner = _Learner(worker, learning, syncer)
    try:
        while not worker.over:
            await learner.round()
    finally:
        learner.stop()


class _Learner:
    """One life of a learner."""

    def __init__(self, worker: Worker, learning: Learning, syncer: Syncer) -> None:
        self._worker = worker
        self._learning = learning
        self._syncer = syncer
        self._sent: dict[int, tuple[Report, Tensors, float]] = {}
        """Reports not yet merged, by number; what they were before they travelled, and when they were sent."""
        self._arrived: list[Merged | None] = []
        self._news = asyncio.Event()
        self._uploads: dict[int, asyncio.Task[None]] = {}
        """The last upload of each fragment."""
        self._number = 0
        self._blocking = worker.world.recipe.syncer.overlap_steps == 0

    async def round(self) -> None:
        """One round, with what is merged in the meantime."""
        worker, world = self._worker, self._worker.world
        count = worker.begin_round()
        due = dict(schedule(worker, count))
        for step in range(1, count + 1):
            await worker.train(1)
            self._learning.count(1, world.problem.tokens_per_step)
            await self._apply()
            for part in due.get(step, []):
                self._report(part)
            last = step == count and worker.round + 1 >= world.recipe.rounds
            if step in due and (self._blocking or last):
                await self._wait()
        worker.report(worker.end_round())

    def stop(self) -> None:
        """Ends what is on its way to the syncer."""
        for upload in self._uploads.values():
            upload.cancel()

    def _report(self, part: int) -> None:
        """Sends a fragment, unless it is still under way from the last time: the link is too thin for it."""
        learning, worker = self._learning, self._worker
        worker.traffic.tried = True
        if part in self._uploads and not self._uploads[part].done():
            worker.traffic.failures[f"fragment {part} was still on its way to the syncer"] = None
            return
        held = learning.parts[part]
        self._number += 1
        phi = learning.sent(part)
        arriving, size_bytes = worker.world.parcel(phi)
        report = Report(
            worker.peer,
            part,
            arriving,
            size_bytes,
            held.tokens,
            held.steps,
            held.version,
            self._number,
            deliver=self._deliver,
        )
        self._sent[self._number] = (report, phi, asyncio.get_running_loop().time())
        worker.traffic.bytes_sent += size_bytes
        self._uploads[part] = asyncio.ensure_future(self._upload(report))

    async def _upload(self, report: Report) -> None:
        with contextlib.suppress(ConnectionError):  # we died: nobody waits for it
            await self._syncer.report(report)

    def _deliver(self, merged: Merged | None) -> None:
        self._arrived.append(merged)
        self._news.set()

    async def _wait(self) -> None:
        """Until everything reported is merged and applied, or nothing has moved for the recipe's grace."""
        worker, loop = self._worker, asyncio.get_running_loop()
        began_s = loop.time()
        while self._sent:
            try:
                async with asyncio.timeout(worker.world.recipe.exchange.grace_s):
                    await self._news.wait()
            except TimeoutError:
                if worker.world.network.busy(worker.peer):
                    continue
                worker.traffic.failures["the syncer did not merge in time"] = None
                break
            await self._apply()
        worker.traffic.exchange_s += loop.time() - began_s
        worker.traffic.waited_s = worker.traffic.exchange_s

    async def _apply(self) -> None:
        """Applies what has come; takes a donor's state where the syncer found ours too old."""
        arrived, self._arrived = self._arrived, []
        self._news.clear()
        if any(merged is None for merged in arrived):
            self._sent.clear()
            await download(self._worker)
            return
        for merged in arrived:
            if merged is not None and merged.number in self._sent:
                self._take(merged)

    def _take(self, merged: Merged) -> None:
        report, phi, since_s = self._sent[merged.number]
        # later reports of the fragment stay: they were made on the way here
        self._sent = {
            number: sent for number, sent in self._sent.items() if sent[0].part != merged.part or number > merged.number
        }
        self._learning.keep(merged.part, merged.theta, phi)
        held = self._learning.parts[merged.part]
        held.version = merged.version
        held.tokens -= report.tokens
        held.steps -= report.steps
        traffic = self._worker.traffic
        traffic.partners[SYNCER] = None
        seconds = asyncio.get_running_loop().time() - since_s
        traffic.add({SYNCER: Swap(Answer.ACCEPT, "merged", bytes_received=merged.size_bytes, seconds=seconds)})
