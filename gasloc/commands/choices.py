"""What flags mean together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gasloc.errors import UsageError

if TYPE_CHECKING:
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


def announced(public_ip: list[str] | None, announce_maddr: list[str] | None) -> tuple[str, ...]:
    """What to tell others to dial. Raises `UsageError` for a malformed IP address."""
    from gasloc.commands.options import check_ip

    ips = [check_ip("--public-ip", value) for value in public_ip or ()]
    return (*ips, *(announce_maddr or ()))
