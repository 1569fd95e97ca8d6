"""The key file: made whole, mode 600, refused where it is unsafe or damaged; signatures that an id can check."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peers.errors import IdentityError
from peers.identity import Identity, peer_id_of, public_key_of, verify


def test_a_new_file_is_private_and_gives_the_same_id_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "folder" / "me.key"
    made = Identity.load_or_create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]
    assert made.peer_id.startswith("12D3KooW")
    assert Identity.load_or_create(path).peer_id == made.peer_id
    assert Identity.load_or_create(tmp_path / "other.key").peer_id != made.peer_id


def test_of_many_that_start_at_once_on_one_path_all_get_one_identity(tmp_path: Path) -> None:
    path = tmp_path / "me.key"
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda _: Identity.load_or_create(path).peer_id, range(32)))
    assert len(set(ids)) == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_file_that_others_can_use_is_refused_with_what_to_type(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "me.key"
    Identity.load_or_create(path)
    path.chmod(mode)
    with pytest.raises(IdentityError, match=f"mode {mode:o}.*chmod 600 {path}"):
        Identity.load_or_create(path)


@pytest.mark.parametrize(
    "change", [lambda data: b"", lambda data: data[:-1], lambda data: data + b"x", lambda data: b"\x08\x00" + data[2:]]
)
def test_garbage_is_named_and_not_overwritten(tmp_path: Path, change: object) -> None:
    path = tmp_path / "me.key"
    Identity.load_or_create(path)
    assert callable(change)
    garbage = change(path.read_bytes())
    path.write_bytes(garbage)
    with pytest.raises(IdentityError, match=f"{path} holds no Ed25519 key"):
        Identity.load_or_create(path)
    assert path.read_bytes() == garbage


def test_a_damaged_key_is_found_out(tmp_path: Path) -> None:
    path = tmp_path / "me.key"
    Identity.load_or_create(path)
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    with pytest.raises(IdentityError, match="damaged"):
        Identity.load_or_create(path)


def test_a_folder_or_a_path_below_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="not a regular file"):
        Identity.load_or_create(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(IdentityError, match=r"file/me\.key"):
        Identity.load_or_create(tmp_path / "file" / "me.key")


def test_only_one_running_peer_holds_an_identity_and_a_dead_one_does_not(tmp_path: Path) -> None:
    path = tmp_path / "me.key"
    Identity.load_or_create(path)
    script = (
        "import sys, pathlib; from peers.identity import Identity\n"
        "me = Identity.load_or_create(pathlib.Path(sys.argv[1])); me.acquire()\n"
        "sys.stdout.write('held\\n'); sys.stdout.flush(); sys.stdin.read()"
    )
    ours = Identity.load_or_create(path)
    with subprocess.Popen(
        [sys.executable, "-c", script, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(IdentityError, match=f"{path} is in use by another running peer"):
            ours.acquire()
        holder.kill()
    ours.acquire()
    ours.acquire()
    with pytest.raises(IdentityError, match="in use"):
        Identity.load_or_create(path).acquire()
    ours.release()
    ours.release()
    other = Identity.load_or_create(path)
    other.acquire()
    other.release()


def test_signatures_verify_against_the_id_alone(tmp_path: Path) -> None:
    me, other = (Identity.load_or_create(tmp_path / name) for name in ("a", "b"))
    signature = me.sign(b"message")
    assert len(signature) == 64
    assert verify(me.peer_id, b"message", signature)
    assert not verify(me.peer_id, b"massage", signature)
    assert not verify(other.peer_id, b"message", signature)
    assert not verify(me.peer_id, b"message", signature[:-1])
    assert not verify("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", b"message", signature)


@given(st.text(), st.binary(), st.binary(max_size=80))
def test_verify_never_raises(peer_id: str, message: bytes, signature: bytes) -> None:
    assert not verify(peer_id, message, signature)


@given(st.binary(min_size=32, max_size=32))
def test_an_id_holds_its_key_in_one_spelling_only(key: bytes) -> None:
    peer_id = peer_id_of(key)
    assert public_key_of(peer_id) == key
    assert public_key_of(f" {peer_id}") is None
    assert public_key_of(f"1{peer_id}") is None
