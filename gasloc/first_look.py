"""What a peer looks at before it joins: is its key used elsewhere, can others dial it."""

import threading
from dataclasses import replace

from peers.address import Reach, parse, reach
from peers.checks import LookOptions, look
from peers.errors import IdentityError, PeersError, UnreachableError
from peers.exchange import PeerId
from peers.identity import Identity
from peers.node import PeerOptions
from peers.reachability import dialable
from peers.thread import NetworkThread


def first_look(options: PeerOptions, stop: threading.Event) -> PeerOptions:
    """The options, with `undialable` set where peers tried to dial us and could not.

    Raises `IdentityError` that names the key file where another running peer of the swarm has its key, and
    `UnreachableError` where no initial peer answers. Whatever else is wrong is left for `Peer.start` to say, which
    meets the same peers again.
    """
    own_id = known_id(options)
    asked = options.initial_peers or options.cached_peers
    addresses = [parse(text) for text in asked]
    alone = all(reach(address.maddr) is Reach.LOOPBACK for address in addresses)
    local = reach(f"/ip4/{options.host}") is Reach.LOOPBACK
    if not addresses or (own_id is None and alone and local):
        return options
    thread = NetworkThread()
    try:
        seen = thread.call(
            look(
                LookOptions(
                    initial_peers=asked,
                    host=options.host,
                    port=options.port,
                    announce=options.announce,
                    own_id=own_id,
                    patience_s=options.patience_s if options.initial_peers else 0.0,
                )
            ),
            stop=stop,
        )
    finally:
        thread.close()
    if seen.taken:
        raise IdentityError(
            f"identity file {options.identity_path}: another running peer of this swarm has the same key; "
            "give this one a file of its own"
        )
    if options.initial_peers and not options.cached_peers and not seen.answering:
        reasons = "; ".join(f"{one.address}: {one.reason}" for one in seen.contacts)
        raise UnreachableError(f"no initial peer answers: {reasons}")
    can, reason = dialable(seen.addresses, seen.dialback)
    return replace(options, undialable=reason) if can is False else options


def known_id(options: PeerOptions) -> PeerId | None:
    """The peer id in the key file; None where there is no file yet, or it will be refused anyway."""
    if not options.identity_path.expanduser().exists():
        return None
    try:
        return Identity.load_or_create(options.identity_path).peer_id
    except PeersError:
        return None
