"""FSDP1: Accelerate wraps the model in flat parameters; here is what FP8 needs around that.

Converted and compiled blocks are ordinary modules to FSDP1, and its gathered weights are whole high-precision
tensors, so that every recipe works: weights are cast in the forward, with the exact scale of what was gathered.
What FSDP1 cannot do is refused, with the way to FSDP2 (`accelerate to-fsdp2` translates a launch config).
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, extract_model_from_parallel
from accelerate.utils.constants import FSDP_MODEL_NAME
from peft import PeftModel
from peft.utils.other import fsdp_auto_wrap_policy
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    StateDictType,
)
from torch.distributed.fsdp._common_utils import FSDP_PREFIX

TO_FSDP2 = (
    "FSDP2 can: start with accelerate_configs/fsdp2.yaml, or translate your launch config with "
    "`accelerate to-fsdp2`."
)


def is_fsdp1(accelerator: Accelerator) -> bool:
    return accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2


def has_fsdp1(model: nn.Module) -> bool:
    """Whether `model`, or a module in it, is wrapped by FSDP1."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def check_fsdp1(accelerator: Accelerator) -> None:
    """Refuse what FSDP1 cannot do.

    Raises:
        ValueError: naming the remedy.
    """
    plugin = accelerator.state.fsdp_plugin
    if not plugin.use_orig_params:
        raise ValueError(
            "FSDP1 hides the parameters of converted layers in flat ones without fsdp_use_orig_params: true. "
            "Set it in the launch config (as accelerate_configs/fsdp1.yaml does), or use accelerate_configs/fsdp2.yaml."
        )
    if plugin.cpu_offload is not None and plugin.cpu_offload.offload_params:
        raise ValueError(
            "fsdp_offload_params: true under FSDP1 cannot accumulate gradients. FSDP2 can: start with "
            "accelerate_configs/fsdp2_cpu_offload.yaml, or translate your launch config with `accelerate to-fsdp2`."
        )


def check_compiled_fsdp1(accelerator: Accelerator) -> None:
    """Refuse compile where FSDP1 keeps sharded gradients between micro-batches (see `grad_unroll.py`).

    Raises:
        ValueError: naming the remedy.
    """
    if accelerator.gradient_state.plugin_kwargs.get("sync_each_batch"):
        raise ValueError(
            "FSDP1 cannot compile with sync_each_batch: a batch of a new shape would fail on the gradients of the "
            f"last one (pytorch/pytorch#139110). Drop sync_each_batch, or compile. {TO_FSDP2}"
        )


def check_resume_fsdp1(model: nn.Module, *, resumes: bool) -> None:
    """Refuse to load the checkpoint of a PEFT model, which Accelerate loads without its adapters, or not at all.

    Raises:
        ValueError: naming the remedy.
    """
    if resumes and isinstance(extract_model_from_parallel(model), PeftModel):
        raise ValueError(
            "The training state of a PEFT model under FSDP1 cannot be loaded again: drop resume_from_checkpoint and "
            f"load_best_model_at_end. {TO_FSDP2}"
        )


def set_fsdp1_options(accelerator: Accelerator) -> None:
    """bf16 compute, fp32 gradient reduction, buffers as they are.

    Accelerate's policy for bf16 casts every buffer too: rotary frequencies lose their precision, FP8 scales their
    meaning. A policy that a user set otherwise keeps its parameter and reduction dtypes.
    """
    plugin = accelerator.state.fsdp_plugin
    policy, bf16 = plugin.mixed_precision_policy, torch.bfloat16
    if policy is None or (policy.param_dtype, policy.reduce_dtype) == (bf16, bf16):
        policy = MixedPrecision(param_dtype=bf16, reduce_dtype=torch.float32)
    plugin.mixed_precision_policy = replace(policy, buffer_dtype=None)
    if accelerator.device.type == "cpu":
        # "Offloaded" there, moments of the optimizer would share one buffer, and the last one written would win.
        plugin.optim_state_dict_config.offload_to_cpu = False


def wrap_adapters(accelerator: Accelerator, model: nn.Module) -> None:
    """Give each adapter a flat parameter of its own, for all in one have one dtype. Trainer does so in training."""
    if isinstance(model, PeftModel):
        accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)


def free_gathered(model: nn.Module) -> None:
    """Let the next forward gather every parameter anew.

    FSDP1 keeps the root's parameters gathered after a forward. If no backward follows before the optimizer step,
    as in an evaluation between backward and step, the next forward would run on the old ones.
    """
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel) and module._is_root is not None:  # has run a forward
            handle = module._handle
            if handle is not None and handle.uses_sharded_strategy:
                handle.reshard(free_unsharded_flat_param=True)


def full_fsdp1_state_dict(model: nn.Module, dtypes: dict[str, torch.dtype]) -> dict[str, Tensor]:
    """The state dict of a wrapped model in CPU memory, in `dtypes`, on rank 0; {} on the others. Collective."""
    # Offloading a CPU tensor would copy nothing, and FSDP1 frees the memory.
    on_cpu = next(model.parameters()).device.type == "cpu"
    with FullyShardedDataParallel.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=not on_cpu, rank0_only=True)
    ):
        state = model.state_dict()
    return {name: tensor.to(dtypes.get(name, tensor.dtype)) for name, tensor in state.items()}


def save_fsdp1_masters(model: nn.Module, folder: str, *, write: bool) -> None:
    """Write the whole fp32 masters as Accelerate does and reads them; of a PEFT model what trains. Collective."""
    state = full_fsdp1_state_dict(model, {})
    if write:
        if isinstance(extract_model_from_parallel(model), PeftModel):
            trained = {
                name.replace(FSDP_PREFIX, "") for name, p in model.named_parameters() if p.requires_grad
            }
            state = {name: tensor for name, tensor in state.items() if name in trained}
        torch.save(state, os.path.join(folder, f"{FSDP_MODEL_NAME}.bin"))
