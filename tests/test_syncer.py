"""The syncer: its answers under virtual time, and DiLoCo three ways, live."""

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gasloc.delivery import Reporter, read_card
from gasloc.errors import CheckpointError, RecipeError
from gasloc.learner import Delivery, Report
from gasloc.optimizer import GaslocOptimizer, RoundResult
from gasloc.outer import make_outer
from gasloc.recipe import Recipe, override
from gasloc.syncer import Merged, Syncer
from peers.courier import Courier, Parcel
from peers.errors import BehindError, RefusedError
from peers.exchange import Exchange, Offer, PeerId, Slot, Swap
from peers.pipes import PipeNetwork
from peers.stream_exchange import StreamExchange
from peers.thread import NetworkThread
from peers.transport import Transport
from tests.diloco import diloco
from tests.meeting import at_once
from tests.virtual_time import run

State = dict[str, Tensor]


def recipe(**changes: Any) -> Recipe:
    """Outer learning rate 1 and no momentum unless told otherwise: Theta becomes the mean of what came."""
    base = {"topology": "syncer", "local_steps": 10, "outer": {"learning_rate": 1.0, "momentum": 0.0}}
    return override(Recipe(), base | changes)


def syncing(**changes: Any) -> dict[str, Any]:
    return {"merge": "mean"} | changes


def theta() -> State:
    return {"weight": torch.zeros(4, 3, dtype=torch.float64), "bias": torch.zeros(3, dtype=torch.float64)}


def report(
    fill: float, *, fragment: int = 0, version: int = 0, round: int = 0, tokens: float = 100.0, steps: float = 10.0
) -> Parcel:
    meta = {"fragment": fragment, "version": version, "round": round, "tokens": tokens, "steps": steps}
    return Parcel({name: torch.full_like(tensor, fill) for name, tensor in theta().items()}, meta)


def value_of(parcel: Parcel) -> float:
    """The one value that all elements have."""
    values = torch.cat([tensor.flatten() for tensor in parcel.tensors.values()])
    assert torch.all(values == values[0])
    return float(values[0])


@dataclass
class Hall:
    """A syncer and who is here."""

    config: Recipe
    live: set[PeerId] = field(default_factory=set)
    merges: list[Merged] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.syncer = Syncer(
            self.config, theta(), learners=lambda: self.live, on_merge=self.merges.append, embeddings={"weight"}
        )


async def now_s() -> float:
    return asyncio.get_running_loop().time()


# --- quorum and grace ------------------------------------------------------------------------------------------


def test_with_everybodys_report_nobody_waits_any_longer() -> None:
    async def scenario() -> None:
        hall = Hall(recipe(syncer=syncing(quorum=3)), {"a", "b", "c"})
        first = asyncio.create_task(hall.syncer.handle("a", report(3.0)))
        second = asyncio.create_task(hall.syncer.handle("b", report(6.0)))
        await asyncio.sleep(50.0)
        assert not first.done()
        assert not second.done()
        third = await hall.syncer.handle("c", report(9.0))
        answers = [await first, await second, third]
        assert [value_of(answer) for answer in answers] == [6.0, 6.0, 6.0]
        assert [answer.meta["version"] for answer in answers] == [1, 1, 1]
        assert [answer.meta["held_s"] for answer in answers] == pytest.approx([50.0, 50.0, 0.0])
        (merged,) = hall.merges
        assert merged.reason == "all 3 learners reported"
        assert merged.learners == ("a", "b", "c")
        assert merged.waited_s == pytest.approx(50.0)
        assert merged.norm == pytest.approx(math.sqrt(15 * 36))

    run(scenario())


def test_the_grace_window_is_half_of_the_slack_that_was_measured() -> None:
    """Step time 1 s by the reports' times, sync time 0.4 s by the learners' word, tau = 4: (4 - 0.4) / 2 s."""

    async def scenario() -> None:
        hall = Hall(recipe(syncer=syncing(quorum=1, overlap_steps=4, grace_share=0.5)), {"a", "b"})
        # a first report: nothing is measured yet, so there is no window
        assert (await hall.syncer.handle("a", report(1.0))).meta["held_s"] == 0.0
        await asyncio.sleep(10.0)
        again = report(1.0, version=1)
        held_s = (await hall.syncer.handle("a", Parcel(again.tensors, {**again.meta, "sync_time_s": 0.4}))).meta[
            "held_s"
        ]
        assert held_s == pytest.approx(1.8)
        assert hall.merges[-1].reason == ("1 of 2 learners reported, quorum 1: the grace window of 1.800 s has passed")
        await asyncio.sleep(8.2)
        early = asyncio.create_task(
            hall.syncer.handle("a", Parcel(again.tensors, {**again.meta, "version": 2, "sync_time_s": 0.4}))
        )
        await asyncio.sleep(1.0)
        late = await hall.syncer.handle("b", report(3.0))
        assert value_of(late) == value_of(await early) == 2.0
        assert late.meta["learners"] == 2

    run(scenario())


