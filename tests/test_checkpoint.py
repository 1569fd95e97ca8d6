"""Checkpoints: whole or not at all, whatever happens to the disk, the process or the files."""

import errno
import hashlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gasloc import checkpoint
from gasloc.errors import CheckpointError

TENSORS = "tensors.safetensors"
DOCUMENT = "checkpoint.json"


def some(value: float = 1.0, size: int = 100) -> dict[str, Tensor]:
    return {"model/w": torch.full((size,), value), "inner/step/w": torch.tensor(3.0)}


def latest(folder: Path) -> checkpoint.Checkpoint:
    found = checkpoint.load_latest(folder)
    assert found is not None
    return found


def child(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a script in a process of its own, which alone suffers its limits."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_what_was_saved_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    weight = torch.randn(4, 6, dtype=torch.float64)
    tensors = {
        "a": weight,
        "tied": weight,
        "view": weight[1:3],
        "turned": weight.t(),
        "half": torch.randn(5).to(torch.bfloat16),
        "count": torch.tensor(7),
        "none": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "special": torch.tensor([float("nan"), float("inf"), -0.0]),
    }
    meta = {"round": 3, "rate": 0.1 + 0.2, "deep": [{"x": None, "y": True}], "digest": "d", "text": "Größe"}
    path = checkpoint.save(tmp_path, tensors, meta)
    loaded = latest(tmp_path)
    assert loaded.path == path
    assert loaded.meta == meta
    assert loaded.skipped == ()
    assert loaded.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded.tensors[name].dtype == tensor.dtype
        assert loaded.tensors[name].shape == tensor.shape
        assert torch.equal(loaded.tensors[name].nan_to_num(9), tensor.nan_to_num(9)), name
    assert loaded.tensors["tied"] is loaded.tensors["a"]


def test_tied_tensors_are_written_once(tmp_path: Path) -> None:
    weight = torch.zeros(10_000)
    path = checkpoint.save(tmp_path, {"a": weight, "b": weight, "c": weight.view(100, 100)[:1]}, {})
    assert (path / TENSORS).stat().st_size < 42_000


def test_an_empty_or_missing_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.load_latest(tmp_path) is None
    assert checkpoint.load_latest(tmp_path / "missing") is None
    (tmp_path / "checkpoint-new").mkdir()
    (tmp_path / "events.jsonl").touch()
    assert checkpoint.load_latest(tmp_path) is None


@pytest.mark.parametrize("keep", [1, 3])
def test_the_last_few_are_kept_and_the_newest_is_loaded(tmp_path: Path, keep: int) -> None:
    for value in range(12):
        checkpoint.save(tmp_path, some(value), {"value": value}, keep=keep)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"checkpoint-{number:06d}" for number in range(13 - keep, 13)
    ]
    assert latest(tmp_path).meta == {"value": 11}


def test_a_value_that_json_cannot_hold_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        checkpoint.save(tmp_path / "run", some(), {"device": torch.device("cpu")})
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, some(), {"digest": "a" * 64})
    assert checkpoint.load_latest(tmp_path, digest="a" * 64) is not None
    with pytest.raises(CheckpointError, match=r"checkpoint-000001' belongs to another run: .* aaaaaaaaaaaa, .* bbbb"):
        checkpoint.load_latest(tmp_path, digest="b" * 64)


