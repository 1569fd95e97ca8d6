"""Which donor is asked for which chunks, and when a donor is given up. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from peers.exchange import PeerId
from peers.manifest import CHUNK_BYTES, Manifest

MOST_CHUNKS = 16
"""In one request; a donor that breaks off loses at most the one chunk that was on its way."""
_REQUEST_S = 4.0
"""A request is so large that it takes about so long: far longer than its way there, short enough to re-assign."""
_SHARES = 2
"""Requests are at most this part of a donor's share of what is left, so that all donors end at about one time."""
_PATIENCE = 3
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 8.0


@dataclass(frozen=True, slots=True)
class Group:
    """Donors that hold the very same state."""

    manifest: Manifest
    donors: tuple[PeerId, ...]


def groups(offers: Mapping[PeerId, Manifest]) -> list[Group]:
    """The donors grouped by root, best group first.

    `offers` in order of preference. Chunks of different donors fit together only where their roots are equal. The
    highest round comes first, then the most donors, then the group of the most preferred donor.
    """
    found: dict[str, list[PeerId]] = {}
    for donor, manifest in offers.items():
        found.setdefault(manifest.root, []).append(donor)
    made = [Group(offers[donors[0]], tuple(donors)) for donors in found.values()]
    return sorted(made, key=lambda group: (-group.manifest.round, -len(group.donors)))


def next_request(pending: Sequence[int], donors: int, rate_bytes_per_s: float) -> range:
    """The chunks to ask one donor for next: the first unbroken run in `pending`, or a part of it.

    `pending`: chunks that nobody has been asked for, ascending, at least one. `donors`: how many fetch now, this
    one included. `rate_bytes_per_s`: what this donor gave lately; 0: not known, so one chunk. A slow donor is
    never asked for more than it gives in about 4 s, or for one chunk.
    """
    by_rate = int(rate_bytes_per_s * _REQUEST_S / CHUNK_BYTES)
    by_share = math.ceil(len(pending) / (_SHARES * donors))
    most = max(1, min(MOST_CHUNKS, by_rate, by_share))
    count = 1
    while count < min(most, len(pending)) and pending[count] == pending[0] + count:
        count += 1
    return range(pending[0], pending[0] + count)


class Trouble(Enum):
    """How a stream to a donor ended before all was fetched."""

    BROKE = auto()
    """It was cut, or could not be opened."""
    STALLED = auto()
    BUSY = auto()
    SAID_NO = auto()
    """It will not, or no longer can, give this state."""
    LIED = auto()
    """It sent what the protocol or the manifest does not allow."""


@dataclass(frozen=True, slots=True)
class Patience:
    """What is held against a donor since it last gave a chunk."""

    faults: int = 0
    tries: int = 0
    """How often it has been busy without a break."""
    busy_since: float | None = None

    def after(
        self, trouble: Trouble, *, progressed: bool, now: float, most_busy_s: float
    ) -> "tuple[Patience, float | None]":
        """The new account, and how many seconds to wait before the donor is tried again; None: give it up.

        `progressed`: the stream gave chunks before it ended, which wipes the account. A broken stream is opened
        again at once after progress; without any, up to twice; a stall weighs as much as two breaks. A busy donor
        is asked again, after longer and longer pauses, for `most_busy_s`. Who lied or said no is not.
        """
        before = Patience() if progressed else self
        if trouble in (Trouble.SAID_NO, Trouble.LIED):
            return before, None
        if trouble is Trouble.BUSY:
            since = now if before.busy_since is None else before.busy_since
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(before.tries, 8))
            account = Patience(before.faults, before.tries + 1, since)
            return account, pause_s if now - since < most_busy_s else None
        account = Patience(before.faults + (2 if trouble is Trouble.STALLED else 1))
        if progressed:
            return account, 0.0
        return account, None if account.faults >= _PATIENCE else _FIRST_PAUSE_S * 2.0**account.faults
