"""Grouped GEMMs in FP8: every expert multiplies its own tokens by its own matrix, in one kernel call.

A mixture of E experts computes, for the rows x_e that the router gave to expert e, the three products of a linear:

    output       y_e  = x_e  @ w_e.T
    grad_input   dx_e = dy_e @ w_e
    grad_weight  dw_e = dy_e.T @ x_e        contracts over the expert's rows

`torch._scaled_grouped_mm` does each for all experts: the rows lie in one buffer, sorted by expert, and `offsets` on
the device says where each expert's rows end. So neither the host nor a compiled graph has to know how many there are.
For that the buffer has a fixed size, enough for any routing: each expert's rows are padded with zero rows to a multiple
of 16 (grad_weight contracts over them), at least 16, and the last expert takes the rest of the buffer. Zero rows change
no result, and no row is left undefined.

A token goes to several experts. It is cast once, in token order, and its 8-bit row is copied to its places: one byte an
element, where a gather before the cast would move two and cast `top_k` times as much. The gradient of the output, which
arrives in token order too, is treated alike.

The kernel takes e4m3 on both sides, so output gradients are e4m3 here under every recipe, and scales by row: one scale
a tensor is passed as equal ones.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torchao.float8.float8_utils import amax_to_scale

from hf_fp8.cast_halves import cast_halves
from hf_fp8.casts import E4M3, Scaled, cast_saturating, delayed_cast, in_dtype, quantize
from hf_fp8.linear import ALIGNMENT, GemmRecipe
from hf_fp8.transpose import row_major


class Routing(NamedTuple):
    """Where tokens go. T tokens with k experts each, in a buffer of P rows."""

    tokens: Tensor
    """(P,) int64: the token in each row, T in a row of padding."""
    places: Tensor
    """(T, k) int64: the row of each token's k-th expert."""
    offsets: Tensor
    """(E,) int32: where each expert's rows end; multiples of 16, the last is P."""


