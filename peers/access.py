"""Who may talk with whom: a run's secret, and lists of peers; and the handshake that proves the secret.

The dialler of every stream of a private run speaks first, before a word of the stream's own protocol:

    dialler   {"access": 1, "nonce": n_d}
    acceptor  {"nonce": n_a, "proof": MAC("acceptor")}
    dialler   {"proof": MAC("dialler")}

    MAC(role) = HMAC-SHA256(secret, role, protocol, dialler's id, acceptor's id, n_d, n_a)      each with its length

Nonces are fresh, 32 bytes. Roles and ids in the MAC keep a proof from being reflected, or carried on to a third
peer; the transport has authenticated both ids. Who only listens, or dials, can try secrets against a proof at
leisure, so a secret must be random: `openssl rand -hex 32`.
"""

import asyncio
import hmac
import logging
import os
import secrets
import stat
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from peers.errors import (
    AccessError,
    NotAdmittedError,
    ProtocolError,
    RefusedError,
    UnreachableError,
    WireError,
)
from peers.exchange import PeerId
from peers.identity import public_key_of
from peers.meter import Meter
from peers.transport import Handler, Transport
from peers.wire import Kind, Wire, clean

MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096
MAX_LIST_BYTES = 1024 * 1024
MAX_UNPROVEN = 256
"""Streams whose dialler may be proving itself at a time, in all; a further one is closed at once."""
MAX_UNPROVEN_PER_PEER = 16
VERSION = 1
PRIVATE = "this run is private: give --secret-file"
OTHER_SECRET = "the secret does not match"

_NONCE_BYTES = 32
_PROOF_BYTES = 32
_LIMIT_BYTES = 512
_CLOSE_S = 2.0
_DOMAIN = b"gasloc access 1"
_BADGE_DOMAIN = b"gasloc badge 1"

_log = logging.getLogger(__name__)


class Access:
    """A run's secret, and the peers that we do or do not deal with."""

    def __init__(
        self,
        secret: bytes | None = None,
        *,
        allowed: frozenset[PeerId] | None = None,
        denied: frozenset[PeerId] = frozenset(),
    ) -> None:
        """`secret` None: the run is open. `allowed` None: everybody who is not in `denied`."""
        self._secret = secret
        self._allowed = allowed
        self._denied = denied

    @classmethod
    def load(
        cls, *, secret_file: Path | None = None, allow_file: Path | None = None, deny_file: Path | None = None
    ) -> Self:
        """Reads what is given.

        The secret is its file's content without blanks at both ends. The lists have a peer id a line; what
        follows a # is a comment. Raises `AccessError` that names the file, and the line.
        """
        return cls(
            None if secret_file is None else _read_secret(secret_file),
            allowed=None if allow_file is None else _read_list("allow", allow_file),
            denied=frozenset() if deny_file is None else _read_list("deny", deny_file),
        )

    @property
    def private(self) -> bool:
        """Whether there is a secret."""
        return self._secret is not None

    def objection(self, peer: PeerId) -> str | None:
        """Why we do not deal with a peer, in words; None where we do. Says nothing of the secret."""
        if peer in self._denied:
            return f"{peer} is on the deny list"
        if self._allowed is not None and peer not in self._allowed:
            return f"{peer} is not on the allow list"
        return None

    def proof(
        self,
        role: str,
        protocol: str,
        dialler: PeerId,
        acceptor: PeerId,
        dialler_nonce: bytes,
        acceptor_nonce: bytes,
    ) -> bytes:
        """What proves the secret in one handshake, 32 bytes. `role`: "dialler" or "acceptor". Private runs only."""
        names = [text.encode() for text in (role, protocol, dialler, acceptor)]
        return self._mac([_DOMAIN, *names, dialler_nonce, acceptor_nonce])

    def badge(self, run: str, digest: str, peer: PeerId) -> str:
        """What a member publishes as its recipe's digest: in a private run, 64 hex digits that only the secret gives.

        The peer signs its record, so a badge serves nobody else. In an open run, the digest itself.
        """
        if self._secret is None:
            return digest
        return self._mac([_BADGE_DOMAIN, run.encode(), digest.encode(), peer.encode()]).hex()

    def _mac(self, parts: list[bytes]) -> bytes:
        assert self._secret is not None, "an open run has no secret"
        return hmac.digest(self._secret, b"".join(len(part).to_bytes(4, "big") + part for part in parts), "sha256")


