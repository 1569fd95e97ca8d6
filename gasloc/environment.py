"""Environment variables: every flag has one, and one that we do not know is an error, never ignored."""

import difflib
from collections.abc import Collection, Iterable

from gasloc.errors import UsageError

PREFIX = "GASLOC_"


def check(environment: Iterable[str], known: Collection[str]) -> None:
    """Raises `UsageError` for the first `GASLOC_...` name that no flag reads, with the nearest that one does."""
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known:
            nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)
            hint = f"; the nearest known one is {nearest[0]}" if nearest else ""
            raise UsageError(f"environment variable {name} is not known{hint}")


def without_ours(environment: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The environment for a child process whose every flag is on its command line."""
    return {name: value for name, value in environment if not name.startswith(PREFIX)}
