"""Where a peer is, as whom, and with whom it deals: what start, join, syncer and relay are all told."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gasloc.run_folder import RunFolder
    from peers.node import PeerOptions


@dataclass(frozen=True, slots=True)
class Presence:
    """What a person may choose about one peer on the network."""

    folder: Path
    host: str
    port: int
    announce: tuple[str, ...]
    identity: Path | None
    """The key file; None: the folder's own."""
    initial_peers: tuple[str, ...]
    secret_file: Path | None
    allow_file: Path | None
    deny_file: Path | None
    serve_rate: int = 0
    """Bytes per second that newcomers together may download from this peer; 0: no limit."""

    def peer_options(
        self, folder: RunFolder, *, initial_peers: tuple[str, ...] | None = None, cached_peers: tuple[str, ...] = ()
    ) -> PeerOptions:
        """For `peers.node`. `initial_peers`: instead of those that were chosen."""
        from peers.node import PeerOptions  # loads torch: not before what is wrong with the flags is said

        return PeerOptions(
            identity_path=self.identity or folder.identity_path,
            host=self.host,
            port=self.port,
            announce=self.announce,
            initial_peers=self.initial_peers if initial_peers is None else initial_peers,
            cached_peers=cached_peers,
            secret_file=self.secret_file,
            allow_file=self.allow_file,
            deny_file=self.deny_file,
            serve_rate_bytes_per_s=self.serve_rate,
        )


def join_command(addresses: Sequence[str], secret_file: Path | None) -> str:
    """What others type to join; empty where nobody can dial us."""
    if not addresses:
        return ""
    secret = f" --secret-file {shlex.quote(str(secret_file))}" if secret_file else ""
    return f"gasloc join --peers {addresses[0]}{secret}"
