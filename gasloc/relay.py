"""A relay's process: a known address for newcomers, and a way to peers that cannot be dialled. Trains nothing.

What p2pd's circuit relay (version 2) does, measured in network namespaces with p2pd of hivemind 1.1.12: 264 MiB in
one connection at 170 MiB/s, and a stream of 160 s. The limits are set to 1 TiB each way and 24 h a connection, and
p2pd is started until it has them: in 19 of 95 starts on two cores it had libp2p's 128 KiB and 2 minutes instead, see
`peers.circuit`. What it does not do: a peer that cannot be dialled takes its place at a relay only 3 minutes after its
start unless it knows four relays, and it announces only relays with a public address. Until then others cannot reach
it, and it is not paired with another such.
"""

import concurrent.futures
import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gasloc.card import read_card
from gasloc.presence import Presence, join_command
from gasloc.run_folder import RunFolder, StoredCard
from gasloc.stop import Stop
from peers.node import Peer, RunCard
from peers.thread import NetworkThread

LOOK_EVERY_S = 1.0


def run(presence: Presence, say: Callable[[str], None]) -> int:
    """Relays until told to stop; returns the exit code. `say` gets a line for whatever changes.

    The run is the folder's, else that of the initial peers, else the first that a peer which connects is in.
    Raises an error of `peers.errors` where p2pd does not start, or ends, or no initial peer answers.
    """
    with Stop() as stop, contextlib.closing(RunFolder(presence.folder)) as folder:
        cached = tuple(folder.read_peers())
        options = replace(presence.peer_options(folder, cached_peers=cached), relay=True)
        thread = NetworkThread()
        try:
            peer = thread.call(Peer.start(options), stop=stop.event)
            stop.on_second = peer.abandon
            try:
                _relay(peer, folder, thread, stop, say, presence.secret_file)
            finally:
                thread.call(peer.close())
        except concurrent.futures.CancelledError:
            pass
        finally:
            thread.close()
    return 0


def _relay(
    peer: Peer,
    folder: RunFolder,
    thread: NetworkThread,
    stop: Stop,
    say: Callable[[str], None],
    secret_file: Path | None,
) -> None:
    for warning in peer.warnings:
        say(f"warning: {warning}")
    for address in peer.addresses:
        say(f"relay at {address}")
    if peer.local_only:
        say("only peers on this machine can dial it; for others use --host 0.0.0.0")
    if peer.addresses:
        say(f"others join by: {join_command(peer.addresses, secret_file)}")
    stored = folder.read_card()
    card = RunCard(stored.run, stored.digest, stored.document) if stored else None
    entered, members = False, -1
    while True:
        for notice in peer.take_notices():
            say(notice)
        if not entered:
            card = card or thread.call(peer.find_card(), stop=stop.event)
            if card is not None:
                recipe = read_card(card)
                thread.call(peer.enter(card, lambda: None), stop=stop.event)
                folder.write_card(StoredCard(card.run, card.digest, card.document))
                say(f"run {card.run}, recipe {recipe.name}")
                entered = True
        elif (seen := len(peer.membership.members())) != members:
            members = seen
            say(f"{members} {'peer' if members == 1 else 'peers'}")
            _keep_peers(peer, folder)
        if stop.event.wait(LOOK_EVERY_S):
            return


def _keep_peers(peer: Peer, folder: RunFolder) -> None:
    addresses = [address for member in peer.membership.members().values() for address in member.addresses]
    if addresses:
        folder.write_peers(addresses[:64])
