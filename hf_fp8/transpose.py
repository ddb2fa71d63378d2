"""Transposed copies of 8-bit matrices, as one kernel that the compiler leaves alone.

Backward multiplies by the transposes of x, w and dy, and FP8 GEMMs read memory in one direction only, so each
is copied. Left to itself, Inductor fuses that copy into the kernel that casts, and, where the cast also
reduces (a row's amax), writes the transpose one byte at a time: measured on an H200, a 4096x4096 linear with
delayed scaling ran at 0.65x of bf16 that way. Reading the cast matrix again costs one byte an element.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils._triton import has_triton


def row_major(data: Tensor) -> Tensor:
    """`data` (R, C), or a batch of such, of an 8-bit dtype with contiguous rows; no copy where they are already."""
    if data.is_contiguous() or not _HAS_KERNEL or not data.is_cuda:
        return data.contiguous()
    return transposed(data.mT.contiguous())


_HAS_KERNEL = torch.cuda.is_available() and has_triton()

if _HAS_KERNEL:
    import triton
    import triton.language as tl
    from torch.library import triton_op, wrap_triton

    @triton.jit
    def _transpose_kernel(source, target, rows, columns, BLOCK: tl.constexpr):
        tiles_across = tl.cdiv(columns, BLOCK)
        tiles = tl.cdiv(rows, BLOCK) * tiles_across
        tile = tl.program_id(0).to(tl.int64)
        matrix = (tile // tiles) * rows * columns
        tile = tile % tiles
        row = (tile // tiles_across) * BLOCK + tl.arange(0, BLOCK)
        column = (tile % tiles_across) * BLOCK + tl.arange(0, BLOCK)
        source = source.to(tl.pointer_type(tl.uint8), bitcast=True) + matrix
        target = target.to(tl.pointer_type(tl.uint8), bitcast=True) + matrix
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        block = tl.load(source + row[:, None] * columns + column[None, :], mask=inside, other=0)
        tl.store(target + column[:, None] * rows + row[None, :], tl.trans(block), mask=tl.trans(inside))

    @triton_op("hf_fp8::transposed", mutates_args={})
    def transposed(data: Tensor) -> Tensor:
        """8-bit (..., R, C), contiguous -> (..., C, R), contiguous."""
        *batch, rows, columns = data.shape
        copy = torch.empty(*batch, columns, rows, dtype=data.dtype, device=data.device)
        block = 128
        tiles = triton.cdiv(rows, block) * triton.cdiv(columns, block)
        wrap_triton(_transpose_kernel)[(tiles * math.prod(batch),)](
            data, copy, rows, columns, BLOCK=block, num_warps=8
        )
        return copy

else:

    def transposed(data: Tensor) -> Tensor:
        """8-bit (..., R, C), contiguous -> (..., C, R), contiguous."""
        return data.mT.contiguous()
