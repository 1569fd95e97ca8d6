"""Which algorithm, outer rule and graph a recipe's `topology` stands for in the simulator."""

from dataclasses import dataclass

from torch import Tensor

from gasloc import topology
from gasloc.errors import RecipeError, UsageError
from gasloc.outer import make_outer
from gasloc.recipe import Recipe
from gasloc.simulation.gossip import gossip
from gasloc.simulation.life import Algorithm
from gasloc.simulation.rules import Average, Gasloc, Parts, Published, Rule


@dataclass(frozen=True, slots=True)
class Method:
    """An algorithm and the graph that it mixes on, a name of `gasloc.topology`."""

    algorithm: Algorithm
    graph: str


def method_of(recipe: Recipe, graph: str | None) -> Method:
    """The recipe's method. `graph` is for the baselines that leave it open; None: the ring.

    Raises `UsageError` for a graph where the topology itself says who mixes with whom, and `RecipeError` for what
    does not go together.
    """
    name = recipe.topology
    if name in topology.NAMES:
        if graph is not None:
            raise UsageError(f"--graph {graph} is for dadam and local-dadam: topology '{name}' is a graph itself")
        return Method(gossip, name)
    raise RecipeError(f"topology '{name}' is unknown to the simulator")


def rule_of(recipe: Recipe, parameters: dict[str, Tensor], parts: Parts) -> Rule:
    """A worker's outer rule over its parameters, which it changes in place."""
    outer = recipe.outer
    if recipe.topology == "local-dadam":
        return Average(parameters, parts)
    if outer.rule == "published":
        return Published(parameters, parts, outer.learning_rate, outer.momentum)
    return Gasloc(parameters, parts, make_outer(outer))
