"""The event loop's thread, called from the training thread."""

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from peers.errors import PeersError

T = TypeVar("T")

_LOOK_S = 0.05  # how often a call that can be stopped looks whether it is
_CANCEL_S = 10.0  # how long a cancelled coroutine may take to clean up
_JOIN_S = 15.0

_log = logging.getLogger(__name__)


class NetworkThread:
    """A daemon thread with an event loop: uvloop's, or asyncio's own where uvloop is absent."""

    def __init__(self) -> None:
        """Starts the thread."""
        self._loop = _new_loop()
        self._loop.set_exception_handler(_log_crash)
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="gasloc-network", daemon=True)
        self._thread.start()

    def call(
        self,
        coroutine: Coroutine[Any, Any, T],
        *,
        stop: threading.Event | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> T:
        """Runs a coroutine on the loop and blocks until it ends; returns or raises what it does.

        With `stop`, `meanwhile` is called on the caller's thread many times a second until then.

        When `stop` gets set, or the caller is interrupted, the coroutine is cancelled and given 10 s to clean
        up; then `concurrent.futures.CancelledError` is raised, unless it had a result all the same. Raises
        `RuntimeError` once the thread is closed.
        """
        started, future = self._start(coroutine)
        try:
            while stop is not None and not stop.is_set():
                if concurrent.futures.wait([future], timeout=_LOOK_S).done:
                    return future.result()
                meanwhile()
            if stop is None:
                concurrent.futures.wait([future])
                return future.result()
        except BaseException:
            if not future.done():
                self._cancel(started)
            raise
        self._cancel(started)
        if not concurrent.futures.wait([future], timeout=_CANCEL_S).done:
            raise concurrent.futures.CancelledError
        return future.result()

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Runs a coroutine on the loop and does not wait. What it raises is in the future; a crash is logged too.

        A `PeersError` is not: it is for whoever holds the future to tell, once. Raises `RuntimeError` once the
        thread is closed.
        """
        _, future = self._start(coroutine)
        future.add_done_callback(_log_crashed_task)
        return future

    def close(self) -> None:
        """Cancels what still runs on the loop, stops it and joins the thread. Safe to call twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> "tuple[list[asyncio.Task[T]], concurrent.futures.Future[T]]":
        started: list[asyncio.Task[T]] = []
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def begin() -> None:
            task = self._loop.create_task(coroutine)
            started.append(task)
            task.add_done_callback(lambda done: _settle(future, done))

        with self._lock:
            if self._closed:
                coroutine.close()
                raise RuntimeError("the network thread is closed")
            self._loop.call_soon_threadsafe(begin)
        return started, future

    def _cancel(self, started: "list[asyncio.Task[T]]") -> None:
        def cancel() -> None:
            for task in started:  # empty only before `begin` ran, and that comes first
                task.cancel()

        with contextlib.suppress(RuntimeError):  # the loop is closed: everything on it was cancelled
            self._loop.call_soon_threadsafe(cancel)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(_cancel_all())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


async def _cancel_all() -> None:
    """Cancels every task but this one and waits for their ends, in bounded time."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_CANCEL_S)


def _settle(future: "concurrent.futures.Future[T]", task: "asyncio.Task[T]") -> None:
    if task.cancelled():
        future.set_exception(concurrent.futures.CancelledError())
        return
    error = task.exception()
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())


def _log_crashed_task(future: "concurrent.futures.Future[Any]") -> None:
    error = future.exception()
    if error is not None and not isinstance(error, concurrent.futures.CancelledError | PeersError):
        _log.error("a background task crashed", exc_info=error)


def _log_crash(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """For what no one awaits: hivemind's own tasks, streams that break."""
    error = context.get("exception")
    level = logging.DEBUG if isinstance(error, OSError | EOFError) else logging.ERROR
    _log.log(level, "in the event loop: %s", context.get("message"), exc_info=error)
