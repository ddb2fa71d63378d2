"""The FP8 linear: three GEMMs, each on 8-bit operands.

A linear layer of weight `w` (N, K) on an input `x` (M tokens, K) does three matrix products in a training
step, and each contracts over another axis:

    output      y  (M, N) = x  (M, K) @ w.T (K, N)      over K
    grad_input  dx (M, K) = dy (M, N) @ w   (N, K)      over N
    grad_weight dw (N, K) = dy.T (N, M) @ x (M, K)      over M, the number of tokens

All operands are scaled into the range of an 8-bit format first: e4m3 (3 mantissa bits, up to 448) for
inputs and weights, e5m2 (2 mantissa bits, up to 57344) for output gradients, whose range is wider. The
rowwise recipes use e4m3 everywhere, since a scale per row leaves little range to cover. The tensor cores
multiply 8-bit numbers and add in (about) fp32; *fast accumulation* keeps fewer bits of the sum. It is used
in the forward GEMM only: in all three it costs loss (DESIGN: 0.985 against 0.94 after 300 steps).

Two facts of the hardware shape the code. The GEMM wants its first operand row-major and its second
column-major, in every product, so backward needs transposed copies of the 8-bit data. And the contracted
axis must be a multiple of 16: K and N are checked when layers are selected, M is padded here with zero
rows, which change no result and make an empty input an ordinary one.

Scales, casts and the GEMM call come from torchao (`torchao.float8`). The autograd function is our own
because torchao's computes grad_weight also for frozen weights, has no path for stored scales, and fails
on zero rows (pytorch/ao#1200).

A weight may arrive already cast: FSDP2 gathers FP8 bytes and hands them over as torchao's
`Float8TrainingTensor` (see `gathering.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torchao.float8._inductor_patch import _patch_inductor_min_max_codegen
from torchao.float8.float8_ops import addmm_float8_unwrapped
from torchao.float8.float8_training_tensor import Float8TrainingTensor
from torchao.float8.float8_utils import amax_to_scale
from transformers.pytorch_utils import Conv1D

from hf_fp8.casts import E4M3, E5M2, Scaled, cast_saturating, column_major, delayed_cast, in_dtype, quantize
from hf_fp8.config import FP8Config
from hf_fp8.transpose import row_major

ALIGNMENT = 16  # of the contracted axis, in elements: cuBLASLt FP8 GEMMs need 16-byte rows


class GemmRecipe(NamedTuple):
    """What the three GEMMs of one linear do. Hashable, so that compiled graphs can be shared."""

    rowwise: bool  # one scale a row (of the contracted axis) instead of one a tensor
    grad_dtype: torch.dtype  # of the output gradient in its 8-bit form
    grad_weight_hp: bool  # grad_weight in high precision
    dither: bool  # output gradients are rounded up or down by chance, see `dithered`
    emulate: bool

    @classmethod
    def of(cls, config: FP8Config, *, dither: bool = False) -> GemmRecipe:
        rowwise = config.recipe.startswith("rowwise")
        return cls(
            rowwise=rowwise,
            grad_dtype=E4M3 if rowwise else E5M2,
            grad_weight_hp=config.recipe == "rowwise_with_gw_hp",
            dither=dither,
            emulate=config.emulate,
        )


def gemm(a: Scaled, b: Scaled, out_dtype: torch.dtype, *, fast: bool, emulate: bool) -> Tensor:
    """`a` (M, K) @ `b` (K, N) in `out_dtype`. K is a multiple of 16."""
    if emulate:
        with torch.autocast(a.data.device.type, enabled=False):
            return in_dtype((a.data.float() / a.scale) @ (b.data.float() / b.scale), out_dtype)
    # torch._scaled_mm takes one scale on both sides, or one per row and one per column.
    b_scale = b.scale.repeat(1, b.data.shape[1]) if a.scale.ndim > b.scale.ndim else b.scale
    return addmm_float8_unwrapped(
        row_major(a.data),
        a.scale,
        row_major(b.data.t()).t(),
        b_scale,
        output_dtype=out_dtype,
        use_fast_accum=fast,
    )


class _FP8Matmul(torch.autograd.Function):
    """x_MK, w_NK -> y_MN with scales taken from the operands themselves. M is a multiple of 16."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, w_NK: Tensor, recipe: GemmRecipe) -> Tensor:
        ctx.recipe = recipe
        row = -1 if recipe.rowwise else None
        x = quantize(x_MK, E4M3, dim=row)
        # Rowwise recipes contract x over tokens in backward and need other scales there: keep x as it was.
        ctx.save_for_backward(*((x_MK,) if recipe.rowwise else x), *_saved(w_NK))
        w = _weight(*_saved(w_NK), dim=row)
        return gemm(x, w.t(), x_MK.dtype, fast=True, emulate=recipe.emulate)

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        recipe: GemmRecipe = ctx.recipe
        dx_MK = dw_NK = None
        row = -1 if recipe.rowwise else None
        if recipe.rowwise:
            x_MK, *weight = ctx.saved_tensors
        else:
            x_data, x_scale, *weight = ctx.saved_tensors
        dy = quantize(dy_MN, recipe.grad_dtype, dim=row, dither=recipe.dither)
        if ctx.needs_input_grad[0]:
            # The high-precision grad_weight recipe scales the weight as a whole here, as torchao's does.
            by_column = recipe.rowwise and not recipe.grad_weight_hp
            w = _weight(*weight, dim=0 if by_column else None, columns=True)
            dx_MK = gemm(dy, w, dy_MN.dtype, fast=False, emulate=recipe.emulate)
        if ctx.needs_input_grad[1]:
            if recipe.grad_weight_hp:
                dw_NK = dy_MN.t() @ x_MK
            elif recipe.rowwise:
                dy_by_output = quantize(dy_MN, recipe.grad_dtype, dim=0, dither=recipe.dither).t()
                x_by_input = quantize(x_MK, E4M3, dim=0, columns=True)
                dw_NK = gemm(dy_by_output, x_by_input, dy_MN.dtype, fast=False, emulate=recipe.emulate)
            else:
                x = Scaled(x_data, x_scale)
                dw_NK = gemm(dy.t(), x, dy_MN.dtype, fast=False, emulate=recipe.emulate)
        return dx_MK, dw_NK, None


