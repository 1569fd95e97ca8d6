"""Fresh memory for large tensors, in huge pages where the system gives them."""

import contextlib
import mmap

import torch

_HUGE_BYTES = 2 * 1024 * 1024
_LEAST_BYTES = 2 * _HUGE_BYTES
"""Below it a tensor may hold no whole huge page."""
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


def empty(count: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat CPU tensor, (count,), to be filled at once; what it holds until then is not defined.

    Memory that a process has not touched before comes page by page as it is written, and that takes about as long as
    all else that is done to received values; a huge page takes the place of 512. Raises `RuntimeError`, as torch does,
    where there is no memory.
    """
    size_bytes = count * dtype.itemsize
    if _ADVICE is None or size_bytes < _LEAST_BYTES:
        return torch.empty(count, dtype=dtype)
    try:
        region = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise RuntimeError(f"no memory for {size_bytes} bytes: {error}") from None
    with contextlib.suppress(OSError):  # a system without huge pages: others are as good but for time
        region.madvise(_ADVICE)
    return torch.frombuffer(region, dtype=dtype, count=count)
