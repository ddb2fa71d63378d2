"""TrainerCallbacks of the package. `FP8TrainerMixin` adds the ones that a run needs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

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
