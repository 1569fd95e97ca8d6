"""`PeerOptions`: what a peer is told at its start."""

from dataclasses import dataclass
from pathlib import Path

from peers.p2pd import Role


@dataclass(frozen=True)
class PeerOptions:
    """What a peer is told at its start."""

    identity_path: Path
    host: str = "0.0.0.0"
    """IP address to listen on; 0.0.0.0: every interface; 127.0.0.1: this machine only, and nothing leaves it."""
    port: int = 0
    """0: any free one."""
    announce: tuple[str, ...] = ()
    """Public IPs (with `port`) or multiaddresses to tell others instead of what p2pd finds out."""
    initial_peers: tuple[str, ...] = ()
    """Full multiaddresses of members; one that answers is enough. None: begins a swarm of its own."""
    client_only: bool = False
    """Looks on: listens nowhere, publishes nothing, serves nothing."""
    undialable: str = ""
    """Why others cannot dial us; empty where they can. If set, our record says so, and we hold no DHT keys."""
    relay: bool = False
    """Relays for peers that cannot be dialled."""
    cached_peers: tuple[str, ...] = ()
    """Addresses at which the swarm was met before: tried now and then, and no harm if none answers."""
    patience_s: float = 5.0
    """How long initial peers that refuse the connection are tried again: they may be starting just now."""
    secret_file: Path | None = None
    """Makes the run private: nobody who does not prove this secret is served anything. See `peers.access`."""
    allow_file: Path | None = None
    """Peer ids, one a line: nobody else is dealt with."""
    deny_file: Path | None = None
    """Peer ids, one a line, that are not dealt with."""
    serve_downloads: int = 3
    """So many newcomers may download our state at once; others are told that we are busy."""
    serve_rate_bytes_per_s: int = 0
    """All of them together get at most so much; 0: no limit. See `peers.caps`."""

    @property
    def role(self) -> Role:
        """What our p2pd does for others."""
        if self.client_only:
            return Role.CLIENT
        if self.relay:
            return Role.RELAY
        return Role.HIDDEN if self.undialable else Role.MEMBER
