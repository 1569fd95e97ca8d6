"""A peer's Ed25519 key, in the file that p2pd reads, and signatures that a peer id alone can check.

File: libp2p's `PrivateKey` protobuf, `08 01 12 40` and then 32 bytes of seed and 32 of public key.
Peer id: the identity multihash of libp2p's `PublicKey` protobuf, in base58, so it holds the key itself.
Source: https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
"""

import contextlib
import fcntl
import os
import stat
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Self

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from peers.errors import IdentityError
from peers.exchange import PeerId

_PRIVATE_PREFIX = bytes.fromhex("08011240")
_ID_PREFIX = bytes.fromhex("002408011220")  # identity multihash, 36 bytes; Ed25519, 32 bytes
_FILE_BYTES = 68


class Identity:
    """A private key and the peer id that follows from it."""

    def __init__(self, path: Path, seed: bytes) -> None:
        """`seed`: 32 bytes. Use `load_or_create`."""
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self._lock_file: int | None = None
        self.path = path
        self.peer_id: PeerId = peer_id_of(self._key.public_key().public_bytes_raw())

    @classmethod
    def load_or_create(cls, path: Path) -> Self:
        """Reads the key file, or writes a new one (mode 600, whole or not at all) and its folder.

        Raises `IdentityError` when the file is readable by others, is not a file, holds no Ed25519 key, or
        cannot be read or written.
        """
        path = path.expanduser()
        try:
            if not path.exists():
                _create(path)
            return cls(path, _read(path))
        except OSError as error:
            reason = error.strerror or str(error)
            raise IdentityError(f"identity file {path}: {reason}; name a file that can be read and written") from None

    def acquire(self) -> None:
        """Claims the identity for this process, until `release` or the process's end, however it ends.

        Raises `IdentityError` when another running peer on this machine holds it: two peers with one id
        would be taken for one.
        """
        if self._lock_file is not None:
            return
        try:
            lock_file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise IdentityError(f"identity file {self.path}: {error.strerror}") from None
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock_file)
            raise IdentityError(
                f"identity file {self.path} is in use by another running peer; give this one a file of its own"
            ) from None
        self._lock_file = lock_file

    def release(self) -> None:
        """Gives the claim back. Does nothing where there is none."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def sign(self, message: bytes) -> bytes:
        """An Ed25519 signature, 64 bytes."""
        return self._key.sign(message)


def verify(peer_id: PeerId, message: bytes, signature: bytes) -> bool:
    """Whether `signature` is by the key inside `peer_id`. False for an id that holds no Ed25519 key."""
    key = public_key_of(peer_id)
    if key is None or len(signature) != 64:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def peer_id_of(public_key: bytes) -> PeerId:
    """The peer id of a raw Ed25519 public key of 32 bytes."""
    return base58.b58encode(_ID_PREFIX + public_key).decode()


@lru_cache(maxsize=4096)
def public_key_of(peer_id: PeerId) -> bytes | None:
    """The raw public key inside a peer id, 32 bytes; None where it is no Ed25519 id in its only spelling."""
    if len(peer_id) > 64:
        return None
    try:
        raw = base58.b58decode(peer_id)
    except ValueError:
        return None
    if len(raw) != len(_ID_PREFIX) + 32 or not raw.startswith(_ID_PREFIX):
        return None
    key = raw[len(_ID_PREFIX) :]
    return key if peer_id_of(key) == peer_id else None  # b58decode also takes surrounding spaces


def _read(path: Path) -> bytes:
    """The seed, 32 bytes."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise IdentityError(f"identity file {path} is not a regular file; name another")
    if mode & 0o077:
        raise IdentityError(
            f"identity file {path} can be read by others (mode {stat.S_IMODE(mode):o}); type: chmod 600 {path}"
        )
    with path.open("rb") as file:
        data = file.read(_FILE_BYTES + 1)
    seed = data[len(_PRIVATE_PREFIX) : len(_PRIVATE_PREFIX) + 32]
    if len(data) != _FILE_BYTES or not data.startswith(_PRIVATE_PREFIX):
        raise IdentityError(f"identity file {path} holds no Ed25519 key; remove it to get a new identity")
    if Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw() != data[-32:]:
        raise IdentityError(f"identity file {path} is damaged; remove it to get a new identity")
    return seed


def _create(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    key = Ed25519PrivateKey.generate()
    data = _PRIVATE_PREFIX + key.private_bytes_raw() + key.public_key().public_bytes_raw()
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mode 600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another process was first: its key is the one
            os.link(temporary, path)
    finally:
        Path(temporary).unlink()
