"""FSDP2 gathers weights as FP8, by two functions attached to the plain shards.

FSDP2 asks the local shard of a parameter for `fsdp_pre_all_gather` (what to send) and
`fsdp_post_all_gather` (what to make of what arrived). torchao attaches them to a tensor subclass around
the weight; that subclass then shows up in optimizers, ties and checkpoints and breaks them. FSDP2 looks for
the functions again at its lazy initialisation, so they can as well be set on the plain shard: everything
else in the program sees an ordinary fp32 tensor.

Each rank casts its rows with the scale of the *whole* weight, so the gathered bytes are one correctly scaled
FP8 weight. Scales and FP8 shards are made once after each change of the weights (`scaling.py`): one all-reduce and
one kernel per optimizer step, nothing before a gather.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from hf_fp8.casts import E4M3, cast_saturating
from hf_fp8.config import FP8Config
from hf_fp8.linear import fp8_modules
from hf_fp8.roles import read_by_adapters

# Attributes of a local shard.
_SCALE = "_hf_fp8_scale"  # 0-dim fp32 tensor
_COPY = "_hf_fp8_copy"  # the shard in FP8, or None


class WeightGather:
    """The FP8 all-gather of one sharded model: which weights take part, and the hooks on their shards.

    Raises:
        ValueError: `fp8_all_gather=on` and not one weight can be gathered as FP8.
    """

    def __init__(self, model: nn.Module, config: FP8Config, *, offload: bool) -> None:
        read = read_by_adapters(model)
        reasons = {
            name: _reason_not(m.weight, config, offload=offload, read=name in read)
            for name, m in fp8_modules(model).items()
        }
        self.modules = {name: m for name, m in fp8_modules(model).items() if not reasons[name]}
        self.skipped = {name: reason for name, reason in reasons.items() if reason}
        if config.all_gather == "on" and not self.modules:
            raise ValueError(
                f"fp8_all_gather=on, but no weight can be gathered as FP8: {', '.join(sorted(set(reasons.values())))}. "
                "Use fp8_all_gather=auto to gather those in bf16."
            )

    @property
    def note(self) -> str:
        """The sentence for the report."""
        if not self.skipped:
            return f"FP8 all-gather: all {len(self.modules)} converted weights"
        reasons = ", ".join(sorted(set(self.skipped.values())))
        return (
            f"FP8 all-gather: {len(self.modules)} of {len(self.modules) + len(self.skipped)} converted weights "
            f"(others in bf16: {reasons})"
        )

    def attach(self, weights: Mapping[str, Any], copies: Mapping[str, Tensor]) -> None:
        """Set the hooks on every shard that lacks them: at first, and after a checkpoint load replaced shards.

        `copies`: the shards in FP8, of the modules that keep them (`fp8_weight_cache`).
        """
        for name, module in self.modules.items():
            shard = weights[name]._local_tensor
            if getattr(shard, _SCALE, None) is not module.fp8_weight_scale:
                setattr(shard, _SCALE, module.fp8_weight_scale)
                setattr(shard, _COPY, copies.get(name))
                shard.fsdp_pre_all_gather = MethodType(_pre_all_gather, shard)
                shard.fsdp_post_all_gather = MethodType(_post_all_gather, shard)


def _reason_not(weight: nn.Parameter, config: FP8Config, *, offload: bool, read: bool) -> str:
    if config.all_gather == "off":
        return "fp8_all_gather=off"
    if config.recipe.startswith("rowwise"):
        return f"the {config.recipe} recipe scales by row"
    if offload:
        return "parameters live on CPU"
    if read:
        return "an adapter such as DoRA reads the weight itself"
    if not isinstance(weight, DTensor):
        return "not sharded"
    ranks = weight.device_mesh.size(weight.device_mesh.ndim - 1)
    if weight.shape[0] % ranks:
        # FSDP2 pads such shards at lazy initialisation and drops what was attached (pytorch/ao#3982).
        return f"rows do not divide by {ranks} ranks"
    return ""


def shard_group(model: nn.Module) -> dist.ProcessGroup:
    """The ranks that hold the parts of one weight: the last mesh axis, also under hybrid sharding."""
    mesh = next(p for p in model.parameters() if isinstance(p, DTensor)).device_mesh
    return mesh.get_group(mesh.ndim - 1)


def _pre_all_gather(shard: Tensor, mesh: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What this rank sends: its rows as FP8 bytes (viewed as uint8, which every backend can gather)."""
    scale, copy = getattr(shard, _SCALE), getattr(shard, _COPY)
    data = cast_saturating(shard, scale, E4M3) if copy is None else copy
    return (data.view(torch.uint8),), (scale,)


def _post_all_gather(
    shard: Tensor,
    outputs: tuple[Tensor, ...],
    metadata: tuple[Tensor, ...],
    dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """The whole weight, which reports `dtype` and holds FP8 bytes with their scale.

    With `out` (every gather but the first) the bytes are in place already.
    """
    (data,), (scale,) = outputs, metadata
    if out is not None:
        out._scale = scale  # type: ignore[attr-defined]
        return None
    data = data.view(E4M3)
    return Float8TrainingTensor(data, scale, dtype, None), (data,)
