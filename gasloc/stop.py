"""Told to stop: once means in good order, twice means now."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

EXIT_NOW = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """Turns SIGINT, SIGTERM and SIGHUP into an event, for a `with` block on the main thread.

    The first signal sets `event`; the second calls `on_second` and ends the process at once with code 130. SIGHUP
    only ever asks for an orderly end: as a terminal goes, both the system and the shell may send it. It is left alone
    where it was ignored before us, as under `nohup`.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self.on_second: Callable[[], None] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in SIGNALS:
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def tell(self) -> None:
        """Asks for an orderly end. From any thread."""
        self.event.set()

    def exit_now(self) -> None:
        """Ends the process at once. From any thread; does not return."""
        try:
            if self.on_second is not None:
                self.on_second()
        finally:
            os._exit(EXIT_NOW)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.event.is_set() and number != signal.SIGHUP:
            self.exit_now()
        self.tell()
