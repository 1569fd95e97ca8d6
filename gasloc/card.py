"""A run's card as its members hand it out, and the recipe in it."""

import json

from gasloc.errors import GaslocError, RunError
from gasloc.recipe import Recipe, parse
from peers.donor import RunCard


def read_card(card: RunCard, expected: RunCard | None = None) -> Recipe:
    """The recipe in a run's card. Raises `RunError` if it is not valid, or not of the run expected."""
    try:
        recipe = parse(json.loads(card.document))
    except (ValueError, GaslocError) as error:
        raise RunError(f"run '{card.run}': its recipe cannot be read here, perhaps another version: {error}") from None
    if recipe.digest != card.digest:
        raise RunError(f"run '{card.run}': its recipe has digest {recipe.digest[:12]}, not {card.digest[:12]} as said")
    if expected is not None and (card.run, card.digest) != (expected.run, expected.digest):
        raise RunError(
            f"the swarm there trains run '{card.run}', this folder holds run '{expected.run}': choose another --dir"
        )
    return recipe
