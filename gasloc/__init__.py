"""Decentralized, peer-to-peer pre-training of language models."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gasloc.optimizer import GaslocOptimizer, Network, RoundResult

__all__ = ["GaslocOptimizer", "Network", "RoundResult"]


def __getattr__(name: str) -> object:
    """Imports the public names when they are first used, since torch takes a second."""
    if name in __all__:
        return getattr(import_module("gasloc.optimizer"), name)
    raise AttributeError(f"module 'gasloc' has no attribute '{name}'")
