"""FSDP2: `fully_shard` in the right order, with every option taken from Accelerate's own plugin.

Accelerate's preparation is right for a plain decoder and wrong where parameters are tied, where a model's
block list holds an embedding (BERT, ViT), where activation checkpointing meets compile, where weights come from
rank 0 and where shards are empty. Here blocks are sharded first, then the untied input embedding, then the
tail (final norm and head), then the root, which also holds everything that is shared. Optimizer parameters
are mapped by identity, never by data pointer (0 for an empty shard).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp._common_utils import FSDP_PREFIX
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from hf_fp8.offload import held_parameters, offload_policy
from hf_fp8.regions import no_split_classes
from hf_fp8.roles import hf_roots


def set_mixed_precision_policy(accelerator: Accelerator) -> None:
    """bf16 compute, fp32 gradient reduction, outputs as the model returns them.

    Accelerate's own policy for bf16 also casts what the root returns, which rounds the loss to bf16
    (a grid of 1/64 near 5). A policy that a user set otherwise keeps its dtypes.
    """
    plugin = accelerator.state.fsdp_plugin
    policy = plugin.mixed_precision_policy
    bf16 = torch.bfloat16
    if policy is None or (policy.param_dtype, policy.reduce_dtype) == (bf16, bf16):
        policy = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=torch.float32)
    plugin.mixed_precision_policy = replace(policy, output_dtype=None)


def upcast_masters(model: nn.Module) -> str:
    """Trainable floating-point parameters to fp32, frozen ones as they are; returns the sentence for the report.

    The optimizer needs fp32 masters: at a small learning rate bf16 loses most updates
    (huggingface/accelerate#3979). Parameter objects stay the same.
    """
    low = [
        p
        for p in model.parameters()
        if p.requires_grad and p.is_floating_point() and p.dtype != torch.float32
    ]
    for parameter in low:
        parameter.data = parameter.data.float()
    kept = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if not p.requires_grad}
    frozen = f"; frozen parameters stay {', '.join(sorted(kept))}" if kept else ""
    return f"masters: trainable parameters in float32 ({len(low)} upcast){frozen}"


def shard_model(
    model: nn.Module, accelerator: Accelerator, *, tail: bool = True, forward_only: bool = False
) -> str:
    """Shard `model` in place over the mesh of `accelerator`; returns the sentence for the report.

    Args:
        tail: the final norm and the head are gathered when their turn comes. False: with the root, for a forward that
            reads the weight of the head without calling it.
        forward_only: no backward follows a forward, which then leaves nothing gathered behind.
    """
    plugin = accelerator.state.fsdp_plugin
    mesh = accelerator.torch_device_mesh
    options: dict[str, Any] = {
        "reshard_after_forward": forward_only or plugin.reshard_after_forward,
        "offload_policy": offload_policy(accelerator),
        "mp_policy": plugin.mixed_precision_policy,
        "mesh": mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)] if mesh is not None else None,
        "ignored_params": _ignored_parameters(model, plugin.ignored_modules),
    }
    units = wrap_units(model, plugin)
    embedding, ends = _ends(model, units)
    from_rank0 = bool(plugin.cpu_ram_efficient_loading)
    full = _move_to_meta(model) if from_rank0 else {}
    for unit in units:
        fully_shard(unit, **options)
    if embedding is not None:
        fully_shard(embedding, **options)
    if ends and tail:
        # Needed at the end of forward and at once again in backward: resharding between would be a wasted gather.
        fully_shard(ends, **{**options, "reshard_after_forward": False})
    # By default the root stays gathered for its backward.
    root_options = {k: v for k, v in options.items() if forward_only or k != "reshard_after_forward"}
    fully_shard(model, **root_options)
    if from_rank0:
        _load_from_rank0(model, full, accelerator)
    size = (
        "x".join(map(str, options["mesh"].shape))
        if options["mesh"] is not None
        else str(dist.get_world_size())
    )
    offload = ", parameters on CPU" if isinstance(plugin.cpu_offload, CPUOffloadPolicy) else ""
    loading = ", weights from rank 0" if from_rank0 else ""
    return f"FSDP2: {len(units)} blocks and the root sharded over {size} ranks{offload}{loading}"


def wrap_units(model: nn.Module, plugin: Any) -> list[nn.Module]:
    """The modules that get an FSDP group of their own, children before parents.

    Raises:
        ValueError: the launch config names a class that the model does not have.
    """
    policy = plugin.auto_wrap_policy
    function = policy.func if isinstance(policy, functools.partial) else policy
    bottom_up = list(reversed(list(model.modules())[1:]))
    if function is None:
        return []
    if function is transformer_auto_wrap_policy:
        asked = set(plugin.transformer_cls_names_to_wrap or ())
        names = asked or no_split_classes(model)
        units = [m for m in bottom_up if type(m).__name__ in names]
        missing = asked - {type(m).__name__ for m in units}
        if missing or not units:
            raise ValueError(
                f"fsdp_transformer_layer_cls_to_wrap names {sorted(missing or names)}, which {type(model).__name__} "
                "does not have. Name the class of its repeated blocks, or leave the key out to take the model's own."
            )
        return units
    if function is size_based_auto_wrap_policy:
        return _units_of_size(model, plugin.min_num_params)
    return [m for m in bottom_up if policy(module=m, recurse=False, nonwrapped_numel=_numel(m))]


def _units_of_size(model: nn.Module, least: int) -> list[nn.Module]:
    """Modules with at least `least` parameters that no unit below them holds already."""
    units: list[nn.Module] = []
    held: set[nn.Parameter] = set()
    for module in reversed(list(model.modules())[1:]):
        free = set(module.parameters()) - held
        if sum(p.numel() for p in free) >= least:
            units.append(module)
            held |= free
    return units


def _ends(model: nn.Module, units: list[nn.Module]) -> tuple[nn.Module | None, list[nn.Module]]:
    """The input embedding and the tail, each None / empty where shared or inside a unit already."""
    taken = {id(m) for unit in units for m in unit.modules()}
    shared = _shared_parameters(model)

    def free(module: nn.Module | None) -> bool:
        return (
            module is not None
            and id(module) not in taken
            and any(True for _ in module.parameters())
            and not shared & set(module.parameters())
        )

    roots = hf_roots(model)
    if len(roots) != 1:
        return None, []
    root = roots[0][1]
    embedding = root.get_input_embeddings()
    head = root.get_output_embeddings()
    norms = [m for name, m in root.base_model.named_children() if "norm" in type(m).__name__.lower()]
    tail = [m for m in (*norms[-1:], head) if free(m)] if free(head) else []
    return (embedding if free(embedding) else None), tail


def _shared_parameters(model: nn.Module) -> set[nn.Parameter]:
    every = [p for m in model.modules() for p in m.parameters(recurse=False)]
    return {p for p in every if sum(p is q for q in every) > 1} if len(every) != len(set(every)) else set()


def _ignored_parameters(model: nn.Module, ignored: Any) -> set[nn.Parameter] | None:
    if ignored is None:
        return None
    from accelerate.utils.fsdp_utils import get_parameters_from_modules

    return get_parameters_from_modules(ignored, model, torch.device("cpu"))


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# --- weights from rank 0 ------------------------------------------------------------------------------------


def _move_to_meta(model: nn.Module) -> dict[str, Any]:
    """Replace all parameters by meta tensors, ties kept; returns the state dict where it holds real weights.

    Placeholders on other ranks may be uninitialised memory (transformers#45050): they are dropped unread.
    """
    full = {k: v.detach() for k, v in model.state_dict().items()} if dist.get_rank() == 0 else {}
    memo: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in memo:
                empty = torch.empty_like(parameter, device="meta")
                memo[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module._parameters[name] = memo[parameter]
    return full


def _load_from_rank0(model: nn.Module, full: dict[str, Any], accelerator: Accelerator) -> None:
    """Fill the sharded meta model from rank 0's state dict, and every buffer from rank 0's."""
    offload = isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)
    device = torch.device("cpu") if offload else accelerator.device
    for module in model.modules():
        for parameter in list(module.parameters(recurse=False)):
            if parameter.is_meta:
                torch.utils.swap_tensors(
                    parameter,
                    nn.Parameter(
                        torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad
                    ),
                )
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            real = torch.empty_like(buffer, device=accelerator.device) if dist.get_rank() else buffer
            real = real.to(accelerator.device).contiguous()
            dist.broadcast(real, src=0)
            module._buffers[name] = real
    set_model_state_dict(
        model,
        full,
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=offload),
    )


# --- optimizer ----------------------------------------------------------------------------------------------


def named_parameter_objects(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def remap_optimizer(
    optimizer: torch.optim.Optimizer, before: dict[nn.Parameter, str], model: nn.Module
) -> None:
    """Point an optimizer built on the unsharded parameters at the sharded ones.

    Those that Accelerate has replaced already (since 1.16, on the meta device) stay.

    Raises:
        ValueError: the optimizer holds a tensor that is no parameter of the model, or has already taken steps.
    """
    if optimizer.state:
        raise ValueError(
            "The optimizer already has state for the unsharded parameters. Prepare the model before the first step, "
            "and load optimizer checkpoints after it."
        )
    after = {name.replace(FSDP_PREFIX, ""): parameter for name, parameter in model.named_parameters()}
    before = before | {parameter: name for name, parameter in after.items()}
    for group in optimizer.param_groups:
        unknown = [p for p in group["params"] if p not in before]
        if unknown:
            raise ValueError(
                f"The optimizer holds {len(unknown)} tensors that are no parameters of the model passed with it. "
                "Build the optimizer from model.parameters() after the last change to the model."
            )
        group["params"] = [after[before[p]] for p in group["params"]]


def reshard(model: nn.Module) -> None:
    """Put every parameter back to its shard: a forward leaves those of the tail and the root gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# They mix whole tensors with DTensors, or read a DTensor as if it were whole (torchao 0.18, transformers 5.24); all
# of bitsandbytes, too, which hands data pointers to its kernels.
_NOT_SHARDED = {("transformers", "Adafactor"), ("torchao", "Adam4bit"), ("torchao", "AdamW4bit")}


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Every trainable parameter is in `optimizer` at most once, none of its tensors is a stranger, and it can step.

    Raises:
        RuntimeError: naming the first parameter at fault.
        ValueError: the optimizer is known to fail on sharded parameters.
    """
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    kind = type(optimizer)
    library = kind.__module__.split(".")[0]
    if isinstance(model, FSDPModule) and (library, kind.__name__) in _NOT_SHARDED | {
        ("bitsandbytes", kind.__name__)
    }:
        raise ValueError(
            f"{kind.__name__} ({library}) cannot step on parameters that FSDP2 shards. Use --optim adamw_torch_fused, "
            "or adamw_torch_8bit to save memory, or train without sharding (accelerate_configs/ddp.yaml)."
        )
    if isinstance(model, FSDPModule) and library == "torchao" and _saves_whole_states():
        raise ValueError(
            f"A checkpoint of {kind.__name__} under fsdp_state_dict_type: FULL_STATE_DICT could be saved, but not "
            "loaded again. Use SHARDED_STATE_DICT."
        )
    names = named_parameter_objects(model)
    held = held_parameters(optimizer)
    strangers = sum(p not in names for p in held)
    if strangers or len(held) != len(set(held)):
        raise RuntimeError(
            f"The optimizer holds {len(held)} tensors, {strangers} of which are not parameters of the prepared model "
            f"and {len(held) - len(set(held))} of which repeat. Build it from model.parameters()."
        )
    missing = [name for p, name in names.items() if p.requires_grad and p not in set(held)]
    if missing and len(missing) < len(names) and isinstance(model, FSDPModule | FullyShardedDataParallel):
        raise RuntimeError(
            f"{len(missing)} trainable parameters are not in the optimizer and would never change, the first is "
            f"{missing[0]!r}. Give every parameter with requires_grad to the optimizer, or freeze it."
        )


def _saves_whole_states() -> bool:
    plugin: Any = AcceleratorState().fsdp_plugin
    return plugin.state_dict_type == StateDictType.FULL_STATE_DICT


class _Root:
    """In front of an FSDP2 root: its forward runs in the modes that one process or DDP would run it in."""

    autocast: Callable[[], AbstractContextManager[None]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as modes:
            if torch.is_inference_mode_enabled():
                modes.enter_context(torch.inference_mode(False))
                modes.enter_context(torch.no_grad())
            modes.enter_context(self.autocast())
            return super().__call__(*args, **kwargs)  # type: ignore[misc]


def set_forward_modes(model: nn.Module, accelerator: Accelerator) -> None:
    """Call `model`, an FSDP2 root, under bf16 autocast, and never in inference mode.

    Autocast computes losses and norms in fp32 where bf16 goes in. Without it a model that hands bf16 logits to
    `cross_entropy` (BERT, T5, ViT) returns a loss on the bf16 grid, 1/64 near 5.

    FSDP2 allocates what it gathers at the first forward and keeps it; made under `torch.inference_mode`, it would
    break every later training step (pytorch/pytorch#197327). Such a forward runs under `no_grad` instead.
    """
    low = accelerator.state.fsdp_plugin.mixed_precision_policy.param_dtype == torch.bfloat16
    modes = {"autocast": staticmethod(accelerator.autocast if low else nullcontext)}
    model.__class__ = type(type(model).__name__, (_Root, type(model)), modes)
