"""FSDP2 gathers weights as FP8, by two functions attached to the plain shards.

FSDP2 asks the local shard of a parameter for `fsdp_pre_all_gather` (what to send) and
`fsdp_post_all_gather` (what to make of what arrived). torchao attaches them to a tensor subclass around
the weight; that subclass then shows up in optimizers, ties and checkpoints and breaks them. FSDP2 looks for
the functions again at its lazy initialisation, so they can as well be set on the plain shard: everything
else in the program sees an ordinary fp32 tensor.

Each rank casts its rows with the scale of the *whole* weight, so the gathered bytes are one correctly scaled
FP8 weight. The scales of all weights are computed together, once after each change of the weights: one
all-reduce per optimizer step, none in the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchao.float8.float8_training_tensor import Float8TrainingTensor
from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

from hf_fp8.config import FP8Config
from hf_fp8.linear import E4M3, FP8Conv1D, FP8Linear

_SCALE = "_hf_fp8_scale"  # attribute of a local shard: 0-dim fp32 tensor


class WeightGather:
    """The FP8 all-gather of one sharded model.

    Raises:
        ValueError: `fp8_all_gather=on` and not one weight can be gathered as FP8.
    """

    def __init__(self, model: nn.Module, config: FP8Config, *, offload: bool) -> None:
        self.model = model
        self.modules: dict[str, nn.Module] = {}
        self.skipped: dict[str, str] = {}
        for name, module in model.named_modules():
            if isinstance(module, (FP8Linear, FP8Conv1D)):
                reason = _reason_not(module.weight, config, offload=offload)
                if reason:
                    self.skipped[name] = reason
                else:
                    self.modules[name] = module
        if config.all_gather == "on" and not self.modules:
            reasons = sorted(set(self.skipped.values()))
            raise ValueError(
                f"fp8_all_gather=on, but no weight can be gathered as FP8: {', '.join(reasons)}. "
                "Use fp8_all_gather=auto to gather those in bf16."
            )
        self._versions: tuple[int, ...] = ()
        self._scales: list[Tensor] = []
        if self.modules:
            model.register_forward_pre_hook(self._before_forward, prepend=True)

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

    @property
    def weights(self) -> list[DTensor]:
        return [module.weight for module in self.modules.values()]  # type: ignore[misc]

    def _before_forward(self, *_: Any) -> None:
        """Refresh when any weight has changed since: an optimizer step, a checkpoint load, an EMA copy."""
        weights = self.weights
        versions = tuple(w._version for w in weights)
        if versions != self._versions or not all(hasattr(w._local_tensor, _SCALE) for w in weights):
            self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Attach to every shard and recompute all scales, with one all-reduce. Collective: call on all ranks.

        Called by itself before a forward that follows a change of the weights. Call it by hand only after
        writing through `weight.data`, which leaves no trace.
        """
        weights = self.weights
        amax = shard_amax([w._local_tensor for w in weights])
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=_shard_group(weights[0]))
        fresh = amax_to_scale(amax, E4M3)
        if not self._scales:
            # Separate 0-dim tensors: views of one storage would alias inside a compiled graph.
            self._scales = [torch.empty((), device=amax.device) for _ in weights]
        torch._foreach_copy_(self._scales, list(fresh.unbind()))
        for weight, scale in zip(weights, self._scales, strict=True):
            _attach(weight._local_tensor, scale)
        self._versions = tuple(w._version for w in weights)


def shard_amax(shards: Sequence[Tensor]) -> Tensor:
    """Largest magnitude of each shard, fp32, shape (shards,). An empty shard counts as 0."""
    norms = torch._foreach_norm([s if s.numel() else s.new_zeros(1) for s in shards], torch.inf)
    return torch.stack(norms).float()


def _reason_not(weight: nn.Parameter, config: FP8Config, *, offload: bool) -> str:
    if config.all_gather == "off":
        return "fp8_all_gather=off"
    if config.recipe.startswith("rowwise"):
        return f"the {config.recipe} recipe scales by row"
    if offload:
        return "parameters live on CPU"
    if not isinstance(weight, DTensor):
        return "not sharded"
    ranks = weight.device_mesh.size(weight.device_mesh.ndim - 1)
    if weight.shape[0] % ranks:
        # FSDP2 pads such shards at lazy initialisation and drops what was attached (pytorch/ao#3982).
        return f"rows do not divide by {ranks} ranks"
    return ""


def _shard_group(weight: DTensor) -> dist.ProcessGroup:
    """The ranks that hold the parts of one weight: the last mesh axis, also under hybrid sharding."""
    return weight.device_mesh.get_group(weight.device_mesh.ndim - 1)


def _attach(shard: Tensor, scale: Tensor) -> None:
    setattr(shard, _SCALE, scale)
    shard.fsdp_pre_all_gather = MethodType(_pre_all_gather, shard)  # type: ignore[attr-defined]
    shard.fsdp_post_all_gather = MethodType(_post_all_gather, shard)  # type: ignore[attr-defined]


def _pre_all_gather(shard: Tensor, mesh: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What this rank sends: its rows as FP8 bytes (viewed as uint8, which every backend can gather)."""
    scale = getattr(shard, _SCALE)
    data = to_fp8_saturated(shard.float() * scale, E4M3)
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
