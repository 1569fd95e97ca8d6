"""An asyncio event loop whose clock jumps to the next timer when there is nothing to do.

Hours of time-outs, links and training steps pass in milliseconds, and in the same order every time. Work that was
handed to threads is waited for in real time, during which the clock stands still. For code that talks only within
the process: with real sockets the clock would run past answers that are on their way.
"""

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, Unpack

from gasloc.errors import RunError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_REAL_WAIT_S = 0.05


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of sleeping, tells the loop to move its clock on."""

    loop: "VirtualTimeLoop"

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout == 0 and not self.loop.threads_used:
            return []  # nothing but a thread could wake us: no system call
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if self.loop.threads_busy or (timeout is None and self.loop.threads_used):
            return super().select(_REAL_WAIT_S)
        if timeout is None:
            raise RunError("the simulation stands still: every task waits for another, and no timer is set")
        self.loop.jump(timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and moves only when every task waits for it."""

    def __init__(self) -> None:
        selector = _JumpingSelector()
        selector.loop = self
        self._now_s = 0.0
        self._threads_busy = 0
        self.threads_used = False
        """Whether work was ever handed to a thread."""
        super().__init__(selector)

    def time(self) -> float:
        return self._now_s

    def jump(self, seconds: float) -> None:
        """Moves the clock on."""
        self._now_s += seconds
        # asyncio runs timers due before now + this; after weeks of virtual time the usual 1e-9 s would round away
        self._clock_resolution = max(1e-9, 2 * math.ulp(self._now_s))

    @property
    def threads_busy(self) -> bool:
        """Whether work is under way in threads."""
        return self._threads_busy > 0

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self.threads_used = True
        self._threads_busy += 1
        future.add_done_callback(self._thread_done)
        return future

    def _thread_done(self, future: asyncio.Future[Any]) -> None:
        self._threads_busy -= 1


def run(coroutine: Coroutine[Any, Any, T], *, limit_s: float | None = None) -> T:
    """Runs a coroutine to its end on a fresh loop and returns its result. Cancels what it left running.

    Raises what it raises; `TimeoutError` after `limit_s` of virtual time: it hangs; and `RunError` when every
    task waits for another.
    """

    async def limited() -> T:
        async with asyncio.timeout(limit_s):
            return await coroutine

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(limited())
