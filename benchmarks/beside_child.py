"""One of the two peers of `benchmarks.beside`: `python -m benchmarks.beside_child KIND RANK FOLDER`.

Reads one JSON object a line from stdin and answers each on stdout: "meet" hands over what the first peer said, "train"
trains. For `torchft` it runs in another environment, so nothing but torch, numpy, pydantic and torchft may be imported
before the kind is known.
"""

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

from gasloc import corpus, inner, model, sampler
from gasloc.recipe import Recipe, parse

Words = dict[str, Any]
LIMIT_S = 120.0


class Method(Protocol):
    """A way to train together. `step` takes one local step, and the exchange where one is due."""

    def hello(self) -> Words:
        """What the other must know to find us."""

    def prepare(self, decoder: torch.nn.Module, local: torch.optim.AdamW, recipe: Recipe, other: Words) -> None:
        """Wraps the optimizer; returns once both are there."""

    def step(self) -> None:
        """After `backward`."""

    @property
    def rounds(self) -> int:
        """Synchronisations that came about with the other."""

    def close(self) -> None:
        """Leaves nothing behind."""


class Gasloc:
    """`GaslocOptimizer` in a swarm of two: each the other's partner."""

    def __init__(self, rank: int, folder: Path) -> None:
        self._rank, self._folder = rank, folder
        self._swarm: Any = None
        self.rounds = 0

    def hello(self) -> Words:
        """The first begins the run when it has its recipe; see `prepare`."""
        return {}

    def prepare(self, decoder: torch.nn.Module, local: torch.optim.AdamW, recipe: Recipe, other: Words) -> None:
        """Begins the run, or joins it at the address in the common folder."""
        from gasloc.optimizer import GaslocOptimizer
        from gasloc.outer import make_outer
        from gasloc.swarm import Swarm
        from peers.node import PeerOptions

        own = self._folder / f"gasloc-{self._rank}"
        own.mkdir()
        address = self._folder / "gasloc-address"
        key = own / "identity.key"
        if self._rank == 0:
            self._swarm = Swarm.start(recipe, PeerOptions(key, host="127.0.0.1"))
        else:
            _await(address.exists)
            self._swarm = Swarm.join(PeerOptions(key, host="127.0.0.1", initial_peers=(address.read_text(),)))
        self._optimizer = GaslocOptimizer(
            local,
            decoder,
            network=self._swarm,
            topology=recipe.topology,
            local_steps=recipe.local_steps,
            seed=recipe.seed,
            outer=make_outer(recipe.outer),
            grace_s=recipe.exchange.grace_s,
            overlap=recipe.exchange.overlap,
            on_round=self._end_round,
        )
        self._swarm.enter(self._optimizer)
        if self._rank == 0:
            _write_whole(address, self._swarm.addresses[0])
        self._swarm.wait_for(2)
        self._swarm.train()

    def _end_round(self, result: Any) -> None:
        self.rounds += result.mixed
        self._swarm.publish(result)

    def step(self) -> None:
        """One step."""
        self._optimizer.step()

    def close(self) -> None:
        """Leaves the swarm."""
        if self._swarm:
            self._swarm.close()


