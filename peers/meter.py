"""Counts the bytes that our protocols send and receive, by kind."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes in both directions."""

    sent_bytes: int = 0
    received_bytes: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.sent_bytes + other.sent_bytes, self.received_bytes + other.received_bytes)


class Meter:
    """Totals since the start, one for each kind of traffic ("exchange", "state", "card").

    Counts what our protocols put on and take off their streams, headers and checksums included; encryption,
    libp2p's own frames and the DHT are not in it. Not locked: count on the event loop's thread; totals may
    be read from any.
    """

    def __init__(self) -> None:
        self._by_kind: dict[str, Traffic] = {}

    def count(self, kind: str, *, sent: int = 0, received: int = 0) -> None:
        """Adds bytes to one kind."""
        self._by_kind[kind] = self._by_kind.get(kind, Traffic()) + Traffic(sent, received)

    @property
    def by_kind(self) -> Mapping[str, Traffic]:
        """A copy of the totals of each kind."""
        return MappingProxyType(dict(self._by_kind))

    @property
    def total(self) -> Traffic:
        """The sum over all kinds."""
        return sum(self._by_kind.copy().values(), Traffic())