def test_a_quorum_larger_than_the_learners_is_lowered_and_told() -> None:
    async def scenario() -> None:
        hall = Hall(recipe(syncer=syncing(quorum=3)), {"a", "b", "c"})
        waiting = asyncio.create_task(hall.syncer.handle("a", report(1.0)))
        other = asyncio.create_task(hall.syncer.handle("b", report(3.0)))
        await asyncio.sleep(10.0)
        assert not waiting.done()
        hall.live.remove("c")  # it died, and its record expired
        assert value_of(await waiting) == value_of(await other) == 2.0
        assert (await now_s()) < 12.0
        (merged,) = hall.merges
        assert merged.reason == ("all 2 learners reported; quorum 3 is lowered to 2, as no more learners are here")

    run(scenario())


def test_a_learner_that_nobody_knows_yet_counts_as_soon_as_it_reports() -> None:
    async def scenario() -> None:
        hall = Hall(recipe(syncer=syncing(quorum=2)))
        assert value_of(await hall.syncer.handle("new", report(5.0))) == 5.0
        hall.live.add("new")
        waiting = asyncio.create_task(hall.syncer.handle("new", report(5.0, version=1)))
        assert value_of(await hall.syncer.handle("newer", report(7.0))) == 6.0
        await waiting

    run(scenario())


def test_the_latest_report_of_a_learner_counts_once() -> None:
    async def scenario() -> None:
        hall = Hall(recipe(syncer=syncing(quorum=2)), {"a", "b"})
        first = asyncio.create_task(hall.syncer.handle("a", report(100.0)))
        await asyncio.sleep(1.0)
        second = asyncio.create_task(hall.syncer.handle("a", report(1.0)))
        with pytest.raises(RefusedError, match="a later report of this learner takes its place"):
            await first
        assert value_of(await hall.syncer.handle("b", report(3.0))) == 2.0
        await second

    run(scenario())


