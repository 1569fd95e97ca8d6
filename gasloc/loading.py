"""Ctrl-C while Python still loads what a command needs: an end at once, and no traceback."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """For imports that take seconds, before anything was begun that must be ended in order. On the main thread.

    In this block SIGINT ends the process as it ends any other program. `KeyboardInterrupt`, raised inside somebody
    else's module, would be taken for that module's own failure and be told as a traceback. Where SIGINT is ignored or
    handled, as by a shell's background or by `gasloc.stop.Stop`, it stays so.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
