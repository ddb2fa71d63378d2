"""Mixture-of-experts GEMMs in FP8, for every model on transformers' experts interface.

Models of transformers 5 keep the weights of all experts of a layer in two 3-D parameters, and the class that holds them
says by `use_experts_implementation` how they lie there: gate and up projection side by side or interleaved, stored
(out, in) or (in, out), with biases or without, gated or not. From those facts, the module's own activation and nothing
else, `FP8Experts` computes what the interface's other implementations do.

It swaps the class of the module in place, as for linears: parameters stay the same objects under the same names. The
FP8 state of the two weights lives in two small modules beside them (`ExpertWeight`), which scaling, FP8 gather and
checkpoints treat like any other FP8 layer.

The weight that the router gives to an expert is applied between the two projections, not after them. That is the same
product, and the output of the second projection need neither be kept for backward nor scaled, so its gradient is the
gradient of the layer's output, cast once a token. With a norm after the experts the weight comes last, as in the model.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.float8._inductor_patch import _patch_inductor_min_max_codegen
from transformers.integrations import moe

from hf_fp8.casts import E4M3
from hf_fp8.config import FP8Config
from hf_fp8.grouped_gemm import GroupedGemm, GroupedMatmul, Routing, route
from hf_fp8.linear import ALIGNMENT, Converted, FP8Module, GemmRecipe, in_compute_dtype

# What `use_experts_implementation` sets on a module, and its implementations read.
_INTERFACE = {"config", "has_gate", "has_bias", "is_transposed", "is_concatenated"}


class ExpertWeight(FP8Module):
    """The FP8 state of one 3-D expert parameter, which stays with the experts module."""

    def __init__(self, experts: nn.Module, name: str, config: FP8Config) -> None:
        super().__init__()
        self.owner = (experts,)  # in a tuple: not a submodule of its own child
        self.parameter_name = name
        # The grouped kernel takes e4m3 only.
        self.init_fp8(GemmRecipe.of(config)._replace(grad_dtype=E4M3), delayed=config.recipe == "delayed")

    @property
    def weight(self) -> Any:
        return getattr(self.owner[0], self.parameter_name)  # FSDP1 puts a view there, which is no Parameter


class FP8Experts(Converted):
    """In front of an experts class of transformers. Made by `convert_experts`, never constructed.

    Shapes: hidden_states (T, hidden), top_k_index and top_k_weights (T, k) -> (T, hidden) in the dtype of
    hidden_states. T may be 0, and an expert may get any number of tokens.
    """

    fp8_up: ExpertWeight
    fp8_down: ExpertWeight
    plain_class: type[nn.Module]
    halves: bool
    """The gate is the interface's own, act(left half) * right half, so that nobody needs the halves as one tensor."""

    def unconvert(self) -> None:
        del self.fp8_up, self.fp8_down
        cast(nn.Module, self).__class__ = self.plain_class

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        module = cast(Any, self)
        # Also tells a compiler that hidden sizes differ by layer: torch 2.11's fails if it finds out inside `apply`.
        hidden = module.down_proj.shape[2 if module.is_transposed else 1]
        if hidden_states.shape[-1] != hidden:
            raise ValueError(
                f"{type(self).__name__} got hidden states of {hidden_states.shape[-1]} features, but its weights are "
                f"for {hidden}. Pass (tokens, {hidden})."
            )
        x_TH = in_compute_dtype(hidden_states)
        routing = route(top_k_index, module.down_proj.shape[0])
        weight_P = _by_row(top_k_weights, routing)
        halves = self.halves and module.is_concatenated and not module.has_bias
        up = self._grouped(self.fp8_up, x_TH, routing, from_tokens=True, halves=halves)
        if halves:
            gate, up = up
            inner = module.act_fn(gate) * up
        else:
            if module.has_bias:
                up = up + _bias_rows(self._bias(self.fp8_up), routing, up.dtype)
            inner = module._apply_gate(up) if module.has_gate else module.act_fn(up)
        if vars(self).get("has_post_expert_norm"):  # since transformers 5.20 or so
            return self._normed(inner, weight_P, routing).to(hidden_states.dtype)
        inner = (inner * weight_P[:, None]).to(up.dtype)
        out = self._grouped(self.fp8_down, inner, routing, to_tokens=True)
        if module.has_bias:
            bias = self._bias(self.fp8_down)
            by_expert = torch.zeros(len(x_TH), len(bias), dtype=top_k_weights.dtype, device=bias.device)
            by_expert = by_expert.scatter_add(1, top_k_index, top_k_weights)
            out = out + by_expert.to(out.dtype) @ bias.to(out.dtype)
        return out.to(hidden_states.dtype)

    def _normed(self, inner_PI: Tensor, weight_P: Tensor, routing: Routing) -> Tensor:
        module = cast(Any, self)
        out_PH = self._grouped(self.fp8_down, inner_PI, routing)
        if module.has_bias:
            out_PH = out_PH + _bias_rows(self._bias(self.fp8_down), routing, out_PH.dtype)
        out_PH = module.post_expert_norm(out_PH) * weight_P[:, None]
        return out_PH[routing.places].sum(1)

    def _bias(self, weight: ExpertWeight) -> Tensor:
        return getattr(self, f"{weight.parameter_name}_bias")

    def _grouped(
        self,
        weight: ExpertWeight,
        x: Tensor,
        routing: Routing,
        *,
        from_tokens: bool = False,
        to_tokens: bool = False,
        halves: bool = False,
    ) -> Any:
        w = getattr(self, weight.parameter_name)
        w_fp8, w_scale = weight.fp8_operand(w, weight.fp8_weight)
        delayed: tuple[Tensor | None, ...] = (None,) * 4
        if weight.fp8_delayed:
            delayed = (
                weight.fp8_input_scale,
                weight.fp8_input_amax,
                weight.fp8_grad_scale,
                weight.fp8_grad_amax,
            )
        gemm = GroupedGemm(
            weight.gemm_recipe, bool(cast(Any, self).is_transposed), from_tokens, to_tokens, halves
        )
        return GroupedMatmul.apply(
            x,
            w,
            w_fp8,
            w_scale,
            *delayed,
            *routing,
            gemm,
            torch.is_grad_enabled(),
            weight.fp8_calibrating,
        )