def test_a_learner_that_left_after_it_sent_is_counted() -> None:
    async def scenario() -> None:
        hall = Hall(recipe(syncer=syncing(quorum=2)), {"a", "b"})
        gone = asyncio.create_task(hall.syncer.handle("a", report(1.0)))
        await asyncio.sleep(1.0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert value_of(await hall.syncer.handle("b", report(3.0))) == 2.0

    run(scenario())


def test_what_comes_during_a_merge_counts_in_the_next() -> None:
    async def scenario() -> None:
        hall = Hall(recipe(syncer=syncing()), {"a", "b"})
        answers = await asyncio.gather(
            *(hall.syncer.handle(peer, report(1.0)) for peer in "ab"),
            *(hall.syncer.handle(peer, report(3.0, version=1)) for peer in "cd"),
        )
        counted = [learner for merged in hall.merges for learner in merged.learners]
        assert sorted(counted) == ["a", "b", "c", "d"]
        assert {answer.meta["version"] for answer in answers} == {merged.version for merged in hall.merges}

    run(scenario())


def test_fragments_are_merged_each_by_itself() -> None:
    async def scenario() -> None:
        hall = Hall(recipe(syncer=syncing(quorum=2), fragments=2), {"a", "b"})
        parts = [{"weight"}, {"bias"}]

        def part(peer: PeerId, index: int, fill: float) -> Awaitable[Parcel]:
            whole = report(fill, fragment=index)
            return hall.syncer.handle(peer, Parcel({n: whole.tensors[n] for n in parts[index]}, whole.meta))

        waiting = asyncio.ensure_future(part("a", 0, 1.0))
        both = await asyncio.gather(part("a", 1, 2.0), part("b", 1, 4.0))
        assert [value_of(answer) for answer in both] == [3.0, 3.0]
        assert not waiting.done()
        assert value_of(await part("b", 0, 5.0)) == 3.0
        await waiting
        _, state = hall.syncer.snapshot()
        assert state["outer/merges"].tolist() == [1, 1]

    run(scenario())


# --- mixed speeds ----------------------------------------------------------------------------------------------


def test_learners_at_one_three_and_ten_times_the_speed_count_by_tokens_and_wait_for_nobody() -> None:
    """Each moves by the same amount a step from what it took; a report is due every 10 of its own steps."""
    speeds = {"slow": 10.0, "middle": 10.0 / 3, "fast": 1.0}
    taken: dict[PeerId, list[float]] = {peer: [] for peer in speeds}

    async def learner(hall: Hall, peer: PeerId, until_s: float) -> None:
        step_s, version, behind = speeds[peer], 0, 0.0
        value = 0.0
        loop = asyncio.get_running_loop()
        while loop.time() < until_s:
            await asyncio.sleep(10 * step_s)
            value += 1.0
            answer = asyncio.create_task(hall.syncer.handle(peer, report(value, version=version, tokens=640.0)))
            sent, sent_at_s = value, loop.time()
            # two more steps of training while it is away, at the most
            done, _ = await asyncio.wait({answer}, timeout=2 * step_s)
            assert done, f"{peer} waited more than the overlap"
            merged = answer.result()
            version = int(merged.meta["version"])
            behind = loop.time() - sent_at_s
            taken[peer].append(behind)
            value = value_of(merged) + (value - sent)

    async def scenario() -> Hall:
        hall = Hall(recipe(syncer=syncing(overlap_steps=2), stale_rounds=2), set(speeds))
        async with asyncio.TaskGroup() as group:
            for peer in speeds:
                group.create_task(learner(hall, peer, 2000.0))
        return hall

    hall = run(scenario())
    counts = {peer: sum(peer in merged.learners for merged in hall.merges) for peer in speeds}
    assert counts["fast"] == pytest.approx(10 * counts["slow"], rel=0.15)
    assert counts["middle"] == pytest.approx(3 * counts["slow"], rel=0.15)
    for merged in hall.merges:  # the same tokens behind each report: nobody weighs more than another
        assert list(merged.shares.values()) == pytest.approx([1 / len(merged.learners)] * len(merged.learners))
    # the window is half the fast learner's own slack, 2 steps of 1 s
    assert max(seconds for times in taken.values() for seconds in times) <= 1.0 + 1e-9


def test_a_report_of_few_tokens_weighs_little() -> None:
    async def scenario() -> None:
        hall = Hall(recipe(syncer=syncing(quorum=2)), {"a", "b"})
        first = asyncio.create_task(hall.syncer.handle("a", report(0.0, tokens=300.0, steps=10)))
        await hall.syncer.handle("b", report(1.0, tokens=100.0, steps=10))
        await first
        # w = tokens * tokens / steps: 9000 and 1000
        assert hall.merges[0].shares == pytest.approx({"a": 0.9, "b": 0.1})

    run(scenario())


# --- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fragment": 1}, "there is no fragment 1, they go from 0 to 0"),
        ({"fragment": -1}, "fragment = -1 is not a whole number from 0"),
        ({"fragment": 0.0}, "fragment = 0.0 is not a whole number"),
        ({"version": "new"}, "version = 'new' is not a whole number"),
        ({"round": None}, "round = None is not a whole number"),
        ({"tokens": 0}, "tokens = 0.0 is not a number above 0"),
        ({"tokens": -1.0}, "tokens = -1.0 is not a number from 0"),
        ({"steps": "many"}, "steps = 'many' is not a number"),
        ({"sync_time_s": -1}, "sync_time_s = -1 is not a number from 0"),
    ],
)
def test_a_report_that_makes_no_sense_is_refused_before_it_travels(changes: dict[str, Any], words: str) -> None:
    async def scenario() -> None:
        hall = Hall(recipe(syncer=syncing()), {"a"})
        sound = report(1.0)
        with pytest.raises(RefusedError, match=words):
            hall.syncer.layout("a", {**sound.meta, **changes})
        with pytest.raises(RefusedError, match=words):
            await hall.syncer.handle("a", Parcel(sound.tensors, {**sound.meta, **changes}))
        assert value_of(await hall.syncer.handle("a", sound)) == 1.0

    run(scenario())


def test_tensors_of_another_layout_change_nothing() -> None:
    async def scenario() -> None:
        hall = Hall(recipe(syncer=syncing()), {"a"})
        half = report(1.0)
        with pytest.raises(RefusedError, match="not those of fragment 0"):
            await hall.syncer.handle("a", Parcel({"bias": half.tensors["bias"]}, half.meta))
        assert value_of(await hall.syncer.handle("a", report(2.0))) == 2.0

    run(scenario())


