"""Who is in a swarm, as a client sees it that does not train: `gasloc status`."""

import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from gasloc.card import read_card
from gasloc.errors import RunError
from gasloc.recipe import Recipe
from gasloc.view import short
from peers.membership import Member
from peers.node import Peer, PeerOptions, RunCard
from peers.thread import NetworkThread

LOOK_S = 10.0
"""How long to look for a first member's record."""


@dataclass(frozen=True, slots=True)
class Roster:
    """A run and its members at one moment."""

    card: RunCard
    recipe: Recipe
    members: tuple[Member, ...]
    """Furthest first."""
    warnings: tuple[str, ...]


def look(addresses: Sequence[str], stop: threading.Event | None = None, *, secret_file: Path | None = None) -> Roster:
    """Asks the swarm at these addresses; leaves nothing running and no trace in it.

    Raises an error of `peers.errors` where no address answers, and `RunError` where nobody's record is seen.
    """
    stop = stop or threading.Event()
    thread = NetworkThread()
    try:
        with tempfile.TemporaryDirectory(prefix="gasloc-status-") as folder:
            options = PeerOptions(
                identity_path=Path(folder) / "identity.key",
                initial_peers=tuple(addresses),
                client_only=True,
                secret_file=secret_file,
            )
            peer = thread.call(Peer.start(options), stop=stop)
            try:
                card = thread.call(peer.fetch_card(), stop=stop)
                recipe = read_card(card)
                thread.call(peer.enter(card, lambda: None), stop=stop)
                if not thread.call(peer.membership.wait_for(1, LOOK_S), stop=stop):
                    raise RunError(f"run '{card.run}' answers, but no member's record is seen; try again")
                members = peer.membership.members().values()
            finally:
                thread.call(peer.close())
    finally:
        thread.close()
    ordered = sorted(members, key=lambda member: (-member.status.round, member.peer_id))
    return Roster(card, recipe, tuple(ordered), tuple(peer.warnings))


def print_roster(roster: Roster) -> None:
    """Prints it for a person; warnings go to standard error."""
    for warning in roster.warnings:
        typer.echo(f"warning: {warning}", err=True)
    members = roster.members
    typer.echo(
        f"run {roster.card.run}: recipe {roster.recipe.name}, {roster.recipe.rounds} rounds, "
        f"{roster.recipe.topology}, {len(members)} {'peer' if len(members) == 1 else 'peers'}"
    )
    Console().print(table(roster))


def as_record(roster: Roster) -> dict[str, object]:
    """The roster as plain values, for `--json`."""
    return {
        "run": roster.card.run,
        "recipe": roster.recipe.name,
        "digest": roster.card.digest,
        "rounds": roster.recipe.rounds,
        "topology": roster.recipe.topology,
        "peers": [
            {
                "peer": member.peer_id,
                "round": member.status.round,
                "state": member.status.state.value,
                "tokens": member.status.tokens,
                "local_steps": member.status.local_steps,
                "loss": member.status.loss,
                "step_time_s": member.status.step_time_s,
                "exchange_time_s": member.status.exchange_time_s,
                "partners": list(member.status.partners),
                "reachable": member.reachable,
                "addresses": list(member.addresses),
                "same_recipe": member.digest == roster.card.digest,
            }
            for member in roster.members
        ],
    }


def table(roster: Roster) -> Table:
    """The roster for a person: a row a peer."""
    made = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("peer", "round", "state", "tokens", "steps", "loss", "last partners", "reachable"):
        made.add_column(title, justify="right" if title in ("round", "tokens", "steps", "loss") else "left")
    for member in roster.members:
        status = member.status
        made.add_row(
            short(member.peer_id),
            f"{status.round}/{roster.recipe.rounds}",
            status.state.value,
            f"{status.tokens:,}",
            str(status.local_steps),
            "" if status.loss is None else f"{status.loss:.4f}",
            ", ".join(short(peer) for peer in status.partners) or "nobody",
            "yes" if member.reachable else "no",
        )
    return made
