"""Freed memory goes back to the system."""

import sys
from pathlib import Path

import pytest
import torch

from gasloc.heap import WORTH_BYTES, give_back


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS:")).split()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_was_freed_among_what_is_kept_goes_back() -> None:
    tensors = [torch.ones(16 * 1024) for _ in range(1024)]  # below the size that is taken from the system by itself
    kept = tensors[::8]
    del tensors
    before = resident_bytes()
    give_back(WORTH_BYTES)
    assert before - resident_bytes() > 32 * 2**20
    assert all(float(tensor[-1]) == 1 for tensor in kept)


def test_little_is_not_worth_it() -> None:
    assert not give_back(WORTH_BYTES - 1)
