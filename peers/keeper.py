"""Keeps a peer going: starts p2pd again when it ends, and catches up after time in which we did not run."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable

from peers import revival
from peers.daemon import Daemon
from peers.errors import DaemonError
from peers.revival import Beat, Jump

BEAT_S = 1.0
_AGAIN_S = 0.5
_MAX_NOTICES = 64

_log = logging.getLogger(__name__)


class Keeper:
    """Watches over a running p2pd and over time, from `start` to `close`; see `peers.revival` for the rules."""

    def __init__(
        self, daemon: Daemon, *, resume: Callable[[], Awaitable[None]], wake: Callable[[], Awaitable[None]]
    ) -> None:
        """`resume` does what a p2pd that was started again needs, so that all is as before.

        `wake` renews what grew old while we did not run. Both may raise; the first is then done again with another
        p2pd.
        """
        self._daemon = daemon
        self._resume = resume
        self._wake = wake
        self._resuming = False
        self._gone = ""
        self._trouble = ""
        """Why p2pd could not be started again the last time; empty where it could."""
        self._notices: deque[str] = deque(maxlen=_MAX_NOTICES)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Watches from now on."""
        self._tasks = [asyncio.create_task(self._keep_daemon()), asyncio.create_task(self._keep_time())]

    async def close(self) -> None:
        """Watches no more; then p2pd may be ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def up(self) -> bool:
        """Whether p2pd runs and all is set up; false while it is started again.

        Raises `DaemonError` once it is gone for good.
        """
        if self._gone:
            raise DaemonError(self._gone)
        return self._daemon.alive() and not self._resuming

    @property
    def given_up(self) -> bool:
        """Whether p2pd is gone for good."""
        return bool(self._gone)

    def take_notices(self) -> list[str]:
        """What happened since this was last asked, a line each, oldest first. From any thread."""
        notices = []
        while self._notices:
            notices.append(self._notices.popleft())
        return notices

    async def _keep_daemon(self) -> None:
        loop = asyncio.get_running_loop()
        ends: list[float] = []
        ended_s = None
        while True:
            await self._daemon.ended()
            if self._daemon.abandoned:
                self._gone = "p2pd, the network daemon, was told to end at once"
                return
            ends.append(loop.time())
            ended_s = ended_s or ends[-1]
            again, reason = revival.restart(ends)
            if not again:
                trouble = f", at last as {self._trouble}" if self._trouble else ""
                self._gone = f"{reason}{trouble}; start this peer again"
                return
            _log.info("%s; starting it again", reason)
            self._trouble = await self._tried(self._restart)
            if not self._trouble:
                line = f"p2pd ended; restarted in {loop.time() - ended_s:.1f} s"
                await self._tried(self._wake)
                self._notices.append(line)
                ended_s = None
            else:
                await self._daemon.close()
                await asyncio.sleep(_AGAIN_S)

    async def _restart(self) -> None:
        self._resuming = True
        await self._daemon.restart()
        await self._resume()
        self._resuming = False

    async def _keep_time(self) -> None:
        before = beat()
        while True:
            await asyncio.sleep(BEAT_S)
            after = beat()
            jump, line = revival.judge(before, after, every_s=BEAT_S)
            if jump is Jump.PAUSED:
                await self._tried(self._wake)
            if jump is not Jump.NONE:
                self._notices.append(line)
            before = beat()

    async def _tried(self, action: Callable[[], Awaitable[None]]) -> str:
        """Why it failed; empty where it did not."""
        try:
            await action()
        except Exception as error:  # hivemind raises many kinds when p2pd ends under it
            _log.debug("%r failed: %r", action, error)
            return str(error) or type(error).__name__
        return ""


def beat() -> Beat:
    """Now. On Linux by a clock that goes on while the machine sleeps; macOS has no other."""
    steady_s = time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
    return Beat(steady_s, time.time())
