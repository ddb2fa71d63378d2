"""torch's fused Adam and AdamW with one pass over memory: clipping and the amaxes of the weights come along.

A step reads the parameter, its gradient and two moments, and writes all but the gradient. Around it, clipping reads
and writes every gradient, and the scale of an FP8 weight reads every weight once more. On an H200 torch's own kernel
also does not keep the memory busy with bf16 tensors: 14.4 ms for 2.8 billion parameters whose bytes need 9 (its scalar
arithmetic is in double precision).

`step_in_one_pass` swaps the class of an optimizer in place. Groups, state, checkpoints and hooks stay torch's; only
the update itself is another kernel, for the parameters that it can take, and torch's for all others. The arithmetic is
torch's in fp32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils._triton import has_triton

from hf_fp8.multi_cast import chunks_of
from hf_fp8.scaling import WeightScales, local

_HAS_KERNEL = torch.cuda.is_available() and has_triton()
_CHUNK = 32768  # elements that one program of the kernel updates
_BLOCK = 1024


class OnePass(torch.optim.Adam):
    """What the swapped classes have in common. Made by `step_in_one_pass`, never constructed."""

    fp8_scales: WeightScales | None
    """Gets the largest magnitude of each weight that a step has written."""
    fp8_clip: Tensor | None
    """0-dim fp32: the next step multiplies every gradient by it, then it is None again."""
    _fp8_written: set[Tensor]
    _fp8_amax: dict[Tensor, Tensor]

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> bool:
        """Called by `step` for what it is to update. What it finds empty on return is done already."""
        has_complex = bool(super()._init_group(group, *lists))
        parameters, gradients, firsts, seconds, _, steps = lists
        if not parameters:
            return has_complex
        rows = [
            _Row(p, *(local(t) for t in (p.detach(), *others)))
            for p, *others in zip(parameters, gradients, firsts, seconds, steps, strict=True)
        ]
        special = (
            getattr(self, "grad_scale", None) is not None or getattr(self, "found_inf", None) is not None
        )
        if special or not _is_plain(group) or not all(map(_fits, rows)):
            if self.fp8_clip is not None:
                torch._foreach_mul_(gradients, self.fp8_clip)
            return has_complex
        amax = self._fp8_amax if self.fp8_scales is not None else {}
        _update(rows, group, self.fp8_clip, amax)
        self._fp8_written.update(parameters)
        for each in lists:
            each.clear()
        return has_complex

    def clip_in_step(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Clip the norm of all gradients to `max_norm` within the next step, and leave the gradients alone.

        Returns:
            The norm before clipping, 0-dim.
        """
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        self.fp8_clip = (max_norm / (norm + 1e-6)).clamp(max=1.0).float()
        return norm

    def has_hooks_before_step(self) -> bool:
        """Whether somebody may look at gradients before a step does."""
        return bool(self._optimizer_step_pre_hooks or _global_optimizer_pre_hooks)

    def fp8_end_step(self) -> None:
        """Hand over the amaxes of a step that has written every weight."""
        self.fp8_clip = None
        if self.fp8_scales is not None and self._fp8_amax.keys() <= self._fp8_written:
            self.fp8_scales.measured = [self._fp8_amax[p] for p in self.fp8_scales.weights]
        self._fp8_written = set()


_CLASSES: dict[type, type[OnePass]] = {
    kind: type(f"OnePass{kind.__name__}", (OnePass, kind), {})
    for kind in (torch.optim.Adam, torch.optim.AdamW)
}


def step_in_one_pass(optimizer: torch.optim.Optimizer, scales: WeightScales | None) -> OnePass | None:
    """Swap the class of a fused Adam or AdamW of torch that steps on a GPU; None for any other.

    Args:
        scales: of weights; their amaxes are measured in the step if this optimizer holds all of them.
    """
    plain: Any = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper
    if isinstance(plain, OnePass):  # a second call of train()
        swapped = plain
    elif _HAS_KERNEL and type(plain) in _CLASSES and all(map(_on_gpu, plain.param_groups)):
        plain.__class__ = _CLASSES[type(plain)]
        swapped = plain
        swapped.register_step_post_hook(lambda *_: swapped.fp8_end_step())
    else:
        return None
    swapped.fp8_clip = swapped.fp8_scales = None
    swapped._fp8_written, swapped._fp8_amax = set(), {}
    held = {p for group in swapped.param_groups for p in group["params"]}
    weights = scales.weights if scales is not None else []
    if scales is not None and held.issuperset(weights):
        swapped.fp8_scales = scales
        values = torch.zeros(len(weights), device=scales.device)
        swapped._fp8_amax = dict(zip(weights, values.unbind(), strict=True))
    return swapped


class _Row(NamedTuple):
    """A parameter and this rank's part of what a step needs of it."""

    key: nn.Parameter
    parameter: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    step: Tensor


def _on_gpu(group: dict[str, Any]) -> bool:
    return bool(group["fused"]) and all(p.is_cuda for p in group["params"])


def _is_plain(group: dict[str, Any]) -> bool:
    unusual = ("amsgrad", "maximize", "differentiable", "capturable")
    betas = group["betas"]
    return not any(group[name] for name in unusual) and not any(isinstance(b, Tensor) for b in betas)


def _fits(row: _Row) -> bool:
    """Whether the kernel can update it: in one piece, of one dtype, at an address that allows 16-byte reads."""
    four = row[1:5]
    return row.parameter.dtype in (torch.float32, torch.bfloat16) and all(
        t.is_cuda and t.is_contiguous() and t.dtype == row.parameter.dtype and t.data_ptr() % 16 == 0
        for t in four
    )


