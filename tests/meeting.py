"""A swarm's network for threads of one process: partners meet at a slot and swap tensors, without bytes."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from peers.exchange import Answer, Offer, PeerId, Slot, Swap


@dataclass
class Meeting:
    """Where the members meet. Every member takes part in every round."""

    members: tuple[PeerId, ...]
    deadline_s: float = 20.0
    _offers: dict[tuple[Slot, PeerId, PeerId], dict[str, Tensor]] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def bring(self, slot: Slot, sender: PeerId, receiver: PeerId, tensors: Mapping[str, Tensor]) -> None:
        with self._changed:
            self._offers[slot, sender, receiver] = {name: tensor.clone() for name, tensor in tensors.items()}
            self._changed.notify_all()

    def fetch(self, slot: Slot, sender: PeerId, receiver: PeerId) -> dict[str, Tensor]:
        key = slot, sender, receiver
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._offers, self.deadline_s), f"{sender} never came"
            return self._offers.pop(key)


@dataclass
class Seat:
    """One member's view of the meeting: a `gasloc.optimizer.Network`."""

    meeting: Meeting
    me: PeerId
    sent: list[Mapping[str, Tensor]] = field(default_factory=list)

    def members(self, round: int) -> Collection[PeerId]:
        return self.meeting.members

    def swap(self, slot: Slot, offers: Mapping[PeerId, Offer], *, timeout_s: float) -> dict[PeerId, Swap]:
        for partner, offer in offers.items():
            self.sent.append(offer.send)
            self.meeting.bring(slot, self.me, partner, offer.send)
        return {
            partner: Swap(Answer.ACCEPT, "whole", tensors=self.meeting.fetch(slot, partner, self.me))
            for partner in offers
        }

    def swap_any(
        self, slot: Slot, candidates: Sequence[PeerId], offer: Offer, *, timeout_s: float
    ) -> dict[PeerId, Swap]:
        assert not candidates, "every partner of a meeting comes"
        return {}

    def others_rounds(self) -> list[int]:
        return []


def seats(names: str) -> list[Seat]:
    """A meeting of members with one-letter names."""
    meeting = Meeting(tuple(names))
    return [Seat(meeting, name) for name in names]


def at_once(*works: Callable[[], object]) -> None:
    """Runs each in a thread of its own; passes on what the first to fail raised."""
    failures: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=40)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