def test_a_slow_learner_counts_where_one_that_was_cut_off_is_told_to_take_fresh_state() -> None:
    async def scenario() -> None:
        hall = Hall(recipe(syncer=syncing(), stale_rounds=2), {"a", "b"})
        for version in range(5):
            await hall.syncer.handle("a", report(1.0, version=version))
        # limits: 2 rounds of 2 learners, 4 merges; 8 times as many for one that is only slow
        with pytest.raises(BehindError, match=r"5 merges behind, more than 4: take fresh state"):
            hall.syncer.layout("b", report(1.0, steps=21.0).meta)
        hall.syncer.layout("b", report(1.0, steps=20.0).meta)
        await hall.syncer.handle("b", report(1.0, steps=10.0))
        for version in range(6, 34):
            await hall.syncer.handle("a", report(1.0, version=version))
        with pytest.raises(BehindError, match=r"34 merges behind, more than 32"):
            hall.syncer.layout("b", report(1.0, steps=10.0).meta)

    run(scenario())


def test_a_merge_that_cannot_be_computed_is_told_and_the_next_goes_well() -> None:
    """Two finite fragments whose difference overflows."""

    async def scenario() -> None:
        hall = Hall(recipe(syncer=syncing()), {"a"})
        with pytest.raises(RefusedError, match="could not merge it: the outer gradient is not finite"):
            await hall.syncer.handle("a", report(1e300))
        assert hall.merges == []
        assert value_of(await hall.syncer.handle("a", report(4.0))) == 4.0

    run(scenario())


def test_closing_refuses_what_waits() -> None:
    async def scenario() -> None:
        hall = Hall(recipe(syncer=syncing(quorum=2)), {"a", "b"})
        waiting = asyncio.create_task(hall.syncer.handle("a", report(1.0)))
        await asyncio.sleep(1.0)
        await hall.syncer.close()
        with pytest.raises(RefusedError, match="the syncer is leaving"):
            await waiting
        with pytest.raises(RefusedError, match="the syncer is leaving"):
            hall.syncer.layout("a", report(1.0).meta)

    run(scenario())


def test_more_fragments_than_tensors_are_refused() -> None:
    with pytest.raises(RecipeError, match="fragments = 3 for a model of 2 tensors"):
        Hall(recipe(fragments=3))


# --- its own state ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", [{"learning_rate": 0.7, "momentum": 0.9}, {"optimizer": "adam", "momentum": 0.9}])
def test_a_restarted_syncer_goes_on_as_if_it_had_not_died(outer: dict[str, Any]) -> None:
    async def merges(hall: Hall, versions: range) -> None:
        for version in versions:
            fills = (1.0 + version, 2.0 - version)
            await asyncio.gather(
                *(
                    hall.syncer.handle(peer, report(fill, version=version, round=version))
                    for peer, fill in zip("ab", fills, strict=True)
                )
            )

    async def scenario() -> None:
        config = recipe(syncer=syncing(quorum=2), outer=outer)
        straight, dying, risen = (Hall(config, {"a", "b"}) for _ in range(3))
        await merges(straight, range(6))
        await merges(dying, range(3))
        risen.syncer.load_state_dict(dying.syncer.state_dict())
        assert risen.syncer.round == 2
        await merges(risen, range(3, 6))
        assert [merged.version for merged in risen.merges] == [4, 5, 6]
        for name, tensor in straight.syncer.snapshot()[1].items():
            assert torch.equal(tensor, risen.syncer.snapshot()[1][name]), name

    run(scenario())


def test_a_syncer_back_from_older_state_takes_reports_that_are_ahead() -> None:
    async def scenario() -> None:
        old, hall = (Hall(recipe(syncer=syncing()), {"a"}) for _ in range(2))
        hall.syncer.load_state_dict(old.syncer.state_dict())
        answer = await hall.syncer.handle("a", report(8.0, version=17))
        assert (value_of(answer), answer.meta["version"]) == (8.0, 1)

    run(scenario())


def test_state_of_another_model_is_refused() -> None:
    hall, other = Hall(recipe()), Hall(recipe(fragments=2))
    with pytest.raises(CheckpointError, match="another model or other fragments"):
        hall.syncer.load_state_dict(other.syncer.state_dict())
    state = hall.syncer.state_dict()
    state["tensors"]["anchor/bias"] = torch.zeros(4, dtype=torch.float64)
    with pytest.raises(CheckpointError, match="another model"):
        hall.syncer.load_state_dict(state)


