"""Which algorithm, outer rule and graph a recipe's `topology` stands for in the simulator."""

from dataclasses import dataclass

from gasloc import topology
from gasloc.errors import RecipeError, UsageError
from gasloc.outer import make_outer
from gasloc.recipe import Recipe
from gasloc.simulation.compute import Compute
from gasloc.simulation.gossip import gossip
from gasloc.simulation.learner import Learning, learn
from gasloc.simulation.life import Algorithm
from gasloc.simulation.lockstep import Lockstep, dadam, ddp
from gasloc.simulation.rules import Average, Gasloc, Noloco, Parts, Published, Rule
from peers.exchange import PeerId


@dataclass(frozen=True, slots=True)
class Method:
    """An algorithm and the graph that it mixes on, a name of `gasloc.topology`."""

    algorithm: Algorithm
    graph: str
    lockstep: bool = False
    """Workers trade at every step."""
    paced: bool = False
    """Workers choose their local steps by `gasloc.pacing`, where the recipe says so."""


def method_of(recipe: Recipe, graph: str | None) -> Method:
    """The recipe's method. `graph` is for the baselines that leave it open; None: the ring.

    Raises `UsageError` for a graph where the topology itself says who mixes with whom, and `RecipeError` for what
    does not go together.
    """
    name = recipe.topology
    if graph is not None and name not in ("dadam", "local-dadam"):
        raise UsageError(f"--graph {graph} is for dadam and local-dadam: topology '{name}' says itself who mixes")
    _check(recipe, graph)
    match name:
        case "syncer":
            return Method(learn, "none")
        case "ddp":
            return Method(ddp, "all-to-all", lockstep=True)
        case "dadam":
            return Method(dadam, graph or "ring", lockstep=True)
        case "local-dadam":
            return Method(gossip, graph or "ring", paced=True)
        case "noloco":
            return Method(gossip, "1-peer", paced=True)
        case _:
            return Method(gossip, name, paced=name != "none")


def _check(recipe: Recipe, graph: str | None) -> None:
    """Raises `RecipeError` for what a recipe asks for and its topology does not do; nothing is ignored."""
    name = recipe.topology
    if graph is not None and graph not in topology.NAMES:
        raise RecipeError(f"graph '{graph}' is unknown: choose one of {', '.join(topology.NAMES)}")
    if recipe.outer.rule == "published" and name not in topology.NAMES:
        raise RecipeError(f"outer.rule = 'published' with topology '{name}': it goes with {', '.join(topology.NAMES)}")
    if recipe.exchange.overlap not in ("auto", "off", 0) and (
        name not in topology.NAMES or recipe.outer.rule == "published"
    ):
        raise RecipeError(
            f"exchange.overlap = {recipe.exchange.overlap} with topology '{name}' and outer.rule = "
            f"'{recipe.outer.rule}': it goes with 'gasloc' and {', '.join(topology.NAMES)}"
        )
    for what, value in (("mixes", recipe.mixes), ("fragments", recipe.fragments)):
        if value > 1 and (name in ("ddp", "dadam") or (name, what) == ("syncer", "mixes")):
            raise RecipeError(f"{what} = {value} with topology '{name}': it does 1 only")


def rule_of(recipe: Recipe, compute: Compute, peer: PeerId, parts: Parts) -> Rule:
    """A worker's outer rule over its parameters, which it changes in place."""
    outer = recipe.outer
    parameters = compute.trainees[peer].parameters
    match recipe.topology:
        case "ddp" | "dadam":
            return Lockstep(compute, peer)
        case "local-dadam":
            return Average(parameters, parts)
        case "noloco":
            return Noloco(parameters, parts, outer.learning_rate, outer.momentum)
        case "syncer":
            return Learning(parameters, parts)
        case _ if outer.rule == "published":
            return Published(parameters, parts, outer.learning_rate, outer.momentum)
        case _:
            return Gasloc(parameters, parts, make_outer(outer))
