"""The model that stands still beside the one in training: the reference model of TRL's trainers.

TRL loads it while the trainer is built and prepares it itself. Under FSDP2 it would shard it as one unit, which every
forward gathers whole, and with `fsdp_cpu_ram_efficient_loading` it would take the empty placeholders of the other
ranks for weights (TRL 1.16). So the model is sharded when the trainer first gets it, block by block and filled from
rank 0; TRL leaves a sharded model alone. It stays in high precision unless `fp8_ref_model` asks for FP8.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from accelerate import Accelerator
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from hf_fp8.config import FP8Config
from hf_fp8.selection import convert, select
from hf_fp8.sharding import set_forward_modes, shard_model


class ReferenceMixin:
    """Of a trainer: whatever is set as `ref_model` is prepared first."""

    args: Any
    accelerator: Any
    _fp8_ref_model: Any
    _fp8_prepared_ref: Any = None
    _fp8_ref_note = ""

    @property
    def ref_model(self) -> Any:
        return self._fp8_ref_model

    @ref_model.setter
    def ref_model(self, model: Any) -> None:
        self._fp8_ref_model = model
        # TRL sets it again after its own preparation. A trainer that has no accelerator yet will do so later.
        new = model is not self._fp8_prepared_ref and isinstance(model, PreTrainedModel)
        if new and "accelerator" in vars(self):
            self._fp8_prepared_ref = model
            precomputed = bool(vars(self.args).get("precompute_ref_log_probs"))
            config = replace(self.args.fp8_config, enabled=self.args.fp8_ref_model)
            self._fp8_ref_note = prepare_reference(model, self.accelerator, config, precomputed=precomputed)


def prepare_reference(
    model: PreTrainedModel, accelerator: Accelerator, config: FP8Config, *, precomputed: bool
) -> str:
    """Convert (if `config` is enabled) and, under FSDP2, shard a model that only runs forward, in place.

    There is no history without training: in place of the delayed recipe, the reference takes exact scales (tensorwise).

    Args:
        precomputed: TRL runs the model once, before training, and hashes its whole weights first.

    Returns the sentence for the report.

    Raises:
        ValueError: see `select`; also `precomputed` where only rank 0 has the weights.
        RuntimeError: the device has no FP8 and `emulate` is off.
    """
    note = "reference model in high precision"
    if config.enabled:
        config.check_hardware(accelerator.device)
        exact = replace(config, recipe="tensorwise") if config.recipe == "delayed" else config
        report = select(model, exact)
        convert(model, report, exact)
        note = (
            f"reference model in FP8 ({exact.recipe}): {len(report.converted)} of {len(report.rows)} layers"
        )
    if not accelerator.is_fsdp2 or isinstance(model, FSDPModule):
        return note
    if precomputed:
        if accelerator.state.fsdp_plugin.cpu_ram_efficient_loading:
            raise ValueError(
                "precompute_ref_log_probs needs the reference model's weights on every rank, and "
                "fsdp_cpu_ram_efficient_loading: true loads them on rank 0 only. Set it to false in the launch "
                "config, or drop precompute_ref_log_probs."
            )
        return note
    sharded = shard_model(model, accelerator, tail=False, forward_only=True)
    set_forward_modes(model, accelerator)
    return f"{note}, {sharded}"