def _by_row(top_k_weights: Tensor, routing: Routing) -> Tensor:
    """(T, k) -> (P,): the router's weight of each row, 0 in the padding."""
    rows = len(routing.tokens)
    return top_k_weights.new_zeros(rows).scatter(0, routing.places.reshape(-1), top_k_weights.reshape(-1))


def _bias_rows(bias_EN: Tensor, routing: Routing, dtype: torch.dtype) -> Tensor:
    """(E, N) -> (P, N): the bias of each row's expert. A product, whose gradient is one, too, and not a scatter."""
    rows = torch.arange(len(routing.tokens), device=bias_EN.device)
    expert = (routing.offsets <= rows[:, None]).sum(1)
    return F.one_hot(expert, len(bias_EN)).to(dtype) @ bias_EN.to(dtype)


# --- conversion ---------------------------------------------------------------------------------------------


def expert_weights(module: nn.Module) -> dict[str, str]:
    """Role -> parameter name, of an experts module on the interface; {} for any other module."""
    if not vars(module).keys() >= _INTERFACE:
        return {}
    names = {"fp8_up": "gate_up_proj" if cast(Any, module).has_gate else "up_proj", "fp8_down": "down_proj"}
    return names if set(names.values()) <= module._parameters.keys() else {}


def why_not_convertible(module: nn.Module) -> str:
    """Why an experts module cannot run in FP8, empty if it can."""
    names = expert_weights(module)
    if not names:
        return "experts are not on transformers' experts interface"
    if any(size % ALIGNMENT for name in names.values() for size in getattr(module, name).shape[1:]):
        return f"dimensions are not multiples of {ALIGNMENT}"
    return ""


def why_not_on_this_device() -> str:
    """Why the GPU has no grouped FP8 GEMM, empty if it has, or if there is none to ask."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] in (9, 10):
        return ""
    return "grouped FP8 GEMMs need compute capability 9 or 10"


_CLASSES: dict[type, type] = {}  # one FP8 class for each experts class, so that layers share compiled graphs


def convert_experts(module: nn.Module, config: FP8Config) -> None:
    """Turn an experts module into its FP8 form in place: same object, same Parameters.

    Raises:
        TypeError: it is not convertible (see `why_not_convertible`).
    """
    reason = why_not_convertible(module)
    if reason:
        raise TypeError(f"{type(module).__qualname__} cannot run in FP8: {reason}")
    _patch_inductor_min_max_codegen()  # as in convert_linear
    for role, name in expert_weights(module).items():
        module.add_module(role, ExpertWeight(module, name, config))
    plain = type(module)
    if plain not in _CLASSES:
        gate = getattr(plain, "_apply_gate", None)
        plain_gate = bool(vars(module)["has_gate"]) and gate is getattr(moe, "_default_apply_gate", plain)
        members = {"plain_class": plain, "halves": plain_gate}
        _CLASSES[plain] = type(f"FP8{plain.__name__}", (FP8Experts, plain), members)
    module.__class__ = _CLASSES[plain]