def test_a_snapshot_is_of_one_merge_or_the_next() -> None:
    """Taken from another thread while merges go on: all elements and the version belong together."""
    stop, seen = threading.Event(), list[tuple[int, float]]()

    def look(syncer: Syncer) -> None:
        while not stop.is_set():
            _, state = syncer.snapshot()
            values = torch.cat([state["anchor/weight"].flatten(), state["anchor/bias"]])
            assert torch.all(values == values[0])
            seen.append((int(state["outer/merges"][0]), float(values[0])))

    async def scenario() -> None:
        hall = Hall(recipe(syncer=syncing()), {"a"})
        looking = asyncio.get_running_loop().run_in_executor(None, look, hall.syncer)
        for version in range(200):
            await hall.syncer.handle("a", report(version + 1.0, version=version))
        stop.set()
        await looking

    asyncio.run(scenario())
    assert all(version == value for version, value in seen)


@settings(deadline=None, max_examples=30)
@given(fills=st.lists(st.floats(-10, 10), min_size=1, max_size=6))
def test_theta_becomes_the_mean_whoever_comes_first(fills: list[float]) -> None:
    async def scenario() -> None:
        peers = [f"p{index}" for index in range(len(fills))]
        hall = Hall(recipe(syncer=syncing(quorum=len(fills))), set(peers))
        handles = [hall.syncer.handle(peer, report(fill)) for peer, fill in zip(peers, fills, strict=True)]
        answers = await asyncio.gather(*reversed(handles))
        assert value_of(answers[0]) == pytest.approx(sum(fills) / len(fills), abs=1e-12)

    run(scenario())


def test_card_numbers_come_through_exactly() -> None:
    card = read_card({"fragment": 2, "version": 2**62, "round": 3, "tokens": 0.1, "steps": 7, "sync_time_s": 1e-9})
    assert read_card(card.meta()) == card


# --- DiLoCo three ways, live -----------------------------------------------------------------------------------

WORKERS, ROUNDS, STEPS = 3, 5, 4
NAMES = ("ann", "bob", "cy")
LIVE = {
    "topology": "syncer",
    "local_steps": STEPS,
    "outer": {"learning_rate": 0.7, "momentum": 0.9},
    "syncer": {"quorum": WORKERS, "overlap_steps": 0, "merge": "mean"},
}


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def values(module: nn.Module) -> State:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, worker: int, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * worker + step)
        inputs = torch.randn(8, 5, generator=generator, dtype=torch.float64)
        targets = torch.randn(8, 3, generator=generator, dtype=torch.float64) + worker
        torch.autograd.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def reference() -> list[State]:
    """The 20-line DiLoCo, its workers' AdamW moments kept over rounds as real peers keep them."""
    models = [perceptron() for _ in range(WORKERS)]
    inners = [adamw(model) for model in models]

    def inner(worker: int, round: int, start: State) -> Mapping[str, Tensor]:
        models[worker].load_state_dict(start)
        train(models[worker], inners[worker], worker, range(STEPS * round, STEPS * (round + 1)))
        return values(models[worker])

    make = make_outer(override(Recipe(), LIVE).outer)
    return diloco(values(perceptron()), inner, make, workers=WORKERS, rounds=ROUNDS)


@contextmanager
def world(kind: str, folder: Path) -> Iterator[tuple[NetworkThread, Callable[[str], Transport]]]:
    """A network thread, and what makes transports on it that reach each other: pipes, or p2pd on loopback."""
    thread, stack, network = NetworkThread(), AsyncExitStack(), PipeNetwork()
    addresses: dict[PeerId, list[str]] = {}

    async def pipe(name: str) -> Transport:
        stack.callback(network.leave, name)
        return network.join(name)

    async def libp2p(name: str) -> Transport:
        from peers.daemon import Daemon
        from peers.identity import Identity
        from peers.libp2p import Libp2pTransport

        identity = Identity.load_or_create(folder / f"{name}.key")
        daemon = await Daemon.start(identity, host="127.0.0.1", port=0)
        stack.push_async_callback(daemon.close)
        transport = Libp2pTransport(daemon, lambda peer: addresses.get(peer, []))
        stack.push_async_callback(transport.close)
        addresses[daemon.peer_id] = await daemon.addresses()
        return transport

    try:
        yield thread, lambda name: thread.call(pipe(name) if kind == "pipes" else libp2p(name))
    finally:
        thread.call(stack.aclose())
        thread.close()


