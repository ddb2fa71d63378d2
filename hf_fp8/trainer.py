"""`FP8Trainer`: the Hugging Face Trainer with FP8 under it.

All behaviour is in `FP8TrainerMixin`, which goes in front of any Trainer:
`class FP8SFTTrainer(FP8TrainerMixin, SFTTrainer)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import nn
from transformers import Trainer

from hf_fp8.arguments import FP8ArgumentsMixin
from hf_fp8.callbacks import AmaxSyncCallback, ThroughputCallback
from hf_fp8.checkpoint import load_scaling, save_scaling
from hf_fp8.plugin import FP8Plugin
from hf_fp8.selection import ConversionReport
from hf_fp8.sharding import reshard


class FP8TrainerMixin:
    """Puts FP8 under a Trainer class.

    The model is converted when the trainer is built, so that a run that cannot be honoured does not start;
    it is compiled and sharded before its first training or evaluation step.

    Raises:
        TypeError: `args` is not an `FP8TrainingArguments` (or a config class made with `FP8ArgumentsMixin`).
        ValueError, RuntimeError: see `FP8Plugin.prepare`.
    """

    args: Any
    model: Any
    accelerator: Any
    optimizer: Any
    fp8_plugin: FP8Plugin

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.fp8_throughput = ThroughputCallback()
        super().__init__(*args, **kwargs)
        for callback in (self.fp8_throughput, AmaxSyncCallback(self.fp8_plugin)):
            self.add_callback(callback)  # type: ignore[attr-defined]
        self.fp8_plugin.tokens = _tokens_per_batch(self.args, getattr(self, "train_dataset", None))
        if self.args.n_gpu > 1:
            raise RuntimeError(
                f"{self.args.n_gpu} GPUs are visible to one process, which Trainer would serve with DataParallel. "
                "Start the script with accelerate launch, or make one GPU visible."
            )
        self.fp8_plugin.convert(self.accelerator, self.model)

    @property
    def fp8_report(self) -> ConversionReport:
        """What was converted, and what else was done to the model."""
        assert self.fp8_plugin.report is not None
        return self.fp8_plugin.report

    # --- accelerator ------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        if not isinstance(self.args, FP8ArgumentsMixin):
            raise TypeError(
                f"{type(self).__name__} needs FP8TrainingArguments, got {type(self.args).__name__}. For another config "
                "class: `class MyFP8Config(FP8ArgumentsMixin, MyConfig)`."
            )
        self.fp8_plugin = FP8Plugin(
            self.args.fp8_config, torch_compile_regional=self.args.torch_compile_regional
        )
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.fp8_plugin.adopt(self.accelerator)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        built = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        return {**built, **self.fp8_plugin.accelerator_kwargs()}

    # --- model ------------------------------------------------------------------------------------------

    def _fp8_prepare(self) -> None:
        """Convert (a model that `model_init` made anew), compile and shard the current model, once."""
        model = self.accelerator.unwrap_model(self.model)
        optimizers = [] if self.optimizer is None else [self.optimizer]
        self.fp8_plugin.prepare_model(self.accelerator, model, *optimizers)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        self._fp8_prepare()
        reshard(self.model)  # an evaluation gathers parameters, and the optimizer must get the shards
        if self.accelerator.distributed_type in (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
            _undo_evaluation_prepare(self.model)
        prepared = super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]
        self.fp8_plugin.check(self.optimizer)
        self.fp8_plugin.begin_calibration()
        return prepared

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._fp8_prepare()
        if self.accelerator.is_fsdp2 and self.model not in self.accelerator._models:
            # Already sharded; Trainer would call `prepare` without an optimizer, which FSDP2 refuses.
            self.accelerator._models.append(self.model)
        return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    # --- checkpoints ------------------------------------------------------------------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        if self.fp8_plugin.scaling is not None:
            save_scaling(self.fp8_plugin.scaling, output_dir, write=self.args.should_save)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None and self.fp8_plugin.scaling is not None:
            load_scaling(self.fp8_plugin.scaling, checkpoint)

    # --- logs -------------------------------------------------------------------------------------------

    def training_step(
        self, model: nn.Module, inputs: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        self.fp8_throughput.count(inputs, getattr(self.model, "main_input_name", "input_ids"))
        return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        rate = self.fp8_throughput.rate(self.args.world_size) if "loss" in logs else None
        if rate is not None:
            logs = {**logs, "tokens_per_second": round(rate, 1)}
        if "loss" in logs and self.fp8_plugin.scaling is not None:
            logs = {**logs, **self.fp8_plugin.scaling.log_values()}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class FP8Trainer(FP8TrainerMixin, Trainer):
    """`transformers.Trainer` with FP8: same constructor, `args` an `FP8TrainingArguments`."""


def _undo_evaluation_prepare(model: nn.Module) -> None:
    """An evaluation before training marks the model as prepared, and Accelerate would then skip DDP."""
    if vars(model).pop("_is_accelerate_prepared", False):
        model.forward = vars(model).pop("_original_forward", model.forward)


def _tokens_per_batch(args: Any, dataset: Any) -> int | None:
    """Batch size times the mean length of up to eight examples; None for data that cannot be looked at."""
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__") or len(dataset) == 0:
        return None
    with torch.random.fork_rng():
        examples = [dataset[i] for i in range(0, len(dataset), max(1, len(dataset) // 8))][:8]
    lengths = [len(e["input_ids"]) for e in examples if isinstance(e, Mapping) and "input_ids" in e]
    return round(args.per_device_train_batch_size * sum(lengths) / len(lengths)) if lengths else None
