"""The one interface through which a trainer sees the network in a round.

Two implementations, held to one contract test suite: `peers.stream_exchange.StreamExchange` (over libp2p
streams, or over in-memory pipes) and `peers.memory_exchange.MemoryExchange` (one process, no bytes).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import torch

PeerId = str
"""A libp2p peer id in base58; for an Ed25519 identity it holds the public key itself."""

Tensors = Mapping[str, torch.Tensor]
"""Named tensors. Order does not matter: both sides send in sorted order of names."""


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """Which exchange of a run this is. Two peers trade only when their slots are equal."""

    round: int
    mix: int = 0
    """Index of the mix within the round, for several mixes a round."""
    phase: str = ""
    """Part of a mix: "" for a plain swap; "scatter" and "gather" in an all-reduce; a fragment's name."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one tensor, known before a byte of it is received."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Layout = Mapping[str, TensorSpec]


def layout_of(tensors: Tensors) -> dict[str, TensorSpec]:
    """The layout of named tensors, as the other side must announce it."""
    return {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


@dataclass(frozen=True, slots=True)
class Offer:
    """What we send one partner and what we expect of it."""

    send: Tensors
    expect: Layout | None = None
    """None: the same layout as `send`."""
    note: Mapping[str, float] = field(default_factory=dict)
    """Small numbers for the partner's use: steps, tokens. At most 16 entries."""
    start: Tensors | None = None
    """What the values moved from, by names of `send` and `near`: at best a round's own start. Only read.

    Modular codecs choose their ranges by these movements. They send tensors that are not in it as they are.
    """
    near: Tensors | None = None
    """Our own values of what is expected, where that is not what is sent; of layout `expect`. Only read.

    Modular codecs restore the partner's values from them. None: from `send`.
    """


class Answer(StrEnum):
    """How one trade ended. The first five are answers in a hello; the others are found out here."""

    ACCEPT = "accept"
    BEHIND = "behind"
    """The partner has not reached our round."""
    AHEAD = "ahead"
    """The partner is past our round; `Swap.their_round` says where."""
    PAIRED_ELSEWHERE = "paired-elsewhere"
    BUSY = "busy"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    BROKEN = "broken"
    """The stream ended, stalled or was garbled in the middle of a trade."""
    STOPPED = "stopped"
    """We ourselves were told to stop."""


@dataclass(frozen=True, slots=True)
class Swap:
    """The outcome of one trade with one partner: all of its tensors, or none."""

    answer: Answer
    reason: str
    """In words, fit for a log line after the partner's id, which it does not repeat."""
    tensors: Tensors | None = None
    """Whole, checksummed, of the expected layout, acknowledged by both; ours to keep. None unless ACCEPT."""
    note: Mapping[str, float] = field(default_factory=dict)
    their_round: int | None = None
    next_slot_s: float | None = None
    """In how many seconds a partner that is ahead will be at its next round, going by its last; None: not known."""
    at_fault: bool = False
    """The partner sent what it must not: it is to blame that there are no tensors, not a link and not we."""
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0
    """Of the transfer, without the wait for the partner; of the wait, where no transfer began."""
    ended_s: float = math.nan
    """When the transfer ended, by the clock of the event loop. Not a number where it did not, or was several."""


class Exchange(Protocol):
    """Trades named tensors with partners in one slot."""

    @property
    def me(self) -> PeerId: ...

    async def swap(self, slot: Slot, offers: Mapping[PeerId, Offer], *, timeout_s: float) -> dict[PeerId, Swap]:
        """Trades with every partner in `offers` at once, both directions at once.

        Returns one `Swap` for each partner within about `timeout_s` plus the time that a transfer which
        makes progress needs; never raises for what a partner does or fails to do. `offers` may be empty.
        A partner not yet at this slot is waited for, up to `timeout_s`. Sent tensors must not change before
        this returns; they are only read. Slots must not decrease from call to call: a partner that asks for
        an earlier slot is answered `ahead` with our round.
        """
        ...

    async def swap_any(
        self, slot: Slot, candidates: Sequence[PeerId], offer: Offer, *, timeout_s: float
    ) -> dict[PeerId, Swap]:
        """Trades with one peer that is left over in `slot`, as we are: the first of `candidates` that can be had.

        To be called after `swap` in the same slot, where none of its trades began; a peer that will not look for
        others calls it too, without candidates, which tells those who still count on it. While it runs, any peer
        of the run that is left over in that slot may choose us, whether it is a candidate of ours or not.

        Returns what came of each that was asked, and of the one that chose us: at most one is `ACCEPT`, and at most
        one trade began, whatever came of it. Ends with the trade; or, within about `timeout_s`, once time is over;
        or at once when each candidate is known to mix with another, to have gone on, or to be gone. One that is not
        there yet, or still waits for its own partners, is asked again.
        """
        ...