@pytest.mark.parametrize("name", [TENSORS, DOCUMENT])
@pytest.mark.parametrize("damage", ["removed", "empty", "truncated", "garbled", "one bit"])
def test_a_damaged_one_is_passed_over_with_its_reason(tmp_path: Path, name: str, damage: str) -> None:
    checkpoint.save(tmp_path, some(1), {"value": 1})
    torn = checkpoint.save(tmp_path, some(2), {"value": 2})
    file = torn / name
    content = file.read_bytes()
    spoiled = {
        "removed": None,
        "empty": b"",
        "truncated": content[: len(content) // 2],
        "garbled": os.urandom(len(content)),
        "one bit": content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
    }[damage]
    if spoiled is None:
        file.unlink()
    else:
        file.write_bytes(spoiled)
    loaded = latest(tmp_path)
    assert loaded.meta == {"value": 1}
    assert len(loaded.skipped) == 1
    assert loaded.skipped[0].startswith("checkpoint-000002: ")
    assert torch.equal(loaded.tensors["model/w"], some(1)["model/w"])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_change_of_a_byte_goes_unseen(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("run")
    tensors = some(size=3)
    tensors["tied"] = tensors["model/w"]
    path = checkpoint.save(folder, tensors, {"value": 2, "text": "abc"})
    file = path / data.draw(st.sampled_from([TENSORS, DOCUMENT]))
    content = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    whole = whole_or_none(folder)
    if whole is not None:  # the byte was space between JSON's parts
        assert whole.meta == {"value": 2, "text": "abc"}
        assert torch.equal(whole.tensors["model/w"], torch.ones(3))
        assert torch.equal(whole.tensors["tied"], torch.ones(3))


def whole_or_none(folder: Path) -> checkpoint.Checkpoint | None:
    try:
        return latest(folder)
    except CheckpointError:
        return None


def test_where_none_is_whole_nothing_begins_anew(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, some(), {})
    (path / TENSORS).write_bytes(b"x")
    with pytest.raises(
        CheckpointError, match=r"no checkpoint .* is whole \(checkpoint-000001: .* 1 bytes of"
    ) as caught:
        checkpoint.load_latest(tmp_path)
    assert "\n" not in str(caught.value)


class Marker:
    """Its unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_a_crafted_pickle_is_refused_and_runs_nothing(tmp_path: Path, form: str) -> None:
    """Even where the stranger made size and checksum fit."""
    marker = tmp_path / "marker"
    path = checkpoint.save(tmp_path / "run", some(), {})
    file = path / TENSORS
    if form == "pickle":
        file.write_bytes(pickle.dumps(Marker(marker)))
    else:
        torch.save({"model/w": Marker(marker)}, file)
    document = json.loads((path / DOCUMENT).read_text())
    document["files"][TENSORS] = {
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "bytes": file.stat().st_size,
    }
    write_document(path, document)
    with pytest.raises(CheckpointError, match="is whole"):
        checkpoint.load_latest(tmp_path / "run")
    assert not marker.exists()
    pickle.loads(pickle.dumps(Marker(marker)))
    assert marker.exists(), "the pickle would have worked"


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"format": 2},
        {"format": 1},
        {"format": 1, "files": [], "meta": {}},
        {"format": 1, "files": {}, "tied": {}, "meta": []},
        {"format": 1, "files": 3, "tied": {}, "meta": {}},
        {"format": 1, "files": {TENSORS: {"bytes": None, "sha256": None}}, "tied": {}, "meta": {}},
    ],
)
def test_a_document_of_another_form_is_not_whole(tmp_path: Path, document: dict[str, object]) -> None:
    path = checkpoint.save(tmp_path, some(), {})
    write_document(path, document)
    with pytest.raises(CheckpointError, match="is whole"):
        checkpoint.load_latest(tmp_path)
    (path / DOCUMENT).write_text("[]")
    with pytest.raises(CheckpointError, match=r"checkpoint\.json is not a checkpoint"):
        checkpoint.load_latest(tmp_path)


def write_document(path: Path, document: dict[str, object]) -> None:
    """As one who wants to be believed would: its checksum fits."""
    plain = {key: value for key, value in document.items() if key != "sha256"}
    plain["sha256"] = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    (path / DOCUMENT).write_text(json.dumps(plain))


SAVE_UNDER_LIMIT = """
    import resource, sys
    from pathlib import Path
    import torch
    from gasloc import checkpoint
    from gasloc.errors import CheckpointError

    folder = Path(sys.argv[1])
    checkpoint.save(folder, {"w": torch.ones(1_000)}, {"value": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        checkpoint.save(folder, {"w": torch.full((1_000_000,), 2.0)}, {"value": 2})
    except CheckpointError as error:
        sys.stdout.write(str(error))
    """


def test_a_disk_that_takes_no_more_leaves_the_last_whole_one_and_no_rest(tmp_path: Path) -> None:
    """A limit on file size stands for the full disk: the write fails in the same place."""
    finished = child(SAVE_UNDER_LIMIT, tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "cannot be written: " in finished.stdout
    assert "earlier checkpoints are untouched" in finished.stdout
    assert "\n" not in finished.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001"]
    assert latest(tmp_path).meta == {"value": 1}


def test_every_write_that_can_fail_leaves_the_last_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills up at the first flush, at the second, and so on to the last."""
    checkpoint.save(tmp_path, some(0), {"value": 0})
    real = os.fsync
    for allowed in range(5):
        left = [allowed]

        def filling(descriptor: int, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(descriptor)

        monkeypatch.setattr(os, "fsync", filling)
        if allowed < 4:
            with pytest.raises(CheckpointError, match="No space left on device"):
                checkpoint.save(tmp_path, some(allowed), {"value": allowed})
            assert not list(tmp_path.glob(".saving-*"))
        else:
            checkpoint.save(tmp_path, some(allowed), {"value": allowed})
        monkeypatch.undo()
        assert latest(tmp_path).meta["value"] in (0, 3, 4)
        assert latest(tmp_path).skipped == ()


def test_it_gets_its_name_in_one_move_when_all_of_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, moved = Path.rename, []

    def watched(source: Path, target: Path) -> Path:
        assert not list(source.parent.glob("checkpoint-*"))
        shutil.copytree(source, tmp_path / "copy" / target.name)
        moved.append(target)
        return real(source, target)

    monkeypatch.setattr(Path, "rename", watched)
    path = checkpoint.save(tmp_path / "run", some(), {"value": 1})
    assert moved == [path]
    assert latest(tmp_path / "copy").meta == {"value": 1}


SAVE_AS_NOBODY = """
    import os, sys
    from pathlib import Path
    import torch
    from gasloc import checkpoint
    from gasloc.errors import CheckpointError

    if os.geteuid() == 0:
        os.setuid(65534)
    try:
        checkpoint.save(Path(sys.argv[1]), {"w": torch.ones(3)}, {})
    except CheckpointError as error:
        sys.stdout.write(str(error))
    """


def test_a_read_only_folder_is_told_in_one_line(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, some(), {})
    tmp_path.chmod(0o555)
    try:
        finished = child(SAVE_AS_NOBODY, tmp_path)
    finally:
        tmp_path.chmod(0o755)
    assert finished.returncode == 0, finished.stderr
    assert f"checkpoint in '{tmp_path}' cannot be written: Permission denied" in finished.stdout
    assert "\n" not in finished.stdout
    assert latest(tmp_path).meta == {}


def test_a_file_in_the_place_of_the_folder_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file' cannot be written: File exists"):
        checkpoint.save(tmp_path / "file", some(), {})


SAVE_FOREVER = """
    import sys
    from pathlib import Path
    import torch
    from gasloc import checkpoint

    for value in range(1, 1_000_000):
        checkpoint.save(Path(sys.argv[1]), {"w": torch.full((200_000,), float(value))}, {"value": value})
        sys.stdout.write(f"{value}\\n")
        sys.stdout.flush()
    """


@pytest.mark.parametrize("saves", [1, 2, 7])
def test_a_process_killed_while_saving_leaves_the_last_whole_one(tmp_path: Path, saves: int) -> None:
    """Killed at once after it said that so many are saved, in the middle of the next."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SAVE_FOREVER), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        for _ in range(saves):
            said = int(process.stdout.readline())
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=20)
    loaded = latest(tmp_path)
    assert loaded.skipped == ()
    assert loaded.meta["value"] >= said == saves
    assert torch.equal(loaded.tensors["w"], torch.full((200_000,), float(loaded.meta["value"])))
    checkpoint.save(tmp_path, some(), {"value": -1})
    assert not list(tmp_path.glob(".saving-*")), "what a killed save left is removed by the next"


SAVE_AND_BE_KILLED = """
    import os, random, signal, sys, time
    from pathlib import Path
    import torch
    from gasloc import checkpoint

    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    checkpoint.save(folder, {"w": torch.zeros(200_000)}, {"value": 0})
    last = 0
    for kill in range(20):
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            for value in range(last + 1, 1_000_000):
                checkpoint.save(folder, {"w": torch.full((200_000,), float(value))}, {"value": value})
                os.write(writes, b"x")
        os.read(reads, 1)
        time.sleep(random.Random(kill).uniform(0.0, 0.03))  # somewhere in a save
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reads)
        os.close(writes)
        found = checkpoint.load_latest(folder)
        assert found.skipped == (), found.skipped
        assert found.meta["value"] > last
        last = found.meta["value"]
        assert torch.equal(found.tensors["w"], torch.full((200_000,), float(last)))
        assert len(list(folder.glob(".saving-*"))) <= 1
    """


def test_killed_twenty_times_while_saving_the_last_whole_one_loads_each_time(tmp_path: Path) -> None:
    finished = child(SAVE_AND_BE_KILLED, tmp_path)
    assert finished.returncode == 0, finished.stderr
