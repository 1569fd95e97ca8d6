"""Counts the bytes that our protocols send and receive, by the kind of conversation."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes in both directions."""

    sent_bytes: int = 0
    received_bytes: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.sent_bytes + other.sent_bytes, self.received_bytes + other.received_bytes)


class Meter:
    """Totals since the start, one for each kind of conversation ("exchange", "probe", "state", "card").

    Counts what our protocols put on and take off their streams, headers and checksums included; encryption,
    libp2p's own frames and the DHT are not in it. Not locked: count on the event loop's thread; totals may
    be read from any.
    """

    def __init__(self) -> None:
        self._by_kind: dict[str, Traffic] = {}

    def sent(self, kind: str, size_bytes: int) -> None:
        """Adds bytes that went out."""
        self._by_kind[kind] = self._by_kind.get(kind, Traffic()) + Traffic(sent_bytes=size_bytes)

    def received(self, kind: str, size_bytes: int) -> None:
        """Adds bytes that came in."""
        self._by_kind[kind] = self._by_kind.get(kind, Traffic()) + Traffic(received_bytes=size_bytes)

    @property
    def by_kind(self) -> Mapping[str, Traffic]:
        """A copy of the totals of each kind."""
        return self._by_kind.copy()

    @property
    def total(self) -> Traffic:
        """The sum over all kinds."""
        return sum(self._by_kind.copy().values(), Traffic())