class _FP8DelayedMatmul(torch.autograd.Function):
    """x_MK, w_NK -> y_MN with stored scales; the amaxes of x and dy are recorded for the next step.

    `w_fp8` is the weight already cast, or None to cast it here. `record` is False in evaluation. While
    `calibrating` there are no stored scales yet, and x and dy get exact ones.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        w_NK: Tensor,
        w_fp8: Tensor | None,
        w_scale: Tensor,
        x_scale: Tensor,
        x_amax: Tensor,
        dy_scale: Tensor,
        dy_amax: Tensor,
        recipe: GemmRecipe,
        record: bool,
        calibrating: bool,
    ) -> Tensor:
        ctx.recipe, ctx.calibrating, ctx.cast_weight = recipe, calibrating, w_fp8 is None
        ctx.dy_amax = dy_amax  # written in backward, so not a saved tensor, whose version would be checked
        x = delayed_cast(x_MK, E4M3, x_scale, x_amax, record=record, calibrating=calibrating)
        w = Scaled(cast_saturating(w_NK, w_scale, E4M3) if w_fp8 is None else w_fp8, w_scale)
        ctx.dy_scale = dy_scale  # likewise: the first backward of a run sets it
        ctx.save_for_backward(*x, w_NK if w_fp8 is None else w_fp8, w_scale)
        return gemm(x, w.t(), x_MK.dtype, fast=True, emulate=recipe.emulate)

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        x_data, x_scale, w_data, w_scale = ctx.saved_tensors
        emulate = ctx.recipe.emulate
        dx_MK = dw_NK = None
        dy = delayed_cast(
            dy_MN,
            E5M2,
            ctx.dy_scale,
            ctx.dy_amax,
            record=True,
            calibrating=ctx.calibrating,
            # Calibration is eager, where this takes several times the memory of the logits.
            dither=ctx.recipe.dither and not ctx.calibrating,
        )
        if ctx.needs_input_grad[0]:
            w = column_major(cast_saturating(w_data, w_scale, E4M3)) if ctx.cast_weight else w_data
            dx_MK = gemm(dy, Scaled(w, w_scale), dy_MN.dtype, fast=False, emulate=emulate)
        if ctx.needs_input_grad[1]:
            dw_NK = gemm(dy.t(), Scaled(x_data, x_scale), dy_MN.dtype, fast=False, emulate=emulate)
        return dx_MK, dw_NK, *(None,) * 9


def _saved(w_NK: Tensor) -> tuple[Tensor, ...]:
    """The tensors that stand for a weight between forward and backward: no second copy of it is kept."""
    if isinstance(w_NK, Float8TrainingTensor):
        return w_NK._data, w_NK._scale
    return (w_NK,)


def _weight(data: Tensor, scale: Tensor | None = None, *, dim: int | None, columns: bool = False) -> Scaled:
    return quantize(data, E4M3, dim=dim, columns=columns) if scale is None else Scaled(data, scale)


# Buffers that the FP8 state of a module lives in (see scaling.py). None until something fills them.
FP8_BUFFERS = (
    "fp8_weight",  # FP8 copy of the weight, in its layout
    "fp8_weight_scale",
    "fp8_input_scale",
    "fp8_input_amax",
    "fp8_grad_scale",
    "fp8_grad_amax",
)


class FP8Module(nn.Module):
    """One weight whose GEMMs run in FP8, and its FP8 state."""

    weight: Any  # nn.Parameter, or DTensor under FSDP2
    gemm_recipe: GemmRecipe
    fp8_delayed: bool
    fp8_calibrating: bool
    fp8_weight: Tensor | None
    fp8_weight_scale: Any  # Tensor, or None where each forward takes its own
    fp8_input_scale: Tensor
    fp8_input_amax: Tensor
    fp8_grad_scale: Tensor
    fp8_grad_amax: Tensor

    def init_fp8(self, recipe: GemmRecipe, *, delayed: bool) -> None:
        self.gemm_recipe, self.fp8_delayed, self.fp8_calibrating = recipe, delayed, False
        for name in FP8_BUFFERS:
            self.register_buffer(name, None, persistent=False)

    def fp8_operand(self, weight: Tensor, copy: Tensor | None) -> tuple[Tensor | None, Any]:
        """(`weight` in 8 bits: as it was gathered, or else `copy`; its scale). None: cast, or scale, in the forward."""
        if isinstance(weight, Float8TrainingTensor):  # gathered as FP8
            return weight._data, weight._scale
        if not self.fp8_delayed:
            return None, None
        scale = self.fp8_weight_scale
        if scale is None:  # see WeightsInForward
            scale = amax_to_scale(weight.detach().abs().amax(-1).amax(), E4M3)
        return copy, scale

    def extra_repr(self) -> str:
        recipe = self.gemm_recipe
        scaling = "delayed" if self.fp8_delayed else "rowwise" if recipe.rowwise else "tensorwise"
        own = f"fp8={scaling}{', emulated' if recipe.emulate else ''}"
        return ", ".join(filter(None, (super().extra_repr(), own)))

    def _apply(self, fn: Any, recurse: bool = True) -> FP8Module:
        """`.to(device)` moves the FP8 state too, `.to(dtype)` must not touch it: fp32 scales, FP8 bytes."""
        own = {name: buffer for name in FP8_BUFFERS if (buffer := self._buffers.get(name)) is not None}
        self._buffers.update(dict.fromkeys(own))
        super()._apply(fn, recurse)
        for name, buffer in own.items():
            device = fn(torch.empty(0, dtype=torch.uint8, device=buffer.device)).device
            self._buffers[name] = buffer.to(device)
        return self


class Converted(nn.Module):
    """A module whose class was swapped for one that computes in FP8."""

    def unconvert(self) -> None:
        """Become the plain module again."""
        raise NotImplementedError


class _FP8Layer(FP8Module, Converted):
    """What `FP8Linear` and `FP8Conv1D` share: compute dtype, padding, bias."""

    bias: Any

    def unconvert(self) -> None:
        for name in (*FP8_BUFFERS, "gemm_recipe", "fp8_delayed", "fp8_calibrating"):
            delattr(self, name)
        module = cast(nn.Module, self)
        module.__class__ = nn.Linear if isinstance(self, nn.Linear) else Conv1D

    def fp8_forward(self, input: Tensor, w_NK: Tensor, w_fp8: Tensor | None) -> Tensor:
        input = in_compute_dtype(input)
        x_MK = pad_rows(input.reshape(-1, input.shape[-1]))
        if self.fp8_delayed:
            y_MN = self._delayed(x_MK, w_NK, w_fp8)
        else:
            y_MN = cast(Tensor, _FP8Matmul.apply(x_MK, w_NK, self.gemm_recipe))
        output = unpad_rows(y_MN, input.shape[:-1])
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def _delayed(self, x_MK: Tensor, w_NK: Tensor, w_fp8: Tensor | None) -> Tensor:
        w_fp8, w_scale = self.fp8_operand(w_NK, w_fp8)
        y_MN = _FP8DelayedMatmul.apply(
            x_MK,
            w_NK,
            w_fp8,
            w_scale,
            self.fp8_input_scale,
            self.fp8_input_amax,
            self.fp8_grad_scale,
            self.fp8_grad_amax,
            self.gemm_recipe,
            torch.is_grad_enabled(),
            self.fp8_calibrating,
        )
        return cast(Tensor, y_MN)


class FP8Linear(_FP8Layer, nn.Linear):
    """An `nn.Linear` whose GEMMs run in FP8. Made by `convert_linear`, never constructed.

    Shapes: input (..., in_features), output (..., out_features), any number of rows, 0 included. Output dtype:
    the autocast dtype where autocast is on, otherwise the input's. Gradients come in the dtypes of input
    and weight.
    """

    def forward(self, input: Tensor) -> Tensor:
        return self.fp8_forward(input, self.weight, self.fp8_weight)


class FP8Conv1D(_FP8Layer, Conv1D):
    """The same for transformers' `Conv1D` (GPT-2), whose weight is stored (in, out)."""

    def forward(self, x: Tensor) -> Tensor:
        copy = self.fp8_weight
        return self.fp8_forward(x, self.weight.t(), None if copy is None else copy.t())


