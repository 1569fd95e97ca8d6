"""The unix sockets between us and our p2pd, and what may be left of them."""

import asyncio
import contextlib
import os
import re
import secrets
import socket
import struct
import sys
from pathlib import Path

from hivemind.utils.multiaddr import Multiaddr

_FOLDER = Path("/tmp")  # hivemind's own choice; short, as a unix socket's path must be under 108 characters
_PREFIX = "hivemind-gasloc"
_UNIX_CODE = b"\x90\x03"  # "unix" in a binary multiaddress
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Sockets:
    """Where p2pd hears our requests, and where it hands us the streams that others open.

    The second is in Linux's abstract namespace, so that nothing is left of it however we end; p2pd removes the
    first itself. Elsewhere it is a file, which `remove` and `sweep` clear away.
    """

    def __init__(self) -> None:
        """Names after our process, for `sweep`."""
        self.stem = _FOLDER / f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(4)}"
        self.control = Path(f"{self.stem}-p2pd.sock")
        self._abstract = sys.platform == "linux"
        self._streams = self.stem.name if self._abstract else f"{self.stem}-streams.sock"

    @property
    def streams_path(self) -> str:
        """For `asyncio.start_unix_server`."""
        return f"\0{self._streams}" if self._abstract else self._streams

    @property
    def streams_maddr(self) -> bytes:
        """For p2pd, as a binary multiaddress."""
        if not self._abstract:
            raw: bytes = Multiaddr(f"/unix{self._streams}").to_bytes()
            return raw
        name = f"@{self._streams}".encode()  # how Go spells an abstract name; hivemind cannot
        assert len(name) < 128, "the length is one varint byte"
        return _UNIX_CODE + bytes([len(name)]) + name

    def comes_from(self, writer: asyncio.StreamWriter, pid: int) -> bool:
        """Whether a connection to the streams' socket was opened by process `pid`.

        Any local user can connect to an abstract socket and name any peer as the stream's origin. A file's
        permissions keep others out.
        """
        if not self._abstract:
            return True
        connection = writer.get_extra_info("socket")
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return bool(_CREDENTIALS.unpack(raw)[0] == pid)

    def remove(self) -> None:
        """Removes the files."""
        for path in _FOLDER.glob(f"{self.stem.name}-*.sock"):
            path.unlink(missing_ok=True)


def sweep() -> None:
    """Removes files that processes of ours left when they and their p2pd were killed."""
    for path in _FOLDER.glob(f"{_PREFIX}-*.sock"):
        owner = re.fullmatch(rf"{_PREFIX}-(\d+)-[0-9a-f]+-.*\.sock", path.name)
        if owner and not _runs(int(owner[1])) and _is_deaf(path):
            with contextlib.suppress(OSError):  # another user's, or swept up by another process just now
                path.unlink()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _is_deaf(path: Path) -> bool:
    """Whether nobody listens there: the socket's process may be one that we cannot see, in a container."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
