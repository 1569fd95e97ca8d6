"""Reasons in words, told when they change and not each time they hold."""

import re

_VARIES = re.compile(r"\b(?:12D3KooW|Qm)\w+|\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def kind(reason: str) -> str:
    """What stays of a reason from round to round: its clauses without peer ids and numbers, each once and sorted."""
    return "; ".join(sorted({_VARIES.sub("#", clause) for clause in reason.split("; ")}))


class Reasons:
    """Why something is not so now; empty while it is."""

    def __init__(self) -> None:
        self._kind = ""

    def changed(self, reason: str) -> bool:
        """Whether this is a reason of another kind than the last one, and so to be told."""
        before, self._kind = self._kind, kind(reason)
        return self._kind != before
