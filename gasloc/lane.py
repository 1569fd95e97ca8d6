"""One thread for work that training does not wait for, one piece after another."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Lane:
    """Runs pieces of work in the order in which they come, without gradients.

    The thread lives only while there is work, so there is nothing to close. It does not keep the process from ending.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._running = False

    def run(self, work: Callable[[], T]) -> "Future[T]":
        """Has `work` done after all that came before; what it returns or raises is in the future."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.append((work, future))
            if not self._running:
                self._running = True
                threading.Thread(target=self._work, name="gasloc-exchange", daemon=True).start()
        return future

    @torch.no_grad()
    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._running = False
                    return
                work, future = self._waiting.popleft()
            try:
                result = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del work, future  # what they hold must not outlive its use while the next runs
