"""Virtual time for tests of coroutines; a coroutine that hangs for an hour of it fails."""

from collections.abc import Coroutine
from typing import Any, TypeVar

from gasloc.simulation import virtual_time

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T], *, limit_s: float = 3600.0) -> T:
    """Runs a coroutine under virtual time; `TimeoutError` after `limit_s` of it: it hangs."""
    return virtual_time.run(coroutine, limit_s=limit_s)