class Gloo:
    """DiLoCo by hand: `torch.distributed` all-reduces the outer gradient, in one flat tensor."""

    def __init__(self, rank: int, folder: Path) -> None:
        self._rank, self._folder = rank, folder
        self.rounds = 0

    def hello(self) -> Words:
        """They meet at a file."""
        return {}

    def prepare(self, decoder: torch.nn.Module, local: torch.optim.AdamW, recipe: Recipe, other: Words) -> None:
        """Makes the process group."""
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.distributed.init_process_group("gloo", f"file://{self._folder}/gloo", rank=self._rank, world_size=2)
        self._decoder, self._local, self._left = decoder, local, recipe.local_steps
        self._every = recipe.local_steps
        self._anchor = [parameter.detach().clone() for parameter in decoder.parameters()]
        self._outer = outer_sgd(self._anchor, recipe)

    def step(self) -> None:
        """One step."""
        self._local.step()
        self._left -= 1
        if self._left == 0:
            self._left = self._every
            self._sync()

    @torch.no_grad()
    def _sync(self) -> None:
        parameters = list(self._decoder.parameters())
        flat = torch.cat([(a - p).view(-1) for a, p in zip(self._anchor, parameters, strict=True)])
        torch.distributed.all_reduce(flat)
        flat /= 2
        place = 0
        for anchor in self._anchor:
            anchor.grad = flat[place : place + anchor.numel()].view_as(anchor)
            place += anchor.numel()
        self._outer.step()
        for parameter, anchor in zip(parameters, self._anchor, strict=True):
            parameter.copy_(anchor)
        self.rounds += 1

    def close(self) -> None:
        """Leaves the group."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


class Hivemind:
    """`hivemind.Optimizer` with local updates: it averages parameters, and has no outer optimizer."""

    def __init__(self, rank: int, folder: Path) -> None:
        import hivemind

        self._rank, self._hivemind = rank, hivemind
        self._dht = hivemind.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"]) if rank == 0 else None
        self._optimizer: Any = None

    def hello(self) -> Words:
        """The address of the first one's DHT."""
        return {"peers": [str(each) for each in self._dht.get_visible_maddrs()] if self._dht else []}

    def prepare(self, decoder: torch.nn.Module, local: torch.optim.AdamW, recipe: Recipe, other: Words) -> None:
        """Joins the first one's DHT. `target_batch_size`: what both see in a round."""
        if self._dht is None:
            self._dht = self._hivemind.DHT(
                start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=other["peers"]
            )
        batch = recipe.inner.batch_size
        self._optimizer = self._hivemind.Optimizer(
            dht=self._dht,
            run_id="beside",
            batch_size_per_step=batch,
            target_batch_size=2 * batch * recipe.local_steps,
            optimizer=local,
            use_local_updates=True,
            delay_state_averaging=False,
            matchmaking_time=2.0,
            averaging_timeout=30.0,
        )

    def step(self) -> None:
        """One step."""
        self._optimizer.step()

    @property
    def rounds(self) -> int:
        """Its epochs."""
        return int(self._optimizer.local_epoch)

    def close(self) -> None:
        """Ends its processes."""
        if self._optimizer:
            self._optimizer.shutdown()
        if self._dht:
            self._dht.shutdown()


class Torchft:
    """torchft's DiLoCo over its gloo process group, with a lighthouse in the first process."""

    def __init__(self, rank: int, folder: Path) -> None:
        coordination = import_module("torchft.coordination")
        self._rank = rank
        self._lighthouse = (
            coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=10_000)
            if rank == 0
            else None
        )
        self._manager: Any = None

    def hello(self) -> Words:
        """The lighthouse's address."""
        return {"lighthouse": self._lighthouse.address() if self._lighthouse else ""}

    def prepare(self, decoder: torch.nn.Module, local: torch.optim.AdamW, recipe: Recipe, other: Words) -> None:
        """Each process is a replica group of one, with a store of its own."""
        torchft = import_module("torchft")
        limit = timedelta(seconds=LIMIT_S)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        lighthouse = other["lighthouse"].replace(os.uname().nodename, "127.0.0.1")
        store = import_module("torch.distributed").TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._store = store
        outer = outer_sgd(list(decoder.parameters()), recipe)
        state: dict[str, Any] = {"decoder": decoder, "local": local, "outer": outer}
        self._manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=limit),
            load_state_dict=lambda values: [state[key].load_state_dict(value) for key, value in values.items()],
            state_dict=lambda: {key: value.state_dict() for key, value in state.items()},
            min_replica_size=2,
            use_async_quorum=False,
            timeout=limit,
            quorum_timeout=limit,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"beside-{self._rank}",
            hostname="127.0.0.1",
            init_sync=False,
        )
        local_sgd = import_module("torchft.local_sgd")
        self._diloco = local_sgd.DiLoCo(self._manager, [decoder], local, outer, sync_every=recipe.local_steps)
        self._diloco.__enter__()
        self._local = local

    def step(self) -> None:
        """One step; DiLoCo hooks into it."""
        self._local.step()

    @property
    def rounds(self) -> int:
        """Those that were committed."""
        return int(self._manager.current_step())

    def close(self) -> None:
        """Ends the manager and the lighthouse."""
        if self._manager:
            self._manager.shutdown(wait=False)
        if self._lighthouse:
            self._lighthouse.shutdown()


