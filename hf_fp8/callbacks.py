"""TrainerCallbacks of the package. `FP8TrainerMixin` adds the ones that a run needs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_fp8.plugin import FP8Plugin


class ThroughputCallback(TrainerCallback):
    """Adds `tokens_per_second` (over all processes) to what Trainer logs.

    Counts input positions, padding included. The first step after `train()` is left out: it compiles.
    """

    def __init__(self) -> None:
        self._tokens = 0
        self._started: float | None = None

    def count(self, inputs: Any, main_input_name: str) -> None:
        """Count one micro-batch of this process. No device synchronisation.

        Prompts that a trainer has yet to complete (a list, from TRL's GRPO) are not counted.
        """
        main = inputs.get(main_input_name) if isinstance(inputs, Mapping) else None
        if main is not None and hasattr(main, "shape"):
            self._tokens += main.shape[:2].numel()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._started = None

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._started is None:
            self._restart()

    def rate(self, processes: int) -> float | None:
        """Tokens per second since the last call, None where nothing was counted yet."""
        if self._started is None or not self._tokens:
            return None
        rate = self._tokens * processes / (time.perf_counter() - self._started)
        self._restart()
        return rate

    def _restart(self) -> None:
        self._tokens, self._started = 0, time.perf_counter()


class NanFilterCallback(TrainerCallback):
    """Trainer's `logging_nan_inf_filter`, on the device.

    Trainer looks at the loss of each micro-batch on the host, so that the GPU runs dry before each optimizer step.
    """

    def __init__(self) -> None:
        self._done = (
            False  # this window's losses are filtered: Trainer's own filter is off until its optimizer step
        )

    def filtered(self, loss: Tensor, trainer: Any) -> Tensor:
        """`loss`, or if it is NaN or infinite the mean of those since the last log, as Trainer would have it."""
        total = getattr(trainer, "_tr_loss", None)
        if total is None or not (self._done or trainer.args.logging_nan_inf_filter):
            return loss
        self._done, trainer.args.logging_nan_inf_filter = True, False
        steps = 1 + trainer.state.global_step - trainer._globalstep_last_logged
        return torch.where(loss.isfinite(), loss, (total / steps).to(loss.device, loss.dtype))

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._done:
            self._done, args.logging_nan_inf_filter = False, True


class GradUnrollCallback(TrainerCallback):
    """FSDP1 with compile: drops stale gradients before each accumulation window and each validation step.

    Does nothing without FSDP1; why it is needed says `grad_unroll.py`.
    """

    def __init__(self, plugin: FP8Plugin) -> None:
        self.plugin = plugin

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.plugin.begin_window()

    def before_prediction_step(self) -> None:
        """Called by `FP8TrainerMixin`: transformers has an event after a validation step, and none before."""
        self.plugin.begin_evaluation()


class AmaxSyncCallback(TrainerCallback):
    """After each optimizer step: the one all-reduce that shares amaxes and sets all scales."""

    def __init__(self, plugin: FP8Plugin) -> None:
        self.plugin = plugin

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.plugin.after_optimizer_step()