@dataclass
class Link:
    """A learner's network: a `gasloc.learner.SyncerLink`."""

    reporter: Reporter

    def send(self, report: Report) -> "Future[Delivery]":
        return self.reporter.send(report)

    def await_merges(self, merges: "Sequence[Future[Delivery]]", *, timeout_s: float) -> None:
        self.reporter.await_merges(merges, timeout_s=min(timeout_s, 30.0))

    def others_rounds(self) -> list[int]:
        return []


@dataclass
class Trader:
    """A peer's network: a `gasloc.gossip.Network`."""

    thread: NetworkThread
    exchange: Exchange
    everybody: Collection[PeerId]

    @property
    def me(self) -> PeerId:
        return self.exchange.me

    def members(self, round: int) -> Collection[PeerId]:
        return self.everybody

    def swap(self, slot: Slot, offers: Mapping[PeerId, Offer], *, timeout_s: float) -> dict[PeerId, Swap]:
        return self.thread.call(self.exchange.swap(slot, offers, timeout_s=timeout_s))

    def swap_any(
        self, slot: Slot, candidates: Sequence[PeerId], offer: Offer, *, timeout_s: float
    ) -> dict[PeerId, Swap]:
        return self.thread.call(self.exchange.swap_any(slot, candidates, offer, timeout_s=timeout_s))

    def others_rounds(self) -> list[int]:
        return []


def train_all(models: Sequence[nn.Module], optimizers: Sequence[GaslocOptimizer]) -> None:
    """Trains every peer in a thread of its own, and compares all of them with DiLoCo after each round."""
    for round, expected in enumerate(reference()):
        steps = range(STEPS * round, STEPS * (round + 1))
        at_once(*(partial(train, models[worker], optimizers[worker], worker, steps) for worker in range(WORKERS)))
        for model in models:
            for name, tensor in values(model).items():
                torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["pipes", "libp2p"])
def test_a_syncer_that_waits_for_all_is_diloco(kind: str, tmp_path: Path) -> None:
    """K = M, one fragment, equal tokens, plain mean, tau = 0."""
    config = override(Recipe(), LIVE)
    results: list[RoundResult] = []
    with world(kind, tmp_path) as (thread, make):
        hub, *places = [make(name) for name in ("hub", *NAMES)]
        syncer = Syncer(config, values(perceptron()), learners=lambda: [place.me for place in places])
        couriers = [Courier(place, run="live", digest=config.digest) for place in (hub, *places)]
        thread.call(couriers[0].serve(syncer.layout, syncer.handle))
        models = [perceptron() for _ in NAMES]
        optimizers = []
        for model, courier in zip(models, couriers[1:], strict=True):
            reporter = Reporter(thread, partial(lambda own: own, courier), lambda: hub.me, threading.Event())
            optimizers.append(
                GaslocOptimizer(
                    adamw(model),
                    model,
                    network=Link(reporter),
                    topology="syncer",
                    local_steps=STEPS,
                    overlap_steps=0,
                    step_tokens=8,
                    on_round=results.append,
                )
            )
        train_all(models, optimizers)
        thread.call(syncer.close())
    assert len(results) == WORKERS * ROUNDS
    assert all(result.mixed and result.partners == (hub.me,) for result in results)
    assert results[-1].reason == "1 of 1 fragments merged, 3.0 learners each"
    assert results[-1].bytes_sent > 8 * sum(tensor.numel() for tensor in values(models[0]).values())


@pytest.mark.parametrize("kind", ["pipes", "libp2p"])
def test_all_to_all_is_the_same_diloco(kind: str, tmp_path: Path) -> None:
    """By reduce-scatter and all-gather, in which nobody sends the whole model to everybody."""
    config = override(Recipe(), LIVE)
    with world(kind, tmp_path) as (thread, make):
        exchanges = [StreamExchange(make(name), run="live", digest=config.digest) for name in NAMES]
        for exchange in exchanges:
            thread.call(exchange.start())
        everybody = [exchange.me for exchange in exchanges]
        models = [perceptron() for _ in NAMES]
        optimizers = [
            GaslocOptimizer(
                adamw(model),
                model,
                network=Trader(thread, exchange, everybody),
                topology="all-to-all",
                local_steps=STEPS,
                outer=make_outer(config.outer),
            )
            for model, exchange in zip(models, exchanges, strict=True)
        ]
        train_all(models, optimizers)
        for exchange in exchanges:
            thread.call(exchange.close())