def _update(
    rows: list[_Row], group: dict[str, Any], clip: Tensor | None, amaxes: dict[Tensor, Tensor]
) -> None:
    steps = [row.step for row in rows]
    torch._foreach_add_(steps, 1)
    by_dtype: dict[torch.dtype, list[_Row]] = defaultdict(list)
    for row in rows:
        if row.parameter.numel():
            by_dtype[row.parameter.dtype].append(row)
    for dtype, some in by_dtype.items():
        _launch(some, dtype, group, clip, amaxes)


def _launch(
    rows: list[_Row],
    dtype: torch.dtype,
    group: dict[str, Any],
    clip: Tensor | None,
    amaxes: dict[Tensor, Tensor],
) -> None:
    device = rows[0].parameter.device
    beta1, beta2 = group["betas"]
    step = torch.stack([row.step for row in rows]).double()
    lr = group["lr"].to(device) if isinstance(group["lr"], Tensor) else group["lr"]
    factors = torch.stack([lr / (1 - beta1**step), (1 - beta2**step).rsqrt()]).float()
    decay = lr * group["weight_decay"] if group["decoupled_weight_decay"] else group["weight_decay"]
    numbers = [
        (
            *(t.data_ptr() for t in row[1:5]),
            row.parameter.numel(),
            amaxes[row.key].data_ptr() if row.key in amaxes else 0,
        )
        for row in rows
    ]
    table = torch.tensor(numbers).pin_memory().to(device, non_blocking=True)
    owners, starts = chunks_of(tuple(row.parameter.numel() for row in rows), _CHUNK, device)
    measured = [amaxes[row.key] for row in rows if row.key in amaxes]
    if measured:  # biases and norms have none
        torch._foreach_zero_(measured)
    _adam_kernel[(len(owners),)](
        table,
        owners,
        starts,
        factors,
        clip if clip is not None else factors,
        len(rows),
        *map(float, (beta1, 1 - beta1, beta2, 1 - beta2, group["eps"], decay)),
        DTYPE=_DTYPES[dtype],
        DECOUPLED=group["decoupled_weight_decay"],
        CLIP=clip is not None,
        CHUNK=_CHUNK,
        BLOCK=_BLOCK,
        num_warps=4,
    )


if _HAS_KERNEL:
    import triton
    import triton.language as tl

    _DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}

    @triton.jit
    def _updated(
        p, g, m, v, clip, step_size, correction, beta1, rest1, beta2, rest2, eps, decay,
        DTYPE: tl.constexpr, DECOUPLED: tl.constexpr, CLIP: tl.constexpr
    ):  # fmt: skip
        p, g, m, v = p.to(tl.float32), g.to(tl.float32), m.to(tl.float32), v.to(tl.float32)
        if CLIP:
            g = (g * clip).to(DTYPE).to(tl.float32)  # as if it had been clipped in memory
        if DECOUPLED:
            p = p - decay * p
        else:
            g = g + decay * p
        m = beta1 * m + rest1 * g
        v = beta2 * v + rest2 * g * g
        p = p - step_size * m / (tl.sqrt(v) * correction + eps)
        return p.to(DTYPE), m.to(DTYPE), v.to(DTYPE)

    @triton.jit
    def _adam_kernel(
        table, owners, starts, factors, clip, rows, beta1, rest1, beta2, rest2, eps, decay,
        DTYPE: tl.constexpr, DECOUPLED: tl.constexpr, CLIP: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        row = tl.load(owners + tl.program_id(0))
        start = tl.multiple_of(tl.load(starts + tl.program_id(0)), CHUNK)
        at = table + row * 6
        parameter = tl.multiple_of(tl.load(at).to(tl.pointer_type(DTYPE)), 16)
        gradient = tl.multiple_of(tl.load(at + 1).to(tl.pointer_type(DTYPE)), 16)
        first = tl.multiple_of(tl.load(at + 2).to(tl.pointer_type(DTYPE)), 16)
        second = tl.multiple_of(tl.load(at + 3).to(tl.pointer_type(DTYPE)), 16)
        size = tl.load(at + 4)
        amax_address = tl.load(at + 5)
        step_size = tl.load(factors + row)
        correction = tl.load(factors + rows + row)
        scale = tl.load(clip).to(tl.float32)
        largest = tl.zeros([BLOCK], tl.float32)
        whole = start + CHUNK <= size  # without a mask the compiler reads and writes 16 bytes at once
        for offset in range(0, CHUNK, BLOCK):
            place = start + offset + tl.arange(0, BLOCK)
            if whole:
                p, m, v = _updated(
                    tl.load(parameter + place), tl.load(gradient + place),
                    tl.load(first + place), tl.load(second + place),
                    scale, step_size, correction, beta1, rest1, beta2, rest2, eps, decay, DTYPE, DECOUPLED, CLIP
                )  # fmt: skip
                tl.store(parameter + place, p)
                tl.store(first + place, m)
                tl.store(second + place, v)
                largest = tl.maximum(largest, tl.abs(p.to(tl.float32)))
            else:
                inside = place < size
                p, m, v = _updated(
                    tl.load(parameter + place, mask=inside, other=0.0),
                    tl.load(gradient + place, mask=inside, other=0.0),
                    tl.load(first + place, mask=inside, other=0.0),
                    tl.load(second + place, mask=inside, other=0.0),
                    scale, step_size, correction, beta1, rest1, beta2, rest2, eps, decay, DTYPE, DECOUPLED, CLIP
                )  # fmt: skip
                tl.store(parameter + place, p, mask=inside)
                tl.store(first + place, m, mask=inside)
                tl.store(second + place, v, mask=inside)
                largest = tl.maximum(largest, tl.abs(p.to(tl.float32)))
        if amax_address != 0:
            amax = amax_address.to(tl.pointer_type(tl.float32))
            tl.atomic_max(amax, tl.max(largest), sem="relaxed")
