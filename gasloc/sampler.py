"""Which stretches of text go into a batch: a pure function of the peer, the step and the seed.

Nothing is stored. A peer that restarts at step s draws what it would have drawn at step s, and two peers draw
different stretches, without being told of each other.
"""

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gasloc.errors import DataError

Tokens = NDArray[np.uint16]


def batch(
    tokens: Tokens, *, peer_id: str, step: int, seed: int, batch_size: int, context_length: int
) -> tuple[Tensor, Tensor]:
    """A training batch: inputs and targets, (batch_size, context_length) int64; targets are one token on.

    Offsets are uniform, from a Philox generator (Salmon et al., 2011) with key hash(seed, peer_id) and counter
    `step`. Raises `DataError` where `tokens` has no more than `context_length` tokens.
    """
    places = _places(tokens, context_length)
    digest = hashlib.sha256(f"{seed}:{peer_id}".encode()).digest()
    key = np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64)
    # the step stands in the counter's high word, so that no step's numbers run into the next one's
    counter = np.array([0, 0, step, 0], dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
    return _cut(tokens, generator.integers(0, places, size=batch_size), context_length)


def evaluation_batches(
    tokens: Tokens, *, batches: int, batch_size: int, context_length: int
) -> list[tuple[Tensor, Tensor]]:
    """Evenly spaced stretches, the same for every peer: `batches` pairs like those of `batch`.

    The stretches do not overlap where the text is long enough. Raises `DataError` like `batch`.
    """
    places = _places(tokens, context_length)
    wanted = batches * batch_size
    offsets = np.arange(wanted, dtype=np.int64) * places // wanted
    return [_cut(tokens, part, context_length) for part in offsets.reshape(batches, batch_size)]


def _places(tokens: Tokens, context_length: int) -> int:
    """How many offsets a stretch and its shifted targets can start at."""
    places = len(tokens) - context_length
    if places < 1:
        raise DataError(
            f"the text has {len(tokens)} tokens, a context of {context_length} needs at least "
            f"{context_length + 1}: give more text with --data, or a recipe with a shorter context"
        )
    return places


def _cut(tokens: Tokens, offsets: NDArray[np.int64], context_length: int) -> tuple[Tensor, Tensor]:
    windows = offsets[:, None] + np.arange(context_length + 1)  # (B, T + 1)
    cut = torch.from_numpy(tokens[windows].astype(np.int64))
    return cut[:, :-1].contiguous(), cut[:, 1:].contiguous()
