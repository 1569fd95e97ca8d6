"""Decentralized, peer-to-peer pre-training of language models."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gasloc.optimizer import GaslocOptimizer, Network, RoundResult
    from gasloc.recipe import Recipe
    from gasloc.swarm import Swarm
    from peers.node import PeerOptions

__all__ = ["GaslocOptimizer", "Network", "PeerOptions", "Recipe", "RoundResult", "Swarm"]

_HOMES = {
    "GaslocOptimizer": "gasloc.optimizer",
    "Network": "gasloc.optimizer",
    "PeerOptions": "peers.node",
    "Recipe": "gasloc.recipe",
    "RoundResult": "gasloc.optimizer",
    "Swarm": "gasloc.swarm",
}


def __getattr__(name: str) -> object:
    """Imports the public names when they are first used, since torch takes a second."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'gasloc' has no attribute '{name}'")
