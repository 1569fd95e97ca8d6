"""Fresh memory for tensors: of any size and dtype, each its own, given back with its tensor."""

import gc
from pathlib import Path

import pytest
import torch

from peers import memory


@pytest.mark.parametrize("count", [0, 1, 1000, 2**20, 2**20 + 1, 3 * 2**20 + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8])
def test_any_tensor_may_be_made_and_filled(count: int, dtype: torch.dtype) -> None:
    one, other = memory.empty(count, dtype), memory.empty(count, dtype)
    assert one.shape == other.shape == (count,)
    assert one.dtype is dtype
    one.fill_(3)
    other.fill_(5)
    assert bool((one == 3).all())
    assert one.is_contiguous()


def test_views_keep_the_memory() -> None:
    view = memory.empty(2**21, torch.float32).fill_(2.0).reshape(2, -1)[1]
    gc.collect()
    assert float(view.sum()) == 2.0 * 2**20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux tells how much memory is held")
def test_memory_goes_back_to_the_system_with_its_tensor() -> None:
    def held_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * 4096

    before = held_bytes()
    tensor = memory.empty(64 * 2**20, torch.uint8).fill_(1)
    assert held_bytes() > before + 48 * 2**20
    del tensor
    gc.collect()
    assert held_bytes() < before + 32 * 2**20


def test_what_no_system_has_is_refused() -> None:
    with pytest.raises(RuntimeError, match="memory"):
        memory.empty(2**60, torch.uint8)
