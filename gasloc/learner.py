"""A learner's side of Decoupled DiLoCo: reports fragments, trains on, and takes merged ones as they come.

    sent    = a copy of fragment p as it is when it is due            # what travels
    ...                                                               # training goes on
    current = theta_new + (current - sent)                            # the local progress since is kept

Nothing here touches a network: what is sent goes through `SyncerLink`, whose futures end whenever they do.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from gasloc import mixing
from gasloc.errors import GaslocError, ModelError
from peers.errors import PeersError
from peers.exchange import Answer, PeerId, Swap, Tensors

MERGES = "merges"
"""The learner's state in a snapshot: how many merges of each fragment it holds, int64 of shape (P,)."""


@dataclass(frozen=True, slots=True)
class Report:
    """One fragment on its way to the syncer."""

    fragment: int
    version: int
    """The merge of this fragment that the learner took last; 0 where none."""
    round: int
    tokens: float
    """Trained since what the last merge taken was made of was sent, or since the learner joined. Above 0."""
    steps: int
    """Local steps behind these tokens. Above 0."""
    tensors: Tensors
    """phi: the fragment, a copy of its own."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A merged fragment, back from the syncer."""

    syncer: PeerId
    fragment: int
    version: int
    tensors: Tensors
    """Theta of the fragment after the merge; of the same layout as what was sent."""
    learners: int
    """Learners whose fragments went into the merge."""
    seconds: float
    """From sending to having all of it."""
    held_s: float
    """Of these, how long the syncer held it: waiting for others, and merging."""
    bytes_sent: int
    bytes_received: int


@runtime_checkable
class SyncerLink(Protocol):
    """What a learner sees of the network. `gasloc.swarm.Swarm` is one."""

    def send(self, report: Report) -> "Future[Delivery]":
        """Sends a fragment and returns at once.

        The future ends with the merged fragment, or with the `PeersError` or `GaslocError` that says why there
        is none. It ends in bounded time whatever the syncer does.
        """
        ...

    def await_merges(self, merges: "Sequence[Future[Delivery]]", *, timeout_s: float) -> None:
        """Blocks until all are done, the time is over, or this peer is told to stop."""
        ...

    def others_rounds(self) -> list[int]:
        """The rounds that the other learners publish."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a learner's reports within one round."""

    swaps: Mapping[PeerId, Swap]
    """At most one, with the syncer, without tensors: accepted if any fragment came back."""
    reported: int
    merged: int
    reason: str
    distance: float | None
    """||theta_new - sent|| / ||sent|| over the merged fragments; None where there is none."""


@dataclass(slots=True)
class _Flight:
    merge: "Future[Delivery]"
    sent: Tensors
    tokens: float
    steps: int


