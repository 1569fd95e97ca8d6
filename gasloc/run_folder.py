"""The folder of one peer in one run: what `--dir` points to.

identity.key        who this peer is (mode 600)
run.json            the run's card: name, digest, recipe
peers.json          addresses at which the swarm was last reached
events.jsonl        what happened, one JSON object a line
checkpoints/        to resume from
model.safetensors   the result
lock                held by the process that uses the folder
"""

import contextlib
import fcntl
import json
import logging
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gasloc.errors import CheckpointError, UsageError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredCard:
    """What `run.json` holds."""

    run: str
    digest: str
    document: bytes
    """The recipe as JSON."""


def default_path(now: float) -> Path:
    """A new folder's path under the current one: `gasloc-runs/<time>-<hex>`; `now` in unix seconds."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return Path("gasloc-runs") / f"{stamp}-{secrets.token_hex(2)}"


class RunFolder:
    """An open run folder. One process at a time; `close` lets the next one in."""

    def __init__(self, path: Path) -> None:
        """Creates the folder where it is missing, and locks it.

        Raises `UsageError` if it cannot be written, or if another process uses it.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] | None = (path / "lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"folder '{path}' cannot be written: {error.strerror}") from None
        try:
            self._take_lock(self._lock)
        except BaseException:
            self.close()
            raise

    def _take_lock(self, lock: IO[str]) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise UsageError(
                f"folder '{self.path}' is in use by process {holder}; stop it or choose another --dir"
            ) from None
        except OSError as error:
            raise UsageError(f"folder '{self.path}' cannot be locked: {error.strerror}") from None
        lock.seek(0)
        lock.truncate()
        lock.write(f"{os.getpid()}\n")
        lock.flush()

    def close(self) -> None:
        """Gives the folder free."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def identity_path(self) -> Path:
        return self.path / "identity.key"

    @property
    def events_path(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model_path(self) -> Path:
        return self.path / "model.safetensors"

    def read_card(self) -> StoredCard | None:
        """The run's card, or None in a new folder. Raises `CheckpointError` if it is not whole."""
        path = self.path / "run.json"
        if not path.exists():
            return None
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            document = json.dumps(values["recipe"]).encode()
            return StoredCard(str(values["run"]), str(values["digest"]), document)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"'{path}' is not a run's card ({error}); choose another --dir") from None

    def write_card(self, card: StoredCard) -> None:
        """Keeps the run's card."""
        values = {"run": card.run, "digest": card.digest, "recipe": json.loads(card.document)}
        write_whole(self.path / "run.json", json.dumps(values, indent=1).encode() + b"\n")

    def read_peers(self) -> list[str]:
        """Addresses at which the swarm was last reached; empty if there are none."""
        try:
            values = json.loads((self.path / "peers.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []

    def write_peers(self, addresses: Sequence[str]) -> None:
        """Keeps addresses for the next start; not where the disk is full, as a run goes on without them."""
        try:
            write_whole(self.path / "peers.json", json.dumps(list(addresses), indent=1).encode() + b"\n")
        except UsageError as error:
            _log.debug("addresses are not kept: %s", error)


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all: a temporary file beside it, fsync, rename. Raises `UsageError`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # on a disk that may only be read
            temporary.unlink(missing_ok=True)
        raise UsageError(f"'{path}' cannot be written: {error.strerror}") from None