def in_compute_dtype(input: Tensor) -> Tensor:
    """`input` in the dtype of autocast, where that is on."""
    device_type = input.device.type
    if torch.is_autocast_enabled(device_type):
        return input.to(torch.get_autocast_dtype(device_type))
    return input


def pad_rows(x_MK: Tensor) -> Tensor:
    """Add zero rows up to a multiple of 16, at least 16. No copy where the shape is known to fit.

    The test adds no guard, so that a graph with a symbolic number of rows serves every length.
    """
    rows = x_MK.shape[0]
    if statically_known_true(rows > 0) and statically_known_true(rows % ALIGNMENT == 0):
        return x_MK
    return F.pad(x_MK, (0, 0, 0, ALIGNMENT if rows == 0 else -rows % ALIGNMENT))


def unpad_rows(y_MN: Tensor, leading: torch.Size) -> Tensor:
    """The first `leading.numel()` rows, in shape (*leading, N)."""
    return y_MN[: leading.numel()].reshape(*leading, y_MN.shape[-1])


def convert_linear(module: nn.Module, config: FP8Config, *, head: bool = False) -> None:
    """Turn an `nn.Linear` or `Conv1D` into its FP8 form in place: same object, same Parameters, same hooks.

    `head`: its outputs are logits.

    Raises:
        TypeError: `module` is of another class, a quantized or otherwise special subclass included.
    """
    # The compiler must not use the Triton code that corrupts FP8 stores (pytorch/ao#4652); torchao applies its
    # patch only inside its own conversion. Can go when torch 2.14-class builds are fixed.
    _patch_inductor_min_max_codegen()
    classes: dict[type, type[FP8Module]] = {nn.Linear: FP8Linear, Conv1D: FP8Conv1D}
    if type(module) not in classes:
        raise TypeError(f"only nn.Linear and Conv1D can be converted, got {type(module).__qualname__}")
    module.__class__ = classes[type(module)]
    converted = cast(FP8Module, module)
    converted.init_fp8(GemmRecipe.of(config, dither=head), delayed=config.recipe == "delayed")


def revert(model: nn.Module) -> nn.Module:
    """Turn every FP8 layer of `model` back into the linear or experts it was, in place; returns `model`.

    Parameters stay the same objects; the FP8 state is dropped.

    Raises:
        ValueError: the model is sharded, and its weights may be gathered as FP8.
    """
    if any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} is sharded, and only a whole model can be reverted. "
            "Save it and load the checkpoint: it holds plain layers."
        )
    for module in list(model.modules()):
        if isinstance(module, Converted):
            module.unconvert()
    return model


def fp8_modules(model: nn.Module) -> dict[str, FP8Module]:
    """The converted modules of `model`, by name, in order of definition."""
    return {name: module for name, module in model.named_modules() if isinstance(module, FP8Module)}
