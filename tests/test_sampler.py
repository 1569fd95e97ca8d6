"""Batches as a pure function of peer, step and seed."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gasloc import sampler
from gasloc.errors import DataError

TEXT = np.arange(5_000, dtype=np.uint16)

peers = st.text(min_size=1, max_size=60)
steps = st.integers(0, 2**40)
seeds = st.integers(0, 2**63 - 1)


def offsets(peer: str, step: int, seed: int, size: int = 16, context: int = 8) -> list[int]:
    """Each token of TEXT is its own place, so a stretch's first token is its offset."""
    inputs, _ = sampler.batch(TEXT, peer_id=peer, step=step, seed=seed, batch_size=size, context_length=context)
    return [int(first) for first in inputs[:, 0]]


@given(peer=peers, step=steps, seed=seeds, size=st.integers(1, 9), context=st.integers(1, 40))
def test_a_batch_is_stretches_of_the_text_with_targets_one_on(
    peer: str, step: int, seed: int, size: int, context: int
) -> None:
    inputs, targets = sampler.batch(TEXT, peer_id=peer, step=step, seed=seed, batch_size=size, context_length=context)
    assert inputs.shape == targets.shape == (size, context)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs - inputs[:, :1], torch.arange(context).expand(size, context))
    assert inputs.min() >= 0
    assert targets.max() < len(TEXT)


@given(peer=peers, step=steps, seed=seeds)
def test_the_same_peer_step_and_seed_give_the_same_batch(peer: str, step: int, seed: int) -> None:
    assert offsets(peer, step, seed) == offsets(peer, step, seed)


@given(peer=peers, other=peers, step=steps, seed=seeds)
def test_peers_steps_and_seeds_draw_differently(peer: str, other: str, step: int, seed: int) -> None:
    drawn = offsets(peer, step, seed)
    assert drawn != offsets(peer, step + 1, seed)
    assert drawn != offsets(peer, step, seed + 1)
    assert (drawn == offsets(other, step, seed)) == (peer == other)


def test_a_restarted_peer_goes_on_where_it_was_and_never_replays() -> None:
    straight = [offsets("peer", step, 3) for step in range(20)]
    resumed = [offsets("peer", step, 3) for step in range(12, 20)]
    assert straight[12:] == resumed
    assert len({tuple(drawn) for drawn in straight}) == 20


def test_large_batches_of_successive_steps_share_no_run_of_draws() -> None:
    """A counter that only moved by the step would repeat all but the first draws of the step before."""
    drawn = [offsets("peer", step, 0, size=400) for step in range(3)]
    for earlier, later in pairwise(drawn):
        for shift in range(1, 40):
            assert earlier[shift : shift + 20] != later[:20]


def test_draws_cover_the_text_evenly() -> None:
    drawn = [place for step in range(200) for place in offsets("peer", step, 0, size=50)]
    counts = np.histogram(drawn, bins=10, range=(0, len(TEXT)))[0]
    assert counts.min() > 0.85 * len(drawn) / 10
    assert min(drawn) < 10
    assert len(TEXT) - 20 < max(drawn) <= len(TEXT) - 9


@given(batches=st.integers(1, 6), size=st.integers(1, 9), context=st.integers(1, 40))
def test_evaluation_stretches_are_evenly_spaced_and_fixed(batches: int, size: int, context: int) -> None:
    first = sampler.evaluation_batches(TEXT, batches=batches, batch_size=size, context_length=context)
    again = sampler.evaluation_batches(TEXT, batches=batches, batch_size=size, context_length=context)
    assert len(first) == batches
    for (inputs, targets), (same, _) in zip(first, again, strict=True):
        assert torch.equal(inputs, same)
        assert torch.equal(targets, inputs + 1)
        assert inputs.shape == (size, context)
    starts = torch.cat([inputs[:, 0] for inputs, _ in first])
    if len(starts) > 1:
        gaps = starts.diff()
        assert gaps.max() - gaps.min() <= 1
        assert gaps.min() >= context, "stretches of a long text do not overlap"


@pytest.mark.parametrize("length", [0, 1, 8])
def test_too_short_a_text_is_refused_with_the_numbers(length: int) -> None:
    with pytest.raises(DataError, match=f"has {length} tokens, a context of 8 needs at least 9"):
        sampler.batch(TEXT[:length], peer_id="a", step=0, seed=0, batch_size=2, context_length=8)
    with pytest.raises(DataError, match="at least 9"):
        sampler.evaluation_batches(TEXT[:length], batches=1, batch_size=1, context_length=8)


def test_the_shortest_text_has_one_stretch() -> None:
    inputs, targets = sampler.batch(TEXT[:9], peer_id="a", step=0, seed=0, batch_size=2, context_length=8)
    assert inputs[0].tolist() == list(range(8))
    assert targets[1].tolist() == list(range(1, 9))
