"""The Accelerator that a plugin has adopted: what it must not do a second time, and the launches that it may be of."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from hf_fp8.config import FP8Config
from hf_fp8.offload import clip_offloaded, offloads_parameters

if TYPE_CHECKING:
    from hf_fp8.plugin import FP8Plugin


class FP8Accelerator(Accelerator):
    """An Accelerator that was handed to a plugin."""

    fp8_plugin: FP8Plugin

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        super().backward(loss, **kwargs)
        self.fp8_plugin.after_backward()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        parameters = list(parameters)
        norm = clip_offloaded(parameters, max_norm, norm_type) if offloads_parameters(self) else None
        return super().clip_grad_norm_(parameters, max_norm, norm_type) if norm is None else norm

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        prepared = super().prepare_model(model, *args, **kwargs)
        if isinstance(prepared, FullyShardedDataParallel):
            self.fp8_plugin.wrapped(prepared)
        return prepared

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """With FSDP2 weights that stay gathered from forward to backward, keep them for all micro-batches."""
        sharded: Any = model
        keep = (
            self.is_fsdp2
            and isinstance(model, FSDPModule)
            and not self.state.fsdp_plugin.reshard_after_forward
        )
        if keep:
            sharded.set_reshard_after_backward(False)
        try:
            with super().no_sync(model):
                yield
        finally:
            if keep:
                sharded.set_reshard_after_backward(True)

    # A model that the plugin has sharded is not prepared again.
    def _prepare_fsdp2(self, *args: Any) -> tuple[Any, ...]:
        if not any(isinstance(obj, FSDPModule) for obj in args):
            return super()._prepare_fsdp2(*args)
        prepared: list[Any] = []
        for first_pass in (True, False):  # schedulers come second: they need prepared optimizers
            prepared = [
                obj if isinstance(obj, nn.Module) else self._prepare_one(obj, first_pass=first_pass)
                for obj in (prepared or args)
            ]
        self._models += [obj for obj in prepared if isinstance(obj, nn.Module) and obj not in self._models]
        return tuple(prepared)


def check_launch(accelerator: Accelerator, config: FP8Config) -> None:
    """Refuse a launch config that this package cannot honour.

    Raises:
        ValueError: naming the remedy.
    """
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(
            f"hf_fp8 does not run under {accelerator.distributed_type.value}. "
            "Use accelerate_configs/fsdp2.yaml, which shards as far as ZeRO-3."
        )
    _check_fsdp_honoured(accelerator)
    if config.enabled and accelerator.mixed_precision != "bf16":
        raise ValueError(
            f"The Accelerator was built with mixed_precision={accelerator.mixed_precision!r}, but FP8 training "
            "computes in bf16 around the FP8 GEMMs. Build it with Accelerator(**plugin.accelerator_kwargs(), ...)."
        )
    parallel = accelerator.parallelism_config
    if parallel is not None and (parallel.tp_enabled or parallel.cp_enabled or parallel.sp_enabled):
        raise ValueError(
            "hf_fp8 shards over data-parallel ranks only. Set parallelism_config_tp_size, _cp_size and _sp_size "
            "to 1 in the launch config."
        )


def _check_fsdp_honoured(accelerator: Accelerator) -> None:
    """Accelerate falls back from FSDP to plain data parallel on CPU, without a word."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return
    if accelerator.distributed_type != DistributedType.FSDP:
        raise ValueError(
            f"The launch config asks for FSDP, but Accelerate runs this as {accelerator.distributed_type.value} on "
            f"{accelerator.device.type!r}: FSDP needs several processes with one accelerator each. "
            "Use accelerate_configs/ddp.yaml or cpu.yaml here."
        )
