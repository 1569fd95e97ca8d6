"""One peer of `benchmarks.straggler`: `python -m benchmarks.straggler_peer FOLDER`, inside its network namespace.

Reads one JSON object a line from stdin and answers on stdout, in order: "open" starts p2pd and begins or joins a run,
"enter" becomes a member, "train" takes paced local steps until "halt", with one line for each round. Ends as stdin
does.
"""

import contextlib
import json
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from gasloc import corpus, inner, model, sampler
from gasloc.optimizer import GaslocOptimizer, RoundResult
from gasloc.outer import make_outer
from gasloc.recipe import parse
from gasloc.swarm import Swarm
from peers.errors import PeersError
from peers.exchange import Answer
from peers.node import PeerOptions

Words = dict[str, Any]


def say(words: Words) -> None:
    """One line to whoever started us."""
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


class Requests:
    """What stdin asks for; a thread reads it, so that "halt" and its end are seen while we train."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        """Set by "halt", and for good at the end of stdin."""
        self._queue: queue.SimpleQueue[Words | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def next(self) -> Words | None:
        """The next request; None at the end."""
        return self._queue.get()

    def _read(self) -> None:
        for line in sys.stdin:
            request = json.loads(line)
            if request["do"] == "halt":
                self.stop.set()
            self._queue.put(request)
        self.stop.set()
        self._queue.put(None)


class Trainee:
    """This peer's replica in one run, from "open" to "halt"."""

    def __init__(self, request: Words, folder: Path, text: corpus.Corpus, stop: threading.Event) -> None:
        options = PeerOptions(
            identity_path=folder / "identity.key", host=request["host"], initial_peers=tuple(request["peers"])
        )
        if request["peers"]:
            self.swarm = Swarm.join(options, stop=stop)
        else:
            self.swarm = Swarm.start(parse(request["recipe"]), options, stop=stop)
        self._recipe = recipe = self.swarm.recipe
        self._text, self._stop = text, stop
        self._step_s: float = request["step_s"]
        self._model = model.build(recipe.model, recipe.seed)
        self._optimizer = GaslocOptimizer(
            inner.make_inner(self._model, recipe.inner),
            self._model,
            network=self.swarm,
            topology=recipe.topology,
            local_steps=recipe.local_steps,
            seed=recipe.seed,
            outer=make_outer(recipe.outer),
            grace_s=recipe.exchange.grace_s,
            overlap=recipe.exchange.overlap,
            on_round=self._end_round,
        )
        self._held_out = sampler.evaluation_batches(
            text.held_out,
            batches=recipe.evaluation.batches,
            batch_size=recipe.inner.batch_size,
            context_length=recipe.model.context_length,
        )
        self._step = 0
        self._began = self._due = self._cpu = 0.0
        self._validation_loss = 0.0
        self._reason = ""

    def enter(self, count: int) -> int:
        """Becomes a member; returns how many are seen."""
        self.swarm.enter(self._optimizer)
        return self.swarm.wait_for(count)

    def train(self) -> None:
        """Local steps of a fixed length, and rounds, until told to stop."""
        self.swarm.train()
        self._began = self._due = time.monotonic()
        self._cpu = time.process_time()
        while not self._stop.is_set():
            if self._optimizer.local_step == 0:
                self._validation_loss = self._evaluate()
            self._take_step()

    def _take_step(self) -> None:
        recipe = self._recipe
        inputs, targets = sampler.batch(
            self._text.train,
            peer_id=self.swarm.me,
            step=self._step,
            seed=recipe.seed,
            batch_size=recipe.inner.batch_size,
            context_length=recipe.model.context_length,
        )
        torch.autograd.backward(self._model.loss(inputs, targets))
        inner.clip(self._model, recipe.inner)
        self._step += 1
        # a step that was late is made up for by the next ones
        self._due += self._step_s
        if not self._stop.wait(max(self._due - time.monotonic(), 0.0)):
            self._optimizer.step()

    @torch.no_grad()
    def _evaluate(self) -> float:
        """Takes less time than a step, and is a part of it: steps have a fixed length."""
        losses = [float(self._model.loss(inputs, targets)) for inputs, targets in self._held_out]
        return sum(losses) / len(losses)

    def _end_round(self, result: RoundResult) -> None:
        now, cpu = time.monotonic(), time.process_time()
        if self._stop.is_set():
            return
        self.swarm.publish(result, seconds=now - self._began)
        self.swarm.catch_up()
        reason, self._reason = self._reason, ""
        self._optimizer.local_steps, self._reason = self.swarm.pace(self._optimizer.local_steps)
        accepted = {peer: swap.seconds for peer, swap in result.swaps.items() if swap.answer is Answer.ACCEPT}
        report = {
            "round": result.round,
            "began": self._began,
            "ended": now,
            "local_steps": result.local_steps,
            "why": reason,
            "transfers_s": accepted,
            "waited_s": result.waited_s,
            "bytes_sent": result.bytes_sent,
            "reason": result.reason,
            "loss_before": self._validation_loss,
            "cpu_s": cpu - self._cpu,
        }
        say({"report": report})
        self._began, self._cpu = now, cpu
        self._due = time.monotonic()


def serve(folder: Path) -> None:
    """Does what stdin asks for, until it ends."""
    torch.set_num_threads(1)
    text = corpus.load("stdlib")
    requests = Requests()
    trainee: Trainee | None = None
    say({"ready": True})
    try:
        while (request := requests.next()) is not None:
            if request["do"] == "open":
                requests.stop.clear()
                trainee = Trainee(request, folder, text, requests.stop)
                say({"id": trainee.swarm.me, "addresses": trainee.swarm.addresses})
            elif request["do"] == "enter" and trainee:
                say({"members": trainee.enter(request["count"])})
            elif request["do"] == "train" and trainee:
                trainee.train()
            elif request["do"] == "halt" and trainee:
                trainee.swarm.close()
                trainee = None
                say({"halted": True})
    finally:
        if trainee:
            with contextlib.suppress(PeersError):
                trainee.swarm.close()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
