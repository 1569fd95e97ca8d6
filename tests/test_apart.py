"""A peer that went on without the others, rounds ahead of them: it comes back to their round, with their state."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from gasloc import company
from gasloc.entry import Source
from gasloc.optimizer import GaslocOptimizer
from gasloc.recipe import parse
from gasloc.swarm import Swarm
from peers.exchange import Answer, Offer, PeerId, Slot, Swap
from peers.node import PeerOptions
from tests.test_guard import Weight

GRACE_S = 60.0


def test_it_takes_the_others_round_and_state_and_trades_with_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = parse({"rounds": 500})
    with ExitStack() as stack:

        def join(name: str, replica: Weight, *addresses: str) -> Swarm:
            options = PeerOptions(tmp_path / name, host="127.0.0.1", initial_peers=addresses)
            swarm = stack.enter_context(Swarm.join(options) if addresses else Swarm.start(recipe, options))
            swarm.enter(replica)
            swarm.train()
            return swarm

        first = join("first", Weight(1.0, round=20))
        others = [first, *(join(name, Weight(1.0, round=20), first.addresses[0]) for name in ("second", "third"))]
        replica = Weight(9.0, round=300)
        ahead = join("ahead", replica, first.addresses[0])
        fellow = join("fellow", Weight(8.0, round=310), first.addresses[0])
        for swarm in (*others, ahead, fellow):
            assert swarm.wait_for(5) == 5
        offer = Offer({"w": torch.zeros(4)})
        assert ahead.swap(Slot(300), {fellow.me: offer}, timeout_s=0.1)[fellow.me].answer is not Answer.ACCEPT

        assert ahead.catch_up() is None, "it came just now: what others publish may be old"
        assert replica.round == 300
        monkeypatch.setattr(company, "APART_S", 0.0)
        for swarm in others:
            assert swarm.catch_up() is None, "a minority ahead moves nobody"
        entry = ahead.catch_up()
        assert entry is not None
        assert entry.source is Source.DONOR
        assert entry.reason.startswith("280 rounds ahead of most others")
        assert (replica.round, replica.value, entry.round) == (20, 1.0, 20), "not the state of the one further ahead"
        assert ahead.catch_up() is None

        waits = ahead._thread.spawn(ahead._peer.exchange.swap(Slot(20), {first.me: offer}, timeout_s=GRACE_S))
        assert first.swap(Slot(20), {ahead.me: offer}, timeout_s=GRACE_S)[ahead.me].answer is Answer.ACCEPT
        assert waits.result()[first.me].answer is Answer.ACCEPT


class Deaf:
    """A network in which nobody answers, and which notes the slots that were asked for."""

    me = "a"

    def __init__(self) -> None:
        self.slots: list[Slot] = []

    def members(self, round: int) -> Collection[PeerId]:
        return {"a", "b"}

    def others_rounds(self) -> list[int]:
        return []

    def swap(self, slot: Slot, offers: Mapping[PeerId, Offer], *, timeout_s: float) -> dict[PeerId, Swap]:
        self.slots.append(slot)
        return {}

    def swap_any(
        self, slot: Slot, candidates: Sequence[PeerId], offer: Offer, *, timeout_s: float
    ) -> dict[PeerId, Swap]:
        return {}


def test_slots_begin_anew_with_a_state_of_an_earlier_round() -> None:
    network = Deaf()
    model = torch.nn.Linear(1, 1)
    optimizer = GaslocOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, network=network, topology="2-peer", local_steps=1
    )
    _, state = optimizer.snapshot()
    for begin in (7, 3):
        optimizer.load_snapshot(begin, state)
        for _ in range(2):
            torch.autograd.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
    assert [slot.round for slot in network.slots] == [7, 8, 3, 4]