KINDS: dict[str, Callable[[int, Path], Method]] = {
    "gasloc": Gasloc,
    "gloo": Gloo,
    "hivemind": Hivemind,
    "torchft": Torchft,
}


def outer_sgd(parameters: list[torch.Tensor], recipe: Recipe) -> torch.optim.SGD:
    """The recipe's outer optimizer, as plain torch."""
    outer = recipe.outer
    return torch.optim.SGD(parameters, lr=outer.learning_rate, momentum=outer.momentum, nesterov=outer.nesterov)


def train(
    method: Method,
    decoder: model.Decoder,
    recipe: Recipe,
    text: corpus.Corpus,
    rank: int,
    step_s: float,
) -> Words:
    """Trains all rounds; a local step is paced to `step_s`. Times are of the calls of the optimizer."""
    steps: list[float] = []
    bytes_before, began = _loopback_bytes(), time.monotonic()
    due = began
    for index in range(recipe.rounds * recipe.local_steps):
        inputs, targets = sampler.batch(
            text.train,
            peer_id=str(rank),
            step=index,
            seed=recipe.seed,
            batch_size=recipe.inner.batch_size,
            context_length=recipe.model.context_length,
        )
        decoder.zero_grad()
        torch.autograd.backward(decoder.loss(inputs, targets))
        inner.clip(decoder, recipe.inner)
        due = max(due + step_s, time.monotonic())
        time.sleep(max(due - time.monotonic(), 0.0))
        before = time.perf_counter()
        method.step()
        steps.append(time.perf_counter() - before)
        due = max(due, time.monotonic())
    return {
        "seconds": time.monotonic() - began,
        "sync_s": (sum(steps) - len(steps) * statistics.median(steps)) / recipe.rounds,
        "rounds": method.rounds,
        "bytes": _loopback_bytes() - bytes_before,
        "loss": _evaluate(decoder, recipe, text),
    }


@torch.no_grad()
def _evaluate(decoder: model.Decoder, recipe: Recipe, text: corpus.Corpus) -> float:
    batches = sampler.evaluation_batches(
        text.held_out,
        batches=recipe.evaluation.batches,
        batch_size=recipe.inner.batch_size,
        context_length=recipe.model.context_length,
    )
    return statistics.fmean(float(decoder.loss(inputs, targets)) for inputs, targets in batches)


def _loopback_bytes() -> int:
    """What crossed the loopback of this network namespace so far, headers and all."""
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the other did not come within {LIMIT_S:g} s")
        time.sleep(0.05)


def _write_whole(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


def serve(kind: str, rank: int, folder: Path) -> None:
    """Does what stdin asks for, until it ends."""
    torch.set_num_threads(1)
    text = corpus.load("stdlib")
    method = KINDS[kind](rank, folder)
    try:
        _say({"hello": method.hello()})
        for line in sys.stdin:
            request = json.loads(line)
            recipe = parse(request["recipe"])
            decoder = model.build(recipe.model, recipe.seed)
            method.prepare(decoder, inner.make_inner(decoder, recipe.inner), recipe, request["hello"])
            _say(train(method, decoder, recipe, text, rank, request["step_s"]))
    finally:
        with contextlib.suppress(BrokenPipeError):
            method.close()


def _say(words: Words) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
