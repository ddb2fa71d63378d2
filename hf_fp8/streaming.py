"""Whole high-precision weights of a model in training, one at a time, for whoever runs the model elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key, revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from hf_fp8.adapters import base_of, merged_layer, state_without_adapters
from hf_fp8.checkpoint import unwrap, whole_tensor
from hf_fp8.fsdp1 import TO_FSDP2, has_fsdp1
from hf_fp8.sharding import reshard


def iter_full_weights(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Stream the whole weights of a model in training, for example to an inference engine between RL steps.

    Yields (name, tensor) as `save_pretrained` would write them: tied weights once, expert weights in the layout
    of published checkpoints. Tensors are plain and high-precision, on the device of the model; they may be the
    model's own memory, so copy what you keep. Sharded models gather one parameter at a time, on every rank:
    iterate to the end on all of them.

    Of a model with PEFT adapters: the weights of the base model under its own names, with the active adapters (those
    that the next forward would use) merged into them in fp32, layer by layer. The model itself is left as it is.

    Args:
        model: plain, in DDP, or under FSDP2, also with FP8 gather or CPU offload.
        dtype: of the floating-point weights; None for the dtype of the parameters (fp32 masters under FSDP2).

    Raises:
        ValueError: adapters that cannot be merged into weights (prompt tuning), or a model under FSDP1.
    """
    for _, weights in weight_groups(model, dtype=dtype):
        yield from weights.items()


def weight_groups(
    model: nn.Module, *, dtype: torch.dtype | None = None
) -> Iterator[tuple[list[str], dict[str, Tensor]]]:
    """`iter_full_weights` in its steps: names in the model's state dict, and the file's tensors made of them."""
    model = unwrap(model)
    if has_fsdp1(model):
        raise ValueError(f"iter_full_weights cannot gather FSDP1's flat parameters one by one. {TO_FSDP2}")
    reshard(model)
    model = base_of(model)
    state = {n: (t, layer) for n, t, layer in state_without_adapters(model)}
    tensors = {name: tensor for name, (tensor, _) in state.items()}
    merged: dict[str, Tensor] = {}  # of one layer: its names follow each other

    def take(name: str) -> Tensor:
        tensor, layer = state[name]
        if layer is None:
            return whole_tensor(tensor, dtype)
        if name not in merged:
            values = merged_layer(layer, lambda parameter: whole_tensor(parameter, torch.float32))
            names = [n for n, (_, other) in state.items() if other is layer]
            merged.clear()
            merged.update(zip(names, values.values(), strict=True))
        value = merged.pop(name)
        return value.to(dtype or tensor.dtype) if value.is_floating_point() else value

    if not isinstance(model, PreTrainedModel):
        for name in tensors:
            yield [name], {name: take(name)}
        return
    # One stand-in for each tensor shows which names share it.
    stand_ins = {id(tensor): torch.empty(1) for tensor in tensors.values()}
    untied = remove_tied_weights_from_state_dict({n: stand_ins[id(t)] for n, t in tensors.items()}, model)
    ignored = set(model._keys_to_ignore_on_save or ())
    names = [name for name in untied if name not in ignored]
    for group in _conversion_groups(model, names):
        yield group, revert_weight_conversion(model, {n: take(n) for n in group})


def _conversion_groups(model: PreTrainedModel, names: list[str]) -> list[list[str]]:
    """The names that `revert_weight_conversion` must see together; nearly always one at a time."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    reverted = [conversion.reverse_transform() for conversion in reversed(conversions)]
    converters = [conversion for conversion in reverted if isinstance(conversion, WeightConverter)]
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(rename_source_key(name, [], converters, reverse=True)[0], []).append(name)
    return list(groups.values())
