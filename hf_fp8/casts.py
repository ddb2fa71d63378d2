"""Casts to 8 bits: with a tensor's own scale or a stored one, rounded to nearest or dithered.

Scales and saturation are torchao's (`torchao.float8.float8_utils`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Scaled(NamedTuple):
    """8-bit data with the scale that brought it into range: `data = round(value * scale)`.

    `scale` is fp32: 0-dim, or (rows, 1) / (1, columns) when there is one per row or column. A stack of matrices has
    one scale, or such a scale each.
    """

    data: Tensor
    scale: Tensor

    def t(self) -> Scaled:
        return Scaled(self.data.mT, self.scale.mT if self.scale.ndim else self.scale)


def quantize(
    value: Tensor, dtype: torch.dtype, *, dim: int | None = None, columns: bool = False, dither: bool = False
) -> Scaled:
    """Cast a 2-D tensor, or a stack of them, to `dtype` with the scale of its own largest magnitude.

    `dim`: the contracted axis, for one scale per row of the other axis (rounded down to a power of two, as
    torchao's rowwise recipe does); None for one scale.
    `columns`: column-major, as the second operand of a GEMM. For a cast that nobody else reads: Inductor then writes
    it in that order at once.
    """
    magnitude = value.abs()
    # Row by row first: Inductor can fuse that reduction with the producer of `value` (DESIGN D3).
    amax = magnitude.amax(-1).amax() if dim is None else magnitude.amax(dim, keepdim=True)
    scale = amax_to_scale(amax, dtype, dim is not None)
    data = cast_saturating(value, scale, dtype, dither=dither)
    return Scaled(column_major(data) if columns else data, scale)


def in_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value.to(dtype)`, for what an autograd.Function returns.

    Where that cast changes nothing, torch 2.11 compiles a forward without a way back, and gradients behind it are zero.
    """
    return value if value.dtype == dtype else value.to(dtype)


def column_major(data: Tensor) -> Tensor:
    return data.t().contiguous().t()


def delayed_cast(
    value: Tensor,
    dtype: torch.dtype,
    scale: Tensor,
    amax: Tensor,
    *,
    record: bool,
    calibrating: bool,
    dither: bool = False,
) -> Scaled:
    """One pass over `value`: cast with `scale`, and max its own amax into `amax`.

    Max, not overwrite: accumulation sees several micro-batches, and recomputation sees the same one twice.
    """
    if record or calibrating:
        own = value.abs().amax(-1).amax().float()
        if calibrating:
            scale = amax_to_scale(own, dtype)
        if record:
            amax.copy_(torch.maximum(amax, own))
    return Scaled(cast_saturating(value, scale, dtype, dither=dither), scale)


def cast_saturating(value: Tensor, scale: Tensor, dtype: torch.dtype, *, dither: bool = False) -> Tensor:
    """`value * scale` in `dtype`; what is out of range becomes the largest number."""
    scaled = value.float() * scale
    return to_fp8_saturated(dithered(scaled, dtype) if dither else scaled, dtype)


def dithered(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the mantissa of `dtype`, up with the probability that makes the mean right.

    For the gradient of logits, p - y. Rounded to the nearest, its error depends on p alone and is the same at every
    occurrence of a context: the probabilities at which the gradients of all occurrences cancel are then not the right
    ones (with 2 mantissa bits up to 12 % off), and no number of tokens averages that out.

    The chance is a hash of the place in the matrix, which has nothing to do with what is there: no random state, and
    the same result in every run.

    Args:
        value: fp32, shape (M, N).
    """
    lost = (1 << 23 - round(-math.log2(torch.finfo(dtype).eps))) - 1
    rows, columns = (torch.arange(n, dtype=torch.int32, device=value.device) for n in value.shape)
    place = rows.unsqueeze(1) * _MIX[0] + columns * _MIX[1]  # wraps around
    chance = (place ^ place >> 15) * _MIX[2]
    chance = (chance ^ chance >> 13) & lost
    least = torch.finfo(dtype).smallest_normal
    if dtype == E5M2:  # what is less than normal is 1e-9 of the largest number
        return torch.where(value.isfinite(), _round(value, chance, lost), value)
    # Less than normal numbers lie as far apart as those between `least` and its double.
    small = value.abs() < least
    rounded = _round(torch.where(small, value.abs() + least, value), chance, lost)
    rounded = torch.where(small, torch.copysign(rounded - least, value), rounded)
    return torch.where(value.isfinite(), rounded, value)


def _round(value: Tensor, chance: Tensor, lost: int) -> Tensor:
    return (value.view(torch.int32) + chance & ~lost).view(torch.float32)


# Odd int32 numbers without a pattern in their bits: three primes of xxHash.
_MIX = (-1640531535, -2048144777, -1028477379)
