"""CPU offload: of everything under FSDP2, or of the optimizer alone on one GPU.

FSDP2 (`fsdp_offload_params: true`) keeps shards of parameters, gradients and optimizer state in host memory; a
block's shards go to the GPU to be gathered, in high precision, and its gradients come back. Gradient norms are
then reduced between CPU tensors, for which the process group needs gloo beside NCCL (pytorch/pytorch#148532).

On one GPU torchao's `CPUOffloadOptimizer` (`fp8_offload_optimizer`) moves only gradients and new weights: the
weights stay on the GPU, the optimizer state and a copy of the weights live in host memory, gradients travel
during backward.

Either way Adam runs on the CPU, where the fused implementation is vectorised and threaded, and `foreach` has
nothing to offer: see `examples/offload.py`. Threads it gets here: `accelerate launch` leaves each process one.
"""

from __future__ import annotations

import inspect
import logging
import os
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Replicate
from torchao.optim import CPUOffloadOptimizer

logger = logging.getLogger(__name__)

_ADAM = (torch.optim.Adam, torch.optim.AdamW)


# --- everything, under FSDP2 --------------------------------------------------------------------------------


def offloads_parameters(accelerator: Accelerator) -> bool:
    """Whether the launch config asks FSDP2 for CPU offload."""
    return accelerator.is_fsdp2 and isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)


def check_offload_backend(backends: str, device: torch.device) -> None:
    """Refuse a process group that cannot reduce CPU tensors.

    Args:
        backends: as `torch.distributed.get_backend_config()` gives them, for example `cpu:gloo,cuda:nccl`.
        device: where the model computes.

    Raises:
        ValueError: naming the remedy.
    """
    if "cpu" in {entry.split(":")[0] for entry in backends.split(",")}:
        return
    raise ValueError(
        f"Offloaded gradients live on the CPU, but the process group has only {backends!r}: gradient clipping would "
        "fail. Start with accelerate_configs/fsdp2_cpu_offload.yaml, whose fsdp_offload_params: true makes Accelerate "
        "set up both, or with the process group cpu:gloo,cuda:nccl: in Python, "
        f"InitProcessGroupKwargs(backend='cpu:gloo,{device.type}:nccl') for the first Accelerator of the process."
    )


def check_offload(accelerator: Accelerator) -> None:
    if offloads_parameters(accelerator):
        check_offload_backend(dist.get_backend_config(), accelerator.device)


def offload_policy(accelerator: Accelerator) -> Any:
    """FSDP2's policy. Pinned memory, which copies to a GPU want, does not exist without one."""
    policy = accelerator.state.fsdp_plugin.cpu_offload
    pinned = isinstance(policy, CPUOffloadPolicy) and policy.pin_memory
    return CPUOffloadPolicy(pin_memory=False) if pinned and accelerator.device.type == "cpu" else policy