def route(top_k_index: Tensor, experts: int) -> Routing:
    """Lay out the buffer for a router's choice, (T, k) expert numbers. No wait for the device.

    A number that is no expert's (expert parallelism marks tokens of other ranks so) gets a place among the padding.
    """
    tokens, k = top_k_index.shape
    device = top_k_index.device
    rows = ALIGNMENT * ((tokens * k + ALIGNMENT - 1) // ALIGNMENT + experts)
    expert, order = torch.sort(top_k_index.reshape(-1), stable=True)
    # Not by searchsorted, which Inductor of torch 2.11 fuses with a small sort into a kernel that does not compile.
    ends = (top_k_index.reshape(-1, 1) == torch.arange(experts, device=device)).sum(0).cumsum(0)
    starts = F.pad(ends[:-1], (1, 0))
    padded = ((ends - starts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT).clamp(min=ALIGNMENT)
    offsets = padded.cumsum(0)
    shift = offsets - padded - starts  # from the place in sorted order to the row
    known = expert < experts
    place = torch.arange(tokens * k, device=device) + shift[expert.clamp(max=experts - 1)]
    place = torch.where(known, place, rows)
    # One slot more than rows takes what no row must hold; the last 16 rows are always padding.
    in_row = torch.full((rows + 1,), tokens, device=device).scatter(0, place, order // max(k, 1))
    places = torch.empty_like(order).scatter(0, order, place.clamp(max=rows - 1))
    offsets = torch.where(torch.arange(experts, device=device) == experts - 1, rows, offsets)
    return Routing(in_row[:rows], places.view(tokens, k), offsets.int())


class GroupedGemm(NamedTuple):
    """What one grouped linear does. Hashable, so that compiled graphs can be shared."""

    recipe: GemmRecipe
    transposed: bool
    """The weight is stored (E, in, out) instead of (E, out, in)."""
    from_tokens: bool
    """The input is in token order (T, K), otherwise in the buffer's (P, K)."""
    to_tokens: bool
    """The output is in token order, each token's experts summed."""
    halves: bool = False
    """The output comes as two, the left and the right half of its columns."""


class GroupedMatmul(torch.autograd.Function):
    """x (T or P, K), w (E, N, K) or (E, K, N) -> y (T or P, N), or its halves. K and N are multiples of 16.

    The first tensors after `w` are those of the delayed recipe (see `linear.py`), None for the other recipes, except
    that `w_fp8` and `w_scale` are also given where the weight was gathered as FP8.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        w_fp8: Tensor | None,
        w_scale: Tensor | None,
        x_scale: Tensor | None,
        x_amax: Tensor | None,
        dy_scale: Tensor | None,
        dy_amax: Tensor | None,
        tokens: Tensor,
        places: Tensor,
        offsets: Tensor,
        gemm: GroupedGemm,
        record: bool,
        calibrating: bool,
    ) -> Tensor | tuple[Tensor, ...]:
        recipe = gemm.recipe
        ctx.gemm, ctx.calibrating, ctx.cast_weight = gemm, calibrating, w_fp8 is None
        ctx.dy_scale, ctx.dy_amax = dy_scale, dy_amax  # written in backward, so not saved tensors
        x = _with_padding(x) if gemm.from_tokens else x
        x_fp8 = _cast(x, x_scale, x_amax, recipe, record=record, calibrating=calibrating)
        x_PK = _to_rows(x_fp8, tokens) if gemm.from_tokens else x_fp8
        # Rowwise recipes contract x over rows in backward and need other scales there: keep x as it was.
        kept: tuple[Tensor | None, ...] = (None, None)
        if ctx.needs_input_grad[1]:
            kept = (x, None) if recipe.rowwise else x_PK
        ctx.save_for_backward(*kept, w if w_fp8 is None else w_fp8, w_scale, tokens, places, offsets)
        w_EKN = _weight(w if w_fp8 is None else w_fp8, w_scale, ctx.cast_weight, recipe, -1 - gemm.transposed)
        w_EKN = w_EKN if gemm.transposed else w_EKN.t()
        y_PN = grouped_gemm(x_PK, w_EKN, offsets, x.dtype, fast=True, emulate=recipe.emulate)
        if gemm.halves:
            return y_PN.chunk(2, dim=-1)
        return _to_tokens(y_PN, places) if gemm.to_tokens else y_PN

    @staticmethod
    def backward(ctx: Any, dy: Tensor, right: Tensor | None = None) -> tuple[Tensor | None, ...]:
        x_data, x_scale, w_data, w_scale, tokens, places, offsets = ctx.saved_tensors
        gemm: GroupedGemm = ctx.gemm
        recipe = gemm.recipe
        dx = dw = None
        dy = _with_padding(dy) if gemm.to_tokens else dy
        if right is not None and recipe.rowwise:
            dy, right = torch.cat([dy, right], dim=-1), None
        if right is not None:
            dy_fp8 = _cast_pair(dy, right, ctx.dy_scale, ctx.dy_amax, calibrating=ctx.calibrating)
        else:
            dy_fp8 = _cast(dy, ctx.dy_scale, ctx.dy_amax, recipe, record=True, calibrating=ctx.calibrating)
        dy_PN = _to_rows(dy_fp8, tokens) if gemm.to_tokens else dy_fp8
        if ctx.needs_input_grad[0]:
            w_ENK = _weight(w_data, w_scale, ctx.cast_weight, recipe, -2 + gemm.transposed)
            w_ENK = w_ENK.t() if gemm.transposed else w_ENK
            dx_PK = grouped_gemm(dy_PN, w_ENK, offsets, dy.dtype, fast=False, emulate=recipe.emulate)
            dx = _to_tokens(dx_PK, places) if gemm.from_tokens else dx_PK
        if ctx.needs_input_grad[1]:
            if recipe.grad_weight_hp:
                x_PK = x_data[tokens] if gemm.from_tokens else x_data
                dy_hp = dy[tokens] if gemm.to_tokens else dy
                pair = (x_PK, dy_hp) if gemm.transposed else (dy_hp, x_PK)
                dw = _grouped_hp(pair[0], pair[1], offsets)
            else:
                x = Scaled(x_data, x_scale)
                if recipe.rowwise:
                    x, dy_PN = quantize(x_data, E4M3, dim=0), quantize(dy, E4M3, dim=0)
                    x = _to_rows(x, tokens) if gemm.from_tokens else x
                    dy_PN = _to_rows(dy_PN, tokens) if gemm.to_tokens else dy_PN
                a, b = (x, dy_PN) if gemm.transposed else (dy_PN, x)
                dw = grouped_gemm(a.t(), b, offsets, dy.dtype, fast=False, emulate=recipe.emulate)
        return dx, dw, *(None,) * 12


def _cast(
    value: Tensor,
    scale: Tensor | None,
    amax: Tensor | None,
    recipe: GemmRecipe,
    *,
    record: bool,
    calibrating: bool,
) -> Scaled:
    if scale is None or amax is None:
        return quantize(value, E4M3, dim=-1 if recipe.rowwise else None)
    return delayed_cast(value, E4M3, scale, amax, record=record, calibrating=calibrating)


def _cast_pair(
    left: Tensor, right: Tensor, scale: Tensor | None, amax: Tensor | None, *, calibrating: bool
) -> Scaled:
    """The halves of one gradient, with one scale, side by side."""
    own = torch.maximum(*(half.abs().amax(-1).amax() for half in (left, right))).float()
    if amax is not None:
        amax.copy_(torch.maximum(amax, own))
    if scale is None or calibrating:
        scale = amax_to_scale(own, E4M3)
    return Scaled(cast_halves(left, right, scale), scale)


def _weight(w: Tensor, scale: Tensor | None, cast_weight: bool, recipe: GemmRecipe, dim: int) -> Scaled:
    """`w` (E, *, *) in e4m3, as it is stored. `dim`: the contracted axis, scaled by row of the other one if rowwise."""
    if scale is not None:
        return Scaled(cast_saturating(w, scale, E4M3) if cast_weight else w, scale)
    if not recipe.rowwise:
        return quantize(w, E4M3)
    return quantize(w, E4M3, dim=dim)


def _with_padding(value_TK: Tensor) -> Tensor:
    """(T + 1, K): a zero row more, for the padding to be copied from. It also makes no tokens an ordinary input."""
    return F.pad(value_TK, (0, 0, 0, 1))


def _to_rows(value: Scaled, tokens: Tensor) -> Scaled:
    """8-bit rows in token order (T + 1, K), copied to the buffer's order (P, K)."""
    data = value.data.view(torch.uint8)[tokens].view(value.data.dtype)
    by_row = value.scale.ndim > 0 and value.scale.shape[1] == 1
    return Scaled(data, value.scale[tokens] if by_row else value.scale)


def _to_tokens(y_PN: Tensor, places: Tensor) -> Tensor:
    """(P, N) -> (T, N): the sum of each token's rows."""
    return y_PN[places].sum(1)


def grouped_gemm(
    a: Scaled, b: Scaled, offsets: Tensor, out_dtype: torch.dtype, *, fast: bool, emulate: bool
) -> Tensor:
    """By expert: `a` (P, K) @ `b` (E, K, N) -> (P, N), or `a` (N, P) @ `b` (P, K) -> (E, N, K)."""
    experts = len(offsets)
    if emulate:
        return in_dtype(grouped_mm_emulated(_dequantize(a), _dequantize(b), offsets), out_dtype)
    by_rows = b.data.ndim == 3
    columns = b.data.shape[-1]
    # The kernel reads a number for each row and column, also where they are equal: `expand` alone is not enough.
    a_scale = a.scale.reciprocal().expand(a.data.shape[0], 1).reshape(-1)
    b_scale = b.scale.reciprocal()
    if by_rows:
        a_scale = a_scale.contiguous()
        b_scale = b_scale.expand(experts, 1, columns).reshape(experts, columns).contiguous()
    else:  # here each group has scales of its own
        a_scale, b_scale = a_scale.repeat(experts), b_scale.expand(1, columns).reshape(-1).repeat(experts)
    product = torch._scaled_grouped_mm(
        row_major(a.data),
        row_major(b.data.transpose(-2, -1)).transpose(-2, -1),
        a_scale,
        b_scale,
        offs=offsets,
        out_dtype=torch.bfloat16,  # the kernel's only one
        use_fast_accum=fast,
    )
    return in_dtype(product, out_dtype)


def _dequantize(value: Scaled) -> Tensor:
    return value.data.float() / value.scale


def _grouped_hp(a_PM: Tensor, b_PN: Tensor, offsets: Tensor) -> Tensor:
    """(P, M), (P, N) -> (E, M, N) in high precision."""
    if a_PM.device.type != "cpu":
        low = torch.bfloat16
        return torch._grouped_mm(a_PM.to(low).t(), b_PN.to(low), offs=offsets).to(b_PN.dtype)
    return grouped_mm_emulated(a_PM.t().float(), b_PN.float(), offsets).to(b_PN.dtype)


@torch.library.custom_op("hf_fp8::grouped_mm_emulated", mutates_args=())
def grouped_mm_emulated(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """`grouped_gemm` on fp32 operands, expert by expert. One operator to the compiler, which cannot see group sizes."""
    bounds = [0, *offsets.tolist()]
    groups = list(pairwise(bounds))
    with torch.autocast(a.device.type, enabled=False):
        if b.ndim == 3:
            return torch.cat([a[start:end] @ b[i] for i, (start, end) in enumerate(groups)])
        return torch.stack([a[:, start:end] @ b[start:end] for start, end in groups])


@grouped_mm_emulated.register_fake
def _(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    shape = (a.shape[0], b.shape[-1]) if b.ndim == 3 else (len(offsets), a.shape[0], b.shape[-1])
    return cast(Tensor, a.new_empty(shape))
