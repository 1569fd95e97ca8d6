"""Whether the peers of a recipe stay together. A pure decision on its topology and outer optimizer."""

from gasloc import stability
from gasloc.recipe import Recipe
from gasloc.stability import Verdict

SWARM_SIZE = 32
"""Peers that it is decided for. Growth changes little beyond."""
_MIXING = ("1-peer", "2-peer", "ring", "exponential", "all-to-all")


def consensus(recipe: Recipe) -> tuple[Verdict, str]:
    """The verdict on how disagreement grows a round, without gradients, and the reason in words.

    Always `OK` where peers do not mix with each other (`none`, a syncer) or where the outer optimizer is not SGD,
    for which nothing is known. See `gasloc.stability` for the estimate.
    """
    outer = recipe.outer
    if recipe.topology not in _MIXING or outer.optimizer != "sgd":
        return Verdict.OK, "nothing is known of how disagreement grows here"
    shape = (recipe.topology, SWARM_SIZE, outer.learning_rate)
    growth = stability.stability(*shape, outer.momentum, recipe.mixes, outer.nesterov)
    safe = stability.safe_momentum(*shape, recipe.mixes, outer.nesterov)
    verdict, reason = stability.verdict(growth, safe)
    return verdict, f"{reason} (topology {recipe.topology}, {SWARM_SIZE} peers)"