def available_cores() -> int:
    """Cores that this process may run on, within the quota of its container (cgroup v2)."""
    cores, file = len(os.sched_getaffinity(0)), Path("/sys/fs/cgroup/cpu.max")
    quota, period = file.read_text().split() if file.is_file() else ("max", "1")
    return cores if quota == "max" else min(cores, max(1, int(quota) // int(period)))


def use_cores() -> None:
    """Let the optimizer use this process's share of the cores if the launcher left it a single thread.

    `accelerate launch` exports OMP_NUM_THREADS=1 unless `num_cpu_threads_per_process` says otherwise, torchrun does
    so for several processes.
    """
    share = available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if torch.get_num_threads() == 1 and share > 1:
        torch.set_num_threads(share)
        logger.info(
            "The optimizer steps on the CPU, now with %d threads (num_cpu_threads_per_process sets another number).",
            share,
        )


def prepare_cpu_step(optimizer: torch.optim.Optimizer) -> None:
    """Threads for an optimizer of offloaded parameters, and a warning if it is Adam and not fused.

    On CPU tensors torch's Adam goes through one parameter after another unless told `fused=True`.
    """
    use_cores()
    if isinstance(optimizer, _ADAM) and not all(group.get("fused") for group in optimizer.param_groups):
        logger.warning(
            "%s steps on offloaded parameters one by one: its fused implementation is faster on a CPU. "
            "Build it with fused=True, or pass --optim adamw_torch_fused.",
            type(optimizer).__name__,
        )


def clip_offloaded(parameters: list[nn.Parameter], max_norm: float, norm_type: float) -> Tensor | None:
    """`torch.nn.utils.clip_grad_norm_` for sharded gradients in host memory; None if these are none.

    torch takes the norm of a whole CPU tensor on one thread, which for a billion gradients costs more than Adam, and
    adds so many squares in fp32 that some are lost. By row it uses all threads. And nothing is scaled by 1.

    Returns:
        The norm before clipping: a 0-dim DTensor on the CPU, the same on every rank.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if norm_type == 0 or not all(isinstance(g, DTensor) and g.device.type == "cpu" for g in gradients):
        return None
    meshes = {g.device_mesh for g in cast(list[DTensor], gradients)}
    if len(meshes) != 1:
        return None
    mesh = meshes.pop()
    rows = [
        torch.linalg.vector_norm(g, norm_type, dim=tuple(range(1, g.ndim))) if g.ndim > 1 else g
        for g in gradients
    ]
    norm = cast(DTensor, torch.nn.utils.get_total_norm(rows, norm_type))
    norm = norm.redistribute(placements=[Replicate()] * mesh.ndim)
    if not norm.to_local() + 1e-6 <= max_norm:  # NaN is clipped, too: torch makes every gradient NaN then
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


# --- the optimizer, on one GPU ------------------------------------------------------------------------------


def check_offload_optimizer(accelerator: Accelerator, max_grad_norm: float) -> None:
    """Refuse `fp8_offload_optimizer` where torchao's optimizer cannot be right.

    Raises:
        ValueError: naming the remedy.
    """
    fsdp = accelerator.distributed_type == DistributedType.FSDP
    if accelerator.num_processes > 1 or fsdp:
        raise ValueError(
            f"fp8_offload_optimizer is for one GPU, but this run has {accelerator.num_processes} processes"
            f"{' under FSDP' if fsdp else ''}: gradients would leave for the CPU before they "
            "are reduced. Use accelerate_configs/fsdp2_cpu_offload.yaml there."
        )
    if max_grad_norm > 0:
        raise ValueError(
            "fp8_offload_optimizer sends each gradient to the CPU during backward, before its norm is known: clipping "
            f"would have no effect. Pass --max_grad_norm 0 (it is {max_grad_norm})."
        )
    if accelerator.device.type != "cuda":
        raise ValueError(
            f"fp8_offload_optimizer frees GPU memory, but training runs on {accelerator.device.type!r}. Drop the flag."
        )


def offload_optimizer(optimizer: torch.optim.Optimizer) -> CPUOffloadOptimizer:
    """torchao's offloaded form of an Adam that has not stepped yet, with its parameter groups, fused.

    Raises:
        ValueError: another optimizer.
    """
    use_cores()
    if type(optimizer) not in _ADAM:
        raise ValueError(
            f"fp8_offload_optimizer runs Adam on the CPU, got {type(optimizer).__name__}. "
            "Use --optim adamw_torch_fused, or drop the flag."
        )
    known = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}
    groups = [{**group, "fused": True, "foreach": False} for group in optimizer.param_groups]
    return CPUOffloadOptimizer(groups, type(optimizer), **{**options, "fused": True, "foreach": False})


def held_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters of the model that `optimizer` steps on."""
    if isinstance(optimizer, CPUOffloadOptimizer):
        small = [p for group in optimizer.d_param_groups for p in group["params"]]
        return [*optimizer.param_d2h_map, *small]
    return [p for group in optimizer.param_groups for p in group["params"]]
