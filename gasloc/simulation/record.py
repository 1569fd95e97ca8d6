"""A simulation on disk: the same events, models and summary as `gasloc launch` leaves, in virtual time."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import safetensors.torch

from gasloc import summary
from gasloc.errors import UsageError
from gasloc.events import Event, as_line
from gasloc.recipe import Recipe
from gasloc.run_folder import write_whole
from gasloc.simulation.run import Result
from peers.exchange import PeerId

Echo = Callable[[PeerId, str], None]
"""Called with the worker and an event's line."""


class Record:
    """Writes `worker-K/events.jsonl` while a simulation runs, and all else after it.

    The folder must be new or empty of workers: raises `UsageError` otherwise, or where it cannot be written.
    """

    def __init__(self, folder: Path, workers: int, echo: Echo | None = None) -> None:
        self._folder = folder
        self._echo = echo
        self._paths = [folder / f"worker-{number}" for number in range(workers)]
        if any(folder.glob("worker-*")):
            raise UsageError(
                f"folder '{folder}' holds a run already; a simulation is not resumed: choose another --dir"
            )
        self._files: dict[PeerId, TextIO] = {}
        with contextlib.ExitStack() as stack:
            try:
                for path in self._paths:
                    path.mkdir(parents=True)
                    file = (path / "events.jsonl").open("w", encoding="utf-8")
                    self._files[path.name] = stack.enter_context(file)
            except OSError as error:
                raise UsageError(f"folder '{folder}' cannot be written: {error.strerror}") from None
            self._stack = stack.pop_all()

    def listen(self, worker: PeerId, now_s: float, event: Event) -> None:
        """Writes one event; `now_s` in virtual seconds."""
        line = as_line(event, now_s)
        self._files[worker].write(line + "\n")
        if self._echo is not None:
            self._echo(worker, line)

    def close(self) -> None:
        """Closes the files of events."""
        self._stack.close()

    def finish(self, recipe: Recipe, result: Result, wall_seconds: float) -> dict[str, Any]:
        """Writes models, `summary.json` and `loss.png`; returns the summary's values."""
        self.close()
        for path, parameters in zip(self._paths, result.parameters, strict=True):
            content = safetensors.torch.save(parameters, {"recipe": recipe.model_dump_json()})
            write_whole(path / "model.safetensors", content)
        values: dict[str, Any] = asdict(summary.summarise(self._paths))
        values |= {
            "seconds": round(result.seconds, 3),
            "bytes_sent_per_worker": result.sent_bytes,
            "wall_seconds": round(wall_seconds, 3),
        }
        write_whole(self._folder / "summary.json", json.dumps(values, indent=1).encode() + b"\n")
        summary.plot(self._folder / "loss.png", self._paths)
        return values