class Learner:
    """Keeps account of fragments under way, of the tokens behind each, and of the merges taken."""

    def __init__(self, parts: Sequence[Sequence[str]], link: SyncerLink) -> None:
        """`parts`: the names of each fragment's tensors."""
        self._parts = parts
        self._link = link
        self._versions = [0] * len(parts)
        self._tokens = [0.0] * len(parts)
        self._steps = [0] * len(parts)
        self._flights: dict[int, _Flight] = {}
        self._begin_outcome()

    @property
    def unreported(self) -> tuple[int, ...]:
        """The fragments with local progress of which nothing is with the syncer, ascending."""
        return tuple(i for i, steps in enumerate(self._steps) if steps > 0 and i not in self._flights)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The fragments that are with the syncer, ascending."""
        return tuple(sorted(self._flights))

    def count_step(self, tokens: float) -> None:
        """Counts one local step of `tokens` tokens behind every fragment."""
        for index in range(len(self._parts)):
            self._tokens[index] += tokens
            self._steps[index] += 1

    def report(self, index: int, phi: Tensors, round: int) -> None:
        """Sends a copy of fragment `index` out of `phi`, unless its last report has not come back yet."""
        self._reported += 1
        if index in self._flights:
            self._reasons.append(f"fragment {index} was due again before its last merge had come back: skipped")
            return
        sent = {name: phi[name].detach().to("cpu", copy=True) for name in self._parts[index]}
        tokens, steps = self._tokens[index], self._steps[index]
        report = Report(index, self._versions[index], round, tokens, steps, sent)
        self._flights[index] = _Flight(self._link.send(report), sent, tokens, steps)

    def wait(self, timeout_s: float) -> None:
        """Blocks until everything under way has ended, or `timeout_s` has passed."""
        if self._flights:
            self._link.await_merges([flight.merge for flight in self._flights.values()], timeout_s=timeout_s)

    def arrived(self) -> bool:
        """Whether `take` has anything to do."""
        return any(flight.merge.done() for flight in self._flights.values())

    @torch.no_grad()
    def take(self, current: Tensors) -> dict[str, Tensor]:
        """New values for the fragments that have come back: `theta_new + (current - sent)`; never changes `current`.

        `current` holds all parameters as they are now. What did not come back is dropped, its reason kept for
        `end_round`; the progress that it carried is in the parameters still, and in the next report.
        """
        values: dict[str, Tensor] = {}
        for index in [index for index, flight in self._flights.items() if flight.merge.done()]:
            flight = self._flights.pop(index)
            try:
                delivery = flight.merge.result()
            except (PeersError, GaslocError) as error:
                self._reasons.append(f"fragment {index}: {error}")
                continue
            for name in self._parts[index]:
                now = current[name]
                values[name] = delivery.tensors[name].to(now) + (now - flight.sent[name].to(now))
            self._versions[index] = delivery.version
            self._tokens[index] -= flight.tokens
            self._steps[index] -= flight.steps
            self._count(delivery, flight.sent)
        return values

    def end_round(self) -> Outcome:
        """What came of the round's reports; counts anew from now on."""
        merged = self._merged
        words = [f"{merged} of {self._reported} fragments merged"]
        if merged:
            words.append(f"{self._learners / merged:.1f} learners each")
        if self._flights:
            words.append(f"{len(self._flights)} under way")
        reason = ", ".join(words) + "".join(f"; {why}" for why in dict.fromkeys(self._reasons))
        swaps = {}
        if self._syncer is not None:
            swaps[self._syncer] = Swap(
                Answer.ACCEPT,
                reason,
                bytes_sent=self._bytes_sent,
                bytes_received=self._bytes_received,
                seconds=self._seconds / merged,
            )
        distance = math.sqrt(self._moved_squared / self._size_squared) if self._size_squared else None
        outcome = Outcome(swaps, self._reported, merged, reason, distance)
        self._begin_outcome()
        return outcome

    def restart(self, merges: Tensor) -> None:
        """After fresh state was taken, which holds these merges (int64, one a fragment).

        What is under way comes from the state before, and is dropped. Raises `ModelError`, with nothing changed,
        where `merges` does not fit.
        """
        self.check(merges)
        self._versions = merges.tolist()
        self._tokens = [0.0] * len(self._parts)
        self._steps = [0] * len(self._parts)
        self._flights.clear()

    def forget(self) -> None:
        """After the parameters went back: what is under way holds progress that they no longer have, so it is
        dropped when it comes. Its tokens count in the next report."""
        self._flights.clear()

    def check(self, merges: Tensor) -> None:
        """Raises `ModelError` where `merges` is not one count for each fragment."""
        if merges.dtype != torch.int64 or merges.shape != (len(self._parts),) or bool((merges < 0).any()):
            raise ModelError(
                f"'{MERGES}' is {tuple(merges.shape)} {merges.dtype} in the state, not a count for each of "
                f"{len(self._parts)} fragments"
            )

    def merges(self) -> Tensor:
        """How many merges of each fragment the parameters hold: int64 of shape (P,)."""
        return torch.tensor(self._versions, dtype=torch.int64)

    def counts(self) -> dict[str, list[float] | list[int]]:
        """Tokens and steps behind each fragment, for a checkpoint."""
        return {"tokens": list(self._tokens), "steps": list(self._steps)}

    def load_counts(self, counts: Mapping[str, Sequence[float]]) -> None:
        """Goes on from what `counts` gave. Raises `ModelError` where it has another number of fragments."""
        tokens, steps = counts["tokens"], counts["steps"]
        if not len(tokens) == len(steps) == len(self._parts):
            raise ModelError(f"the state counts {len(tokens)} fragments, this model has {len(self._parts)}")
        self._tokens = [float(value) for value in tokens]
        self._steps = [int(value) for value in steps]

    def _begin_outcome(self) -> None:
        self._reasons: list[str] = []
        self._reported = self._merged = self._learners = 0
        self._bytes_sent = self._bytes_received = 0
        self._seconds = self._moved_squared = self._size_squared = 0.0
        self._syncer: PeerId | None = None

    def _count(self, delivery: Delivery, sent: Tensors) -> None:
        size_squared = mixing.squared_norm(sent)
        self._size_squared += size_squared
        if size_squared:
            self._moved_squared += mixing.distance(sent, delivery.tensors) ** 2 * size_squared
        self._syncer = delivery.syncer
        self._merged += 1
        self._learners += delivery.learners
        self._bytes_sent += delivery.bytes_sent
        self._bytes_received += delivery.bytes_received
        self._seconds += delivery.seconds - delivery.held_s
