"""PEFT adapters on a converted base: what merging them into the base does to its FP8 layers, and merging as one reads.

PEFT gives back the layer that it wrapped, and writes merged weights through `weight.data`, which leaves no
trace that `WeightScales` could see. It has no hook for either, so the methods of the model's tuner are
extended.

A rollout engine wants merged weights under the names of the base model while training goes on. PEFT can merge in place
only, which loses bits of a bf16 base, and not into shards: a layer is merged in a twin of its own, made of whole
fp32 tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn

from hf_fp8.linear import revert


def follow_adapters(model: nn.Module, refresh: Callable[[], None]) -> None:
    """Make `merge_and_unload` and `unload` return plain layers, and call `refresh` after adapters are merged in place.

    Nothing to do for a model without adapters.
    """
    for module in model.modules():
        if isinstance(module, BaseTuner):
            tuner = cast(Any, module)
            for name in ("merge_and_unload", "unload"):
                setattr(tuner, name, partial(_unload, getattr(tuner, name)))
            for name in ("merge_adapter", "unmerge_adapter"):
                setattr(tuner, name, partial(_merge, getattr(tuner, name), refresh))


def _unload(unload: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    return revert(unload(*args, **kwargs))


def _merge(merge: Callable[..., None], refresh: Callable[[], None], *args: Any, **kwargs: Any) -> None:
    merge(*args, **kwargs)
    refresh()


# --- merged weights, the model left alone -------------------------------------------------------------------


def base_of(model: nn.Module) -> nn.Module:
    """The model inside a `PeftModel`; any other model itself.

    Raises:
        ValueError: its adapters are prompts, which no weight can take in.
    """
    if not isinstance(model, PeftModel):
        return model
    if model.active_peft_config.is_prompt_learning:
        raise ValueError(
            f"{model.active_peft_config.peft_type.value} adapters are no weights and cannot be merged into any. "
            "Stream model.get_base_model() instead, and send the prompt on its own."
        )
    return model.get_base_model()


def state_without_adapters(
    module: nn.Module, prefix: str = ""
) -> Iterator[tuple[str, Tensor, nn.Module | None]]:
    """(name in the base model, the model's own tensor, the layer whose active adapters change it if any)."""
    if isinstance(module, ModulesToSaveWrapper):
        trained = module.active_adapters and not module.disable_adapters
        inner = module.modules_to_save[module.active_adapters[0]] if trained else module.original_module
        yield from state_without_adapters(inner, prefix)
    elif isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
        layer: Any = module
        for name, tensor in _base_layer(module).state_dict(keep_vars=True).items():
            yield prefix + name, tensor, None if layer.disable_adapters else module
    else:
        own = module._parameters | {
            name: buffer
            for name, buffer in module._buffers.items()
            if name not in module._non_persistent_buffers_set
        }
        for name, tensor in own.items():
            if tensor is not None:
                yield prefix + name, tensor, None
        for name, child in module.named_children():
            yield from state_without_adapters(child, f"{prefix}{name}.")


def merged_layer(layer: nn.Module, whole: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The base layer's state with the active adapters merged, by PEFT, in a twin of `whole(parameter)` each."""
    full = {id(p): nn.Parameter(whole(p), requires_grad=False) for p in layer.parameters()}
    twin = _twin(layer, full)
    for module in twin.modules():
        if isinstance(module, BaseTunerLayer):
            module.merge(safe_merge=True)  # unsafe, it would write into a tensor that may be the model's
    return {name: tensor.detach() for name, tensor in _base_layer(twin).state_dict(keep_vars=True).items()}


def _base_layer(layer: Any) -> nn.Module:
    tuner = layer if isinstance(layer, BaseTunerLayer) else layer.token_adapter
    return cast(nn.Module, tuner.get_base_layer())


def _twin(module: nn.Module, parameters: dict[int, nn.Parameter]) -> nn.Module:
    """A module of the same class and settings on other parameters. (`deepcopy` is closed to modules of FSDP2.)"""
    twin = copy.copy(module)
    own = {k: copy.copy(v) for k, v in vars(module).items() if isinstance(v, list | dict | set)}
    own["_parameters"] = {k: p if p is None else parameters[id(p)] for k, p in module._parameters.items()}
    own["_modules"] = {k: m if m is None else _twin(m, parameters) for k, m in module._modules.items()}
    vars(twin).update(own)
    return twin
