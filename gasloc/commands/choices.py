"""What flags mean together."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from gasloc.commands.options import check_ip, check_serve_rate, split_addresses
from gasloc.errors import UsageError
from gasloc.run_folder import default_path

if TYPE_CHECKING:
    from gasloc.presence import Presence
    from gasloc.recipe import Recipe


def choose_recipe(name: str | None, changes: dict[str, object], stored: Recipe | None) -> Recipe:
    """The recipe to train: the flags' in a new folder, the folder's own in a used one.

    Raises `RecipeError` for an impossible value, and `UsageError` where flags ask a used folder for another
    recipe than it holds.
    """
    from gasloc import recipe

    if stored is None:
        return recipe.override(recipe.load(name or "tiny"), changes)
    wanted = recipe.override(stored if name is None else recipe.load(name), changes)
    if wanted.digest != stored.digest:
        theirs, ours = stored.model_dump(mode="json"), wanted.model_dump(mode="json")
        different = next(key for key in ours if ours[key] != theirs[key])
        raise UsageError(
            f"the folder holds a run with {different} = {theirs[different]}, not {ours[different]}: "
            "choose another --dir, or leave the flag out"
        )
    return stored


def presence(
    *,
    dir: Path | None,
    host: str,
    port: int,
    public_ip: list[str] | None,
    announce_maddr: list[str] | None,
    peers: list[str] | None,
    identity: Path | None,
    secret_file: Path | None,
    allow_file: Path | None,
    deny_file: Path | None,
    serve_rate: int = 0,
) -> Presence:
    """Where the peer is, of the flags. Raises `UsageError` or `AddressError` for a malformed one."""
    from gasloc.presence import Presence

    return Presence(
        folder=dir or default_path(time.time()),
        host=check_ip("--host", host),
        port=port,
        announce=announced(public_ip, announce_maddr),
        identity=identity,
        initial_peers=split_addresses(peers),
        secret_file=secret_file,
        allow_file=allow_file,
        deny_file=deny_file,
        serve_rate=check_serve_rate(serve_rate),
    )


def announced(public_ip: list[str] | None, announce_maddr: list[str] | None) -> tuple[str, ...]:
    """What to tell others to dial. Raises `UsageError` for a malformed IP address."""
    ips = [check_ip("--public-ip", value) for value in public_ip or ()]
    return (*ips, *(announce_maddr or ()))
