"""Checkpoints: a folder each, with tensors in safetensors and the rest in JSON, written whole or not at all.

    DIR/checkpoint-000012/tensors.safetensors
    DIR/checkpoint-000012/checkpoint.json      # plain values; SHA-256 and size of the tensors' file, and its own

A checkpoint is written under a temporary name, flushed to the disk, then renamed, so whoever finds one under its
final name finds all of it. Nothing is ever unpickled.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gasloc.errors import CheckpointError

_TENSORS = "tensors.safetensors"
_DOCUMENT = "checkpoint.json"
_FORMAT = 1
_NAME = re.compile(r"checkpoint-(\d{6,})")
_TEMPORARY = ".saving-"
_NOT_WHOLE = (OSError, SafetensorError, ValueError, LookupError, TypeError, AttributeError)
"""The last three: a document whose checksum fits, but which some other program wrote."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint, read and verified."""

    path: Path
    tensors: dict[str, Tensor]
    """On the CPU. Names that were tied when saved share one tensor."""
    meta: dict[str, Any]
    skipped: tuple[str, ...]
    """Why each newer one was passed over, in words, newest first."""


def save(folder: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], keep: int = 3) -> Path:
    """Writes a new checkpoint into `folder`, made where missing, and removes all but the last `keep`.

    `meta` holds plain values fit for JSON; put the recipe's digest under "digest". Tensors that share all their
    memory are written once. Returns the checkpoint's path once it is on the disk. Raises `CheckpointError` where
    it cannot be written (disk full, folder read-only); the earlier ones are then as they were, and what was
    begun is removed as far as the system allows.
    """
    document = json.dumps({"meta": dict(meta)})  # a value that JSON cannot hold is found before anything is written
    temporary = folder / f"{_TEMPORARY}{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(f"{_TEMPORARY}*"):  # of a save that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir()
        _write(temporary, tensors, json.loads(document)["meta"])
        path = folder / f"checkpoint-{_next_number(folder):06d}"
        temporary.rename(path)
        _flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint in '{folder}' cannot be written: {_reason(error)}; earlier checkpoints are untouched"
        ) from None
    for old in _found(folder)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def load_latest(folder: Path, *, digest: str | None = None) -> Checkpoint | None:
    """Reads the newest whole checkpoint in `folder`, or None where there is no checkpoint at all.

    Ones that are not whole (truncated, altered, unreadable) are passed over, and listed in `skipped`. Raises
    `CheckpointError` where some are there but none is whole, so that a run is never silently begun anew, and
    where the newest whole one was saved under another recipe's digest than `digest`.
    """
    try:
        paths = _found(folder)
    except OSError as error:
        raise CheckpointError(f"checkpoints in '{folder}' cannot be read: {_reason(error)}") from None
    skipped: list[str] = []
    for path in paths:
        try:
            tensors, meta = _read(path)
        except _NOT_WHOLE as error:
            skipped.append(f"{path.name}: {_reason(error)}")
            continue
        saved = meta.get("digest")
        if digest is not None and saved != digest:
            raise CheckpointError(
                f"checkpoint '{path}' belongs to another run: recipe digest {str(saved)[:12]}, this run's is "
                f"{digest[:12]}; choose another --dir, or the recipe it was saved with"
            )
        return Checkpoint(path, tensors, meta, tuple(skipped))
    if skipped:
        raise CheckpointError(
            f"no checkpoint in '{folder}' is whole ({'; '.join(skipped)}): restore one, or choose another --dir"
        )
    return None


def _write(folder: Path, tensors: Mapping[str, Tensor], meta: dict[str, Any]) -> None:
    distinct, tied = _distinct(tensors)
    file = folder / _TENSORS
    save_file(distinct, file)
    document = {
        "format": _FORMAT,
        "files": {_TENSORS: {"sha256": _sha256(file), "bytes": file.stat().st_size}},
        "tied": tied,
        "meta": meta,
    }
    document["sha256"] = _document_sha256(document)
    (folder / _DOCUMENT).write_text(json.dumps(document, indent=1))
    for written in (file, folder / _DOCUMENT, folder):
        _flush(written)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Raises one of `_NOT_WHOLE` where the checkpoint is not whole."""
    document = json.loads((path / _DOCUMENT).read_text())
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise ValueError(f"{_DOCUMENT} is not a checkpoint of format {_FORMAT}")
    if document.pop("sha256", None) != _document_sha256(document):
        raise ValueError(f"{_DOCUMENT} was altered: its SHA-256 differs")
    if not isinstance(document["meta"], dict):
        raise TypeError("meta is no object")
    size, sha256 = document["files"][_TENSORS]["bytes"], document["files"][_TENSORS]["sha256"]
    file = path / _TENSORS
    if file.stat().st_size != size:
        raise ValueError(f"{_TENSORS} has {file.stat().st_size} bytes of {size}")
    if _sha256(file) != sha256:
        raise ValueError(f"{_TENSORS} was altered: its SHA-256 differs")
    tensors = load_file(file)
    tensors |= {name: tensors[first] for name, first in document["tied"].items()}
    return tensors, document["meta"]


def _distinct(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors with memory of their own, as safetensors wants them, and which names repeat which."""
    distinct: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    seen: dict[tuple[torch.device, int, torch.Size, tuple[int, ...], torch.dtype], str] = {}
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        place = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if tensor.numel() and place in seen:
            tied[name] = seen[place]
            continue
        seen[place] = name
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        distinct[name] = tensor.cpu().contiguous() if whole else tensor.cpu().contiguous().clone()
    return distinct, tied


def _found(folder: Path) -> list[Path]:
    """Checkpoints under their final names, newest first."""
    if not folder.is_dir():
        return []
    numbered = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered, reverse=True)]


def _next_number(folder: Path) -> int:
    newest = _found(folder)
    return int(newest[0].name.removeprefix("checkpoint-")) + 1 if newest else 1


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _document_sha256(document: Mapping[str, Any]) -> str:
    """Of everything in the document but this checksum itself."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: Exception) -> str:
    if isinstance(error, LookupError | TypeError | AttributeError):
        return f"{_DOCUMENT} is of another form"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
