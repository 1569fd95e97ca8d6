"""One process of `benchmarks.overhead`: `python -m benchmarks.overhead_child CORE FOLDER`; lives on one core.

Reads one JSON object a line from stdin and answers each with one on stdout. "open" makes a model, and begins or joins
a run on a p2pd of its own, on the same core, or trains alone; "train" takes local steps; "close" ends it.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from gasloc import corpus, inner, model, sampler
from gasloc.optimizer import GaslocOptimizer, RoundResult
from gasloc.outer import make_outer
from gasloc.recipe import Recipe, parse
from gasloc.swarm import Swarm
from peers.node import PeerOptions

Words = dict[str, Any]


class Replica:
    """One model in one training loop, with a swarm around it or without."""

    def __init__(self, recipe: Recipe, text: corpus.Corpus, swarm: Swarm | None, name: str) -> None:
        self._recipe, self._text, self._name = recipe, text, name
        self.swarm = swarm
        self._model = model.build(recipe.model, recipe.seed)
        local = inner.make_inner(self._model, recipe.inner)
        self._step = 0
        self.results: list[RoundResult] = []
        self.optimizer: torch.optim.Optimizer = local
        if swarm:
            self.optimizer = outer = GaslocOptimizer(
                local,
                self._model,
                network=swarm,
                topology=recipe.topology,
                local_steps=recipe.local_steps,
                seed=recipe.seed,
                outer=make_outer(recipe.outer),
                grace_s=recipe.exchange.grace_s,
                overlap=recipe.exchange.overlap,
                on_round=self._end_round,
            )
            swarm.enter(outer)

    def _end_round(self, result: RoundResult) -> None:
        self.results.append(result)
        if self.swarm:
            self.swarm.report(result)

    def take_step(self) -> None:
        """One local step; an exchange where one is due."""
        recipe = self._recipe
        inputs, targets = sampler.batch(
            self._text.train,
            peer_id=self._name,
            step=self._step,
            seed=recipe.seed,
            batch_size=recipe.inner.batch_size,
            context_length=recipe.model.context_length,
        )
        torch.autograd.backward(self._model.loss(inputs, targets))
        inner.clip(self._model, recipe.inner)
        self._step += 1
        self.optimizer.step()
        self.optimizer.zero_grad()


def family_cpu_s() -> float:
    """CPU seconds of this process and of its p2pd so far."""
    children = psutil.Process().children(recursive=True)
    return time.process_time() + float(sum(sum(child.cpu_times()[:2]) for child in children))


def train(replica: Replica, rounds: int, local_steps: int) -> Words:
    """Times as many steps as `rounds` rounds have, after some that do not count.

    In a swarm those are a round and a half: an overlap is chosen by what was measured before, and from the middle of a
    round on, all of an exchange is timed that belongs to so many steps. Alone, there is nothing to wait for.
    """
    if replica.swarm:
        replica.swarm.wait_for(2)
        replica.swarm.train()
    for _ in range(local_steps + local_steps // 2 if replica.swarm else local_steps // 8):
        replica.take_step()
    known = len(replica.results)
    began, cpu_s, own_s = time.perf_counter(), family_cpu_s(), time.thread_time()
    for _ in range(rounds * local_steps):
        replica.take_step()
    seconds = time.perf_counter() - began
    cpu, own = family_cpu_s() - cpu_s, time.thread_time() - own_s
    results = replica.results[known:]
    if isinstance(replica.optimizer, GaslocOptimizer):
        replica.optimizer.take_outcomes()
    return {
        "seconds": seconds,
        "cpu_s": cpu,
        "training_cpu_s": own,
        "steps": rounds * local_steps,
        "waited_s": sum(result.waited_s for result in results),
        "overlap_steps": max((result.overlap_steps for result in results), default=0),
        "rounds": len(results),
        "mixed": sum(result.mixed for result in results),
        "bytes_sent": sum(result.bytes_sent for result in results),
        "reasons": [result.reason for result in results if not result.mixed],
    }


def _swarm(recipe: Recipe, folder: Path, peers: Sequence[str]) -> Swarm:
    options = PeerOptions(folder / "identity.key", host="127.0.0.1", initial_peers=tuple(peers))
    return Swarm.join(options) if peers else Swarm.start(recipe, options)


def serve(core: int, folder: Path) -> None:
    """Does what stdin asks for, until it ends."""
    os.sched_setaffinity(0, {core})  # threads and p2pd inherit it
    torch.set_num_threads(1)
    text = corpus.load("stdlib")
    replica: Replica | None = None
    swarm: Swarm | None = None
    _say({"ready": True})
    try:
        for line in sys.stdin:
            request = json.loads(line)
            if request["do"] == "open":
                recipe = parse(request["recipe"])
                swarm = _swarm(recipe, folder, request["peers"]) if request["swarm"] else None
                replica = Replica(recipe, text, swarm, str(core))
                _say({"addresses": swarm.addresses if swarm else []})
            elif request["do"] == "train" and replica:
                _say(train(replica, request["rounds"], request["local_steps"]))
            elif request["do"] == "close":
                if swarm:
                    swarm.close()
                swarm = replica = None
                _say({"closed": True})
    finally:
        if swarm:
            swarm.close()


def _say(words: Words) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]), Path(sys.argv[2]))