class GuardedTransport:
    """A `Transport` on which only those can talk whom `access` lets in: both lists and secret, both ways.

    Without secret and lists a stream is that of `transport` itself, with nothing added.
    """

    def __init__(
        self, transport: Transport, access: Access, *, meter: Meter | None = None, handshake_s: float = 5.0
    ) -> None:
        """`handshake_s` bounds the proof; bytes of proofs are counted as "access"."""
        self._transport = transport
        self._access = access
        self._meter = meter
        self._handshake_s = handshake_s
        self._unproven: Counter[PeerId] = Counter()
        self.refused: Counter[str] = Counter()
        """Streams that were opened to us and refused, by kind of reason."""

    @property
    def me(self) -> PeerId:
        """Our own peer id."""
        return self._transport.me

    async def serve(self, protocol: str, handler: Handler) -> None:
        """See `Transport.serve`. A stream that is not let in is told why, and `handler` never sees it."""

        async def guarded(peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            wire = Wire(reader, writer, "access", self._meter)
            if await self._admit(peer, protocol, wire):
                await handler(peer, reader, writer)

        await self._transport.serve(protocol, guarded)

    async def dial(
        self, peer: PeerId, protocol: str, *, timeout_s: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """See `Transport.dial`. Raises `NotAdmittedError` where one of the two does not let the other in.

        Where only the other side's run is private, that is found later: its first frame is an `ABORT` with the
        reason.
        """
        objection = self._access.objection(peer)
        if objection is not None:
            raise NotAdmittedError(f"{objection} here")
        deadline = asyncio.get_running_loop().time() + timeout_s
        reader, writer = await self._transport.dial(peer, protocol, timeout_s=timeout_s)
        if self._access.private:
            left_s = deadline - asyncio.get_running_loop().time()
            wire = Wire(reader, writer, "access", self._meter)
            try:
                await self._prove(peer, protocol, wire, min(left_s, self._handshake_s))
            except BaseException:
                wire.cut()
                raise
        return reader, writer

    async def _prove(self, peer: PeerId, protocol: str, wire: Wire, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await self._prove_as_dialler(peer, protocol, wire)
        except TimeoutError:
            raise UnreachableError(f"{peer} gave no proof of the secret within {max(limit_s, 0.0):.1f} s") from None
        except RefusedError as error:
            raise NotAdmittedError(str(error)) from None
        except WireError as error:
            raise UnreachableError(f"{peer} closed the stream before it proved the secret: {error}") from None
        except ProtocolError as error:
            raise NotAdmittedError(
                f"{peer} does not prove that it knows the secret ({error}); leave --secret-file out to join an open run"
            ) from None

    async def _prove_as_dialler(self, peer: PeerId, protocol: str, wire: Wire) -> None:
        ours = secrets.token_bytes(_NONCE_BYTES)
        await wire.send_header(Kind.HEADER, {"access": VERSION, "nonce": ours.hex()})
        header = await wire.receive_header(Kind.HEADER, limit_bytes=_LIMIT_BYTES)
        theirs, proof = _hex(header, "nonce", _NONCE_BYTES), _hex(header, "proof", _PROOF_BYTES)
        if not hmac.compare_digest(proof, self._access.proof("acceptor", protocol, self.me, peer, ours, theirs)):
            await wire.abort(OTHER_SECRET)
            await wire.close(_CLOSE_S)
            raise RefusedError(OTHER_SECRET)
        answer = self._access.proof("dialler", protocol, self.me, peer, ours, theirs)
        await wire.send_header(Kind.HEADER, {"proof": answer.hex()})

    async def _admit(self, peer: PeerId, protocol: str, wire: Wire) -> bool:
        """Whether a stream that was opened to us may go on. Where not, its dialler was told why."""
        objection = self._access.objection(peer)
        if objection is None and not self._access.private:
            return True
        if self._unproven[peer] >= MAX_UNPROVEN_PER_PEER or self._unproven.total() >= MAX_UNPROVEN:
            self.refused["too many at once"] += 1
            return False
        self._unproven[peer] += 1
        try:
            if objection is not None:
                return await self._refuse(peer, wire, "allow and deny lists", f"{objection} of {self.me}")
            return await self._check(peer, protocol, wire)
        finally:
            self._unproven -= Counter([peer])

    async def _check(self, peer: PeerId, protocol: str, wire: Wire) -> bool:
        try:
            async with asyncio.timeout(self._handshake_s):
                reason = await self._check_dialler(peer, protocol, wire)
        except RefusedError:  # it found that our secrets differ, and said so
            reason = OTHER_SECRET
        except TimeoutError:
            reason = f"no proof of the secret within {self._handshake_s:g} s"
        except ProtocolError as error:
            _log.debug("no proof of the secret from %s: %s", peer, error)
            reason = PRIVATE
        return reason is None or await self._refuse(peer, wire, reason, reason)

    async def _check_dialler(self, peer: PeerId, protocol: str, wire: Wire) -> str | None:
        """Our side of the proof; returns why the dialler is not let in, or None."""
        header = await wire.receive_header(Kind.HEADER, limit_bytes=_LIMIT_BYTES)
        if "access" not in header:
            return PRIVATE
        if header["access"] != VERSION:
            return f"this run's access has version {VERSION}: take the same gasloc"
        theirs, ours = _hex(header, "nonce", _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
        proof = self._access.proof("acceptor", protocol, peer, self.me, theirs, ours)
        await wire.send_header(Kind.HEADER, {"nonce": ours.hex(), "proof": proof.hex()})
        header = await wire.receive_header(Kind.HEADER, limit_bytes=_LIMIT_BYTES)
        due = self._access.proof("dialler", protocol, peer, self.me, theirs, ours)
        return None if hmac.compare_digest(_hex(header, "proof", _PROOF_BYTES), due) else OTHER_SECRET

    async def _refuse(self, peer: PeerId, wire: Wire, kind: str, reason: str) -> bool:
        _log.info("%s was not let in: %s", peer, reason)
        self.refused[kind] += 1
        await wire.abort(reason)
        await wire.linger(_CLOSE_S)
        return False


def _hex(header: Mapping[str, object], key: str, size: int) -> bytes:
    """`size` bytes in lower-case hex. Raises `ProtocolError`."""
    text = header.get(key)
    try:
        raw = bytes.fromhex(text) if isinstance(text, str) and len(text) == 2 * size else b""
    except ValueError:
        raw = b""
    if len(raw) != size or raw.hex() != text:
        raise ProtocolError(f"its '{key}' is not {size} bytes in hex")
    return raw


def _read_secret(path: Path) -> bytes:
    secret = _read("secret", path, MAX_SECRET_BYTES, safe=True).strip()
    if len(secret) < MIN_SECRET_BYTES:
        raise AccessError(
            f"secret file {path} holds {len(secret)} bytes, under {MIN_SECRET_BYTES}; "
            f"make one: openssl rand -hex 32 > {path}"
        )
    return secret


def _read_list(kind: str, path: Path) -> frozenset[PeerId]:
    peers = set()
    try:
        text = _read(kind, path, MAX_LIST_BYTES, safe=False).decode()
    except UnicodeDecodeError:
        raise AccessError(f"{kind} file {path} is not a text: it needs a peer id a line") from None
    for number, line in enumerate(text.split("\n"), 1):
        peer = line.partition("#")[0].strip()
        if peer and public_key_of(peer) is None:
            raise AccessError(
                f"{kind} file {path}, line {number}: '{clean(peer)[:80]}' is not a peer id, such as 12D3KooW..."
            )
        peers.add(peer)
    peers.discard("")
    if kind == "allow" and not peers:
        raise AccessError(f"allow file {path} names no peer, so nobody could take part; give it a peer id a line")
    return frozenset(peers)


def _read(kind: str, path: Path, limit_bytes: int, *, safe: bool) -> bytes:
    """The file's bytes. `safe`: nobody but its owner may be able to read it. Raises `AccessError`."""
    path = path.expanduser()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise AccessError(f"{kind} file {path} is not a regular file; name another")
            if safe and mode & 0o077:
                raise AccessError(
                    f"{kind} file {path} can be read by others (mode {stat.S_IMODE(mode):o}); type: chmod 600 {path}"
                )
            data = file.read(limit_bytes + 1)
    except OSError as error:
        raise AccessError(f"{kind} file {path}: {error.strerror}; name a file that can be read") from None
    if len(data) > limit_bytes:
        raise AccessError(f"{kind} file {path} is over the limit of {limit_bytes} bytes")
    return data
