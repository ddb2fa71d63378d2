"""`FP8Trainer`: the Hugging Face Trainer with FP8 under it.

All behaviour is in `FP8TrainerMixin`, which goes in front of any Trainer:
`class FP8SFTTrainer(FP8TrainerMixin, SFTTrainer)`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sized
from contextlib import nullcontext
from typing import Any, cast

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, save_fsdp_model, save_fsdp_optimizer
from peft import PeftModel
from torch import nn
from torch.distributed.fsdp import StateDictType
from torchao.optim import CPUOffloadOptimizer
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_pt_utils import remove_dummy_checkpoint
from transformers.trainer_utils import HubStrategy, rotate_checkpoints
from transformers.utils import SAFE_WEIGHTS_NAME

from hf_fp8.arguments import FP8ArgumentsMixin
from hf_fp8.callbacks import AmaxSyncCallback, GradUnrollCallback, NanFilterCallback, ThroughputCallback
from hf_fp8.checkpoint import (
    dtypes_of,
    from_rank_0,
    fsdp_format,
    full_state_dict,
    has_model_files,
    load_fsdp_weights,
    load_optimizer,
    load_scaling,
    load_weights,
    on_rank_0,
    reading_as,
    save_scaling,
    save_shards,
    tensors_of,
    unwrap,
)
from hf_fp8.completeness import begin_checkpoint, check_checkpoint, finish_checkpoint, newest_whole_checkpoint
from hf_fp8.fsdp1 import (
    check_resume_fsdp1,
    free_gathered,
    full_fsdp1_state_dict,
    is_fsdp1,
    save_fsdp1_masters,
)
from hf_fp8.masters import load_masters, save_masters, warn_of_rounded_masters
from hf_fp8.offload import (
    check_offload_optimizer,
    offload_optimizer,
    offloads_parameters,
    prepare_cpu_step,
)
from hf_fp8.plugin import FP8Plugin
from hf_fp8.reference import ReferenceMixin
from hf_fp8.report import ConversionReport
from hf_fp8.sharding import reshard


class FP8TrainerMixin(ReferenceMixin):
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
    lr_scheduler: Any
    callback_handler: Any
    state: Any
    fp8_plugin: FP8Plugin
    _fp8_dtypes: dict[str, torch.dtype]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.fp8_throughput = ThroughputCallback()
        self.fp8_nan_filter = NanFilterCallback()
        self._fp8_model: nn.Module | None = None
        self._fp8_checkpoint: str | None = None
        super().__init__(*args, **kwargs)
        self.fp8_grad_unroll = GradUnrollCallback(self.fp8_plugin)
        self.add_callback(self.fp8_throughput)  # type: ignore[attr-defined]
        # In front: a callback of the user may evaluate at the same event.
        self.callback_handler.callbacks[:0] = [
            AmaxSyncCallback(self.fp8_plugin),
            self.fp8_nan_filter,
            self.fp8_grad_unroll,
        ]
        self.fp8_plugin.tokens = _tokens_per_batch(self.args, getattr(self, "train_dataset", None))
        self.fp8_plugin.accumulation = self.args.gradient_accumulation_steps
        if self.args.n_gpu > 1:
            raise RuntimeError(
                f"{self.args.n_gpu} GPUs are visible to one process, which Trainer would serve with DataParallel. "
                "Start the script with accelerate launch, or make one GPU visible."
            )
        self._fp8_convert(self.model)

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
        if self.args.fp8_offload_optimizer:
            check_offload_optimizer(self.accelerator, cast(Any, self.args).max_grad_norm)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        built = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        if (
            self.args.dataloader_pin_memory
        ):  # otherwise each batch waits until the GPU has finished the last step
            built["dataloader_config"].non_blocking = True
        return {**built, **self.fp8_plugin.accelerator_kwargs()}

    # --- model ------------------------------------------------------------------------------------------

    def _fp8_prepare(self) -> None:
        """Convert (a model that `model_init` made anew), compile and shard the current model, once."""
        model = self.accelerator.unwrap_model(self.model)
        optimizers = [] if self.optimizer is None else [self.optimizer]
        self._fp8_convert(model)
        self.fp8_plugin.prepare_model(self.accelerator, model, *optimizers)

    def _fp8_convert(self, model: nn.Module) -> None:
        if model is self._fp8_model:
            return
        self._fp8_model, self._fp8_dtypes = model, dtypes_of(model)  # before masters are upcast
        self.fp8_plugin.convert(self.accelerator, model)
        if self._fp8_ref_note:
            self.fp8_report.notes.append(self._fp8_ref_note)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        self.fp8_grad_unroll.before_prediction_step()
        return super().prediction_step(*args, **kwargs)  # type: ignore[misc]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if isinstance(optimizer, AcceleratedOptimizer | CPUOffloadOptimizer):  # a second call of train()
            return optimizer
        if self.args.fp8_offload_optimizer:
            self.optimizer = offload_optimizer(optimizer)
        elif offloads_parameters(self.accelerator):
            prepare_cpu_step(optimizer)
        return self.optimizer

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Leave the clipping to the optimizer step, where that can do it and nobody looks at gradients before."""
        one_pass = self.fp8_plugin.one_pass
        seen = one_pass is None or one_pass.has_hooks_before_step()
        seen |= any(
            type(callback).on_pre_optimizer_step is not TrainerCallback.on_pre_optimizer_step
            for callback in self.callback_handler.callbacks
        )
        if one_pass is None or seen or self._has_mixed_mesh_grads(model):  # type: ignore[attr-defined]
            return super()._clip_grad_norm(model)  # type: ignore[misc]
        return one_pass.clip_in_step(model.parameters(), self.args.max_grad_norm)

    def _prepare_for_training(self, max_steps: int, loader: Any, resume_from_checkpoint: Any) -> Any:
        self._fp8_prepare()
        if is_fsdp1(self.accelerator):
            check_resume_fsdp1(
                self.model, resumes=bool(resume_from_checkpoint) or self.args.load_best_model_at_end
            )
        # An evaluation gathers parameters, and the optimizer must get the shards.
        reshard(self.model)
        free_gathered(self.model)
        if self.accelerator.distributed_type in (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
            _undo_evaluation_prepare(self.model)
        generate = vars(self.model).get("generate")
        prepared = super()._prepare_for_training(max_steps, loader, resume_from_checkpoint)  # type: ignore[misc]
        if generate is not None:  # under FSDP2 Trainer has wrapped it once more
            self.model.generate = generate
        self.fp8_plugin.check(self.optimizer)
        self.fp8_plugin.begin_calibration()
        return prepared

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._fp8_prepare()
        if self.accelerator.is_fsdp2 and self.model not in self.accelerator._models:
            # Already sharded; Trainer would call `prepare` without an optimizer, which FSDP2 refuses.
            self.accelerator._models.append(self.model)
        elif is_fsdp1(self.accelerator):
            # Trainer would evaluate a compiled model unsharded, and then never shard it.
            self.model = self.model_wrapped = self.accelerator.prepare_model(self.model)
        output = super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        reshard(self.model)
        return output

    # --- checkpoints ------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's. A checkpoint that was cut off is refused; `True` takes the newest whole one."""
        if resume_from_checkpoint is True:
            newest = from_rank_0(lambda: newest_whole_checkpoint(self.args.output_dir))
            resume_from_checkpoint = newest or True
        elif resume_from_checkpoint:
            path = os.fspath(resume_from_checkpoint)
            on_rank_0(lambda: check_checkpoint(path))
        output = super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        reshard(self.model)  # a callback may have run it
        return output

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a model that `from_pretrained` opens, under FSDP for every state dict type. Call on all ranks.

        Trainer's own call for a checkpoint under SHARDED_STATE_DICT writes everything but the weights: they are in the
        checkpoint's shards, which is what a user of that type asked for (no rank gathers the model at each save).
        """
        if self.accelerator.distributed_type != DistributedType.FSDP:
            return super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        folder = output_dir or self.args.output_dir
        in_shards = False
        if not self.accelerator.is_fsdp2:
            state = full_fsdp1_state_dict(self.model, self._fp8_dtypes)
        else:
            in_shards = _internal_call and folder == self._fp8_checkpoint and self._fp8_keeps_shards_only()
            keep = self.args.should_save
            state = {} if in_shards else full_state_dict(self.model, self._fp8_dtypes, keep=keep)
        if self.args.should_save:
            self._save(folder, state_dict=state)  # type: ignore[attr-defined]
            if in_shards:
                remove_dummy_checkpoint(True, folder, [SAFE_WEIGHTS_NAME])
            model = self.accelerator.unwrap_model(self.model)
            if isinstance(model, PreTrainedModel):
                # save_pretrained has noted the dtype of the masters.
                model.config.dtype = next(d for d in self._fp8_dtypes.values() if d.is_floating_point)
                model.config.save_pretrained(folder)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]

    def _fp8_keeps_shards_only(self) -> bool:
        """Adapters are small and wanted as a file of their own; what goes to the Hub must open there."""
        sharded = self.accelerator.state.fsdp_plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT
        pushed = self.args.push_to_hub and self.args.hub_strategy != HubStrategy.END
        return sharded and not pushed and not isinstance(self.model, PeftModel)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run_dir = self._get_output_dir(trial=trial)  # type: ignore[attr-defined]
        folder = os.path.join(run_dir, f"checkpoint-{self.state.global_step}")
        self._fp8_checkpoint = folder
        if self.args.should_save:
            begin_checkpoint(folder)
        self.accelerator.wait_for_everyone()
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
        finally:
            self.args.save_total_limit = limit
        self._fp8_finish_checkpoint(folder)
        if self.args.should_save:  # only now: an older checkpoint must not go before this one is whole
            rotate_checkpoints(run_dir, limit, self.state.best_model_checkpoint, use_mtime=True)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self._fp8_finish_checkpoint(checkpoint_folder)
        super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]

    def _fp8_finish_checkpoint(self, folder: str) -> None:
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            finish_checkpoint(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.accelerator.distributed_type == DistributedType.FSDP:
            self._fp8_save_fsdp_state(output_dir)
        else:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        if self.fp8_plugin.scaling is not None:
            save_scaling(self.fp8_plugin.scaling, output_dir, write=self.args.should_save)

    def _fp8_save_fsdp_state(self, folder: str) -> None:
        """As Trainer does, but for the weights: `save_model` may have written them, and their dtype is the model's."""
        plugin = self.accelerator.state.fsdp_plugin
        sharded = plugin.state_dict_type == StateDictType.SHARDED_STATE_DICT
        if self.accelerator.is_fsdp2 and isinstance(self.model, PreTrainedModel):
            if sharded:
                save_shards(self.model, self._fp8_dtypes, folder)
            save_masters(tensors_of(self.model), self._fp8_dtypes, folder)
        elif is_fsdp1(self.accelerator) and not sharded:
            save_fsdp1_masters(self.model, folder, write=self.args.should_save)
        else:
            save_fsdp_model(plugin, self.accelerator, self.model, folder, adapter_only=True)
        save_fsdp_optimizer(plugin, self.accelerator, self.optimizer, self.model, folder)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(folder, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder, target = resume_from_checkpoint, unwrap(self.model if model is None else model)
        stored = fsdp_format(folder)
        readable = stored if self.accelerator.is_fsdp2 else None
        if isinstance(target, PreTrainedModel) and readable is None and has_model_files(folder):
            load_weights(target, folder)
        elif stored and self.accelerator.distributed_type != DistributedType.FSDP:
            load_fsdp_weights(target, folder)  # Trainer refuses
        else:
            with reading_as(self.accelerator, readable):
                super()._load_from_checkpoint(folder, model)  # type: ignore[misc]
        if is_fsdp1(self.accelerator):
            warn_of_rounded_masters(folder)
        elif isinstance(target, PreTrainedModel):
            load_masters(tensors_of(target), folder)
        if self.fp8_plugin.weights is not None:
            self.fp8_plugin.weights.refresh()

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if isinstance(self.model, PreTrainedModel) and (fsdp_format(best) or has_model_files(best)):
            self._load_from_checkpoint(best)
        else:
            super()._load_best_model()  # type: ignore[misc]
            if self.fp8_plugin.weights is not None:
                self.fp8_plugin.weights.refresh()
        if self.fp8_plugin.scaling is not None:  # the scales of inputs, too, are those of the best model
            load_scaling(self.fp8_plugin.scaling, best)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        present = [
            name
            for name in ("optimizer_0", "optimizer.bin", "optimizer.pt")
            if os.path.exists(os.path.join(checkpoint, name))
        ]
        if present and (self.accelerator.is_fsdp2 or present != ["optimizer.pt"]):
            load_optimizer(self.model, self.optimizer, checkpoint)
            scheduler = torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True)
            self.lr_scheduler.load_state_dict(scheduler)
        else:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if self.fp8_plugin.scaling is not None:
            load_scaling(self.fp8_plugin.scaling, checkpoint)

    # --- logs -------------------------------------------------------------------------------------------

    def training_step(
        self, model: nn.Module, inputs: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        self.fp8_throughput.count(inputs, getattr(self.model, "main_input_name", "input_ids"))
        head = self.fp8_plugin.head
        with head.without_logits() if head and self._fp8_reads_only_the_loss() else nullcontext():
            loss = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        return self.fp8_nan_filter.filtered(loss, self)

    def _fp8_reads_only_the_loss(self) -> bool:
        """Trainer's own `compute_loss` does; one of a subclass, such as TRL's, may read logits."""
        return type(self).compute_loss is Trainer.compute_loss  # type: ignore[attr-defined]

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
