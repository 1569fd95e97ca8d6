"""Which way modular codes are computed: compiled loops, where numba is installed, or torch's operations.

Both come to the same bits, so which it is matters for time alone, and may change while an exchange is under way. Until
`prepare` has ended it is torch.
"""

import logging
import threading
from typing import Protocol

import torch

from peers import torch_loops
from peers.lattice import BLOCK, Bits, Codes, blocks_in

_log = logging.getLogger(__name__)


class Loops(Protocol):
    """`peers.torch_loops` and `peers.numba_loops`; what each does is said there."""

    def movement(self, row: torch.Tensor, start: torch.Tensor) -> tuple[torch.Tensor, bool]: ...

    def encode(self, row: torch.Tensor, step: torch.Tensor, bits: Bits, shift: int, codes: Codes) -> None: ...

    def decode(
        self, codes: Codes, near: torch.Tensor, step: torch.Tensor, bits: Bits, values: torch.Tensor
    ) -> torch.Tensor: ...


_torch: Loops = torch_loops
_fast: Loops | None = None
_lock = threading.Lock()
_found: str | None = None


def prepare() -> str:
    """Loads the compiled loops, or compiles them, once a process; returns in words what is used from now on.

    Takes a fraction of a second, or some seconds where nothing was kept by an earlier process: for a worker thread.
    Never raises.
    """
    global _fast, _found
    with _lock:
        if _found is None:
            try:
                from peers import numba_loops

                if _agree(numba_loops):
                    _fast, _found = numba_loops, "compiled by numba"
                else:
                    _found = "by torch, as what numba compiled is wrong"
            except ImportError as error:
                _found = f"by torch, as numba is not to be had ({error})"
            except Exception as error:
                _found = f"by torch, as numba does not compile them ({type(error).__name__})"
                _log.debug("numba failed", exc_info=True)
        return _found


def loops_for(*rows: torch.Tensor) -> Loops:
    """What computes codes of flat tensors, and of all that goes with them."""
    fast = _fast
    return fast if fast is not None and all(map(_suits, rows)) else _torch


def _suits(row: torch.Tensor) -> bool:
    """Whether compiled loops take it. What was cut out of a file may begin between two places for a float32."""
    return (
        row.dtype is torch.float32
        and row.device.type == "cpu"
        and row.is_contiguous()
        and row.data_ptr() % row.element_size() == 0
    )


def _agree(loops: Loops) -> bool:
    """Whether loops do as torch does, on a row that has all there is: a compiler, or what it kept, may be at fault.

    Nothing is rounded in it but to the lattice, so it is the same on any processor.
    """
    row = torch.arange(3 * BLOCK + 9) * 37 % 256 / 64 - 2
    start = torch.cat([row[: 2 * BLOCK] - 0.25, row[2 * BLOCK :]])
    step = torch.tensor([0.25, 0.125, 0.0, 0.5])[: blocks_in(row.numel())]
    own = row + 0.5
    own[BLOCK + 3] += 2.0**21
    own[2 * BLOCK :] -= 0.5
    widths: tuple[Bits, ...] = (4, 8)
    return all(
        _results(loops, row, start, own, step, bits) == _results(_torch, row, start, own, step, bits) for bits in widths
    )


def _results(
    loops: Loops, row: torch.Tensor, start: torch.Tensor, own: torch.Tensor, step: torch.Tensor, bits: Bits
) -> list[object]:
    bounds, _ = loops.movement(row, start)
    packed = torch.empty(-(-row.numel() * bits // 8), dtype=torch.uint8)
    codes = Codes(packed, torch.empty(len(step), dtype=torch.int32))
    loops.encode(row, step, bits, 2**17, codes)
    values = torch.empty_like(own)
    wrong = loops.decode(codes, own, step, bits, values)
    return [each.tolist() for each in (bounds, codes.packed, codes.checks, values, wrong)]
