"""Small simulations for tests."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gasloc.corpus import Corpus
from gasloc.events import Event
from gasloc.recipe import Recipe, parse
from gasloc.simulation.conditions import Conditions
from gasloc.simulation.decoder import DecoderProblem
from gasloc.simulation.problem import Problem
from gasloc.simulation.run import DEFAULT, Result, Simulation, Variant

Heard = tuple[str, float, Event]


def tiny_recipe(**changes: Any) -> Recipe:
    """Five rounds of three steps of a decoder of 1,600 parameters; nested sections are given as dicts.

    Every exchange is waited for, unless `exchange` says otherwise.
    """
    values: dict[str, Any] = {
        "rounds": 5,
        "local_steps": 3,
        "topology": "all-to-all",
        "pacing": False,
        "model": {
            "vocabulary_size": 32,
            "dim": 8,
            "layers": 1,
            "heads": 2,
            "key_value_heads": 1,
            "hidden_dim": 16,
            "context_length": 8,
        },
        "inner": {"batch_size": 2, "warmup_steps": 4, "learning_rate": 1e-2},
        "evaluation": {"every_rounds": 5, "batches": 1},
    }
    return parse(values | changes | {"exchange": {"overlap": "off"} | changes.get("exchange", {})})


def tiny_corpus() -> Corpus:
    """Letters with some order in them."""
    steps = np.random.default_rng(0).integers(1, 4, size=4000)
    tokens = (np.cumsum(steps) % 32).astype(np.uint16)
    return Corpus(train=tokens[:3600], held_out=tokens[3600:], name="letters")


def decoder(recipe: Recipe, dtype: torch.dtype = torch.float64) -> DecoderProblem:
    """The recipe's decoder on `tiny_corpus`."""
    return DecoderProblem(recipe, tiny_corpus(), dtype)


def play(
    recipe: Recipe,
    problem: Problem,
    conditions: Sequence[Conditions] | int,
    variant: Variant = DEFAULT,
) -> tuple[Result, list[Heard]]:
    """Runs a simulation; returns what is left and all events, in order. A number of workers: all alike."""
    each = [Conditions()] * conditions if isinstance(conditions, int) else conditions
    heard: list[Heard] = []
    result = Simulation(recipe, problem, each, variant=variant).run(lambda *event: heard.append(event))
    return result, heard


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    """Every tensor within an absolute tolerance."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], rtol=0, atol=tolerance)
