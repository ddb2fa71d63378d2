"""Does it run, and what does it cost? FSDP1 / FSDP2 x FP8 x compile x CPU offload, one launch config at a time.

    for name in fsdp1 fsdp2 fsdp2_cpu_offload; do
        accelerate launch --config_file accelerate_configs/$name.yaml examples/matrix.py
    done
    accelerate launch --config_file accelerate_configs/single_gpu.yaml examples/matrix.py --offload_optimizer

The launch config says how the model is sharded and where its parameters live; each run trains all cells under it
(precisions, with and without compile), evaluating between steps, and prints a row a cell:

    step          median of the measured steps, milliseconds
    optimizer     of that, the optimizer step
    gather        GPU time of all-gathers and reduce-scatters in a step (they overlap with compute)
    transfer      GPU time of copies between host and GPU in a step (likewise)

With offloaded parameters the optimizer steps on the CPU: `--optim adamw_torch` shows it without the fused kernel.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from benchmark import SHAPES, RandomTokens
from hf_fp8 import FP8Trainer, FP8TrainingArguments
from runs import clean_start, environment, fp8_gpu, peak_gib, print_rows

CUDA = torch.cuda.is_available()
COLUMNS = ("step", "optimizer", "gather", "transfer")


@dataclass
class Arguments:
    """Which cells, and of what size."""

    # HfArgumentParser reads these annotations at run time and knows Optional, not `X | None`, on Python 3.10.
    precisions: list[str] = field(
        default_factory=lambda: ["bf16", "tensorwise", "delayed"],
        metadata={"help": "bf16, or an FP8 recipe."},
    )
    compile: list[str] = field(
        default_factory=lambda: ["no", "launch"],
        metadata={"help": "Compiler backends: no, the launch config's (launch), or one by its name."},
    )
    shape: str = field(default="llama3.2-1b", metadata={"help": f"Model: {', '.join(SHAPES)}."})
    layers: Optional[int] = field(default=None, metadata={"help": "Another number of blocks."})  # noqa: UP045
    batch: int = field(default=1, metadata={"help": "Sequences in a micro-batch of one process."})
    seq: int = field(default=4096, metadata={"help": "Tokens in a sequence."})
    optim: str = field(default="adamw_torch_fused", metadata={"help": "As Trainer's --optim."})
    offload_optimizer: bool = field(
        default=False, metadata={"help": "One GPU: torchao's offloaded optimizer."}
    )
    warmup: int = field(default=4, metadata={"help": "Steps before the measured ones."})
    steps: int = field(default=8, metadata={"help": "Measured steps."})
    output_dir: str = field(default="outputs/matrix", metadata={"help": "Folder of the JSON files."})


class Phases(TrainerCallback):
    """Times each step and its optimizer part, and profiles the last step on a GPU."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.device: dict[str, float] = {}
        self._start = self._optimizer = 0.0
        self._profile: profile | None = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._start = now()
        if CUDA and state.global_step == state.max_steps - 1:
            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._profile.start()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._optimizer = now()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        end = now()
        self.steps.append({"step": (end - self._start) * 1e3, "optimizer": (end - self._optimizer) * 1e3})
        if self._profile is not None:
            self._profile.stop()
            self.device = device_times(self._profile)


def now() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def device_times(recorded: profile) -> dict[str, float]:
    """Milliseconds of GPU time by kind of work."""
    kinds = {"gather": ("AllGather", "ReduceScatter"), "transfer": ("HtoD", "DtoH")}
    return {
        kind: sum(e.self_device_time_total for e in recorded.key_averages() if any(w in e.key for w in words))
        / 1e3
        for kind, words in kinds.items()
    }


def run_cell(precision: str, backend: str, args: Arguments) -> dict[str, Any]:
    """Train one cell: its losses, its evaluations and its times."""
    clean_start()
    launched = dict(os.environ)
    if backend != "launch":
        os.environ["ACCELERATE_DYNAMO_BACKEND"] = backend.upper()
    try:
        return train(precision, args)
    finally:
        os.environ.clear()
        os.environ.update(launched)


def train(precision: str, args: Arguments) -> dict[str, Any]:
    total = args.warmup + args.steps + 1  # the last one is profiled
    recipe = {} if precision == "bf16" else {"fp8_recipe": precision}
    training_args = FP8TrainingArguments(
        output_dir=args.output_dir,
        fp8=precision != "bf16",
        bf16=True,
        fp8_emulate=None if fp8_gpu() else True,
        fp8_convert_small=args.shape == "tiny",
        fp8_offload_optimizer=args.offload_optimizer,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=args.batch,
        train_sampling_strategy="sequential",
        max_steps=total,
        eval_strategy="steps",
        eval_steps=max(args.warmup // 2, 1),
        prediction_loss_only=True,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        max_grad_norm=0.0 if args.offload_optimizer else 1.0,
        optim=args.optim,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not CUDA,
        dataloader_pin_memory=CUDA,
        **recipe,
    )
    shape = SHAPES[args.shape]
    changed = {} if args.layers is None else {"num_hidden_layers": args.layers}
    config = type(shape).from_dict(shape.to_dict() | changed)
    torch.manual_seed(0)
    with torch.device("cuda" if CUDA else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        model.cpu()  # as a loaded checkpoint comes, and as sharding needs it where the model exceeds one GPU
    data = RandomTokens(config.vocab_size, args.seq)
    evaluation = torch.utils.data.Subset(data, range(args.batch * training_args.world_size))
    phases = Phases()
    trainer = FP8Trainer(
        model=model, args=training_args, train_dataset=data, eval_dataset=evaluation, callbacks=[phases]
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    logs = trainer.state.log_history
    measured = phases.steps[args.warmup : -1]
    return {
        "notes": trainer.fp8_report.notes,
        "converted": len(trainer.fp8_report.converted),
        "losses": [entry["loss"] for entry in logs if "loss" in entry],
        "evaluations": [entry["eval_loss"] for entry in logs if "eval_loss" in entry],
        "peak_gib": peak_gib(),
        **{column: statistics.median(step[column] for step in measured) for column in ("step", "optimizer")},
        **phases.device,
    }


def launch_name() -> str:
    """What this launch is, in a word a file name can hold."""
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return "unsharded"
    offload = os.environ.get("FSDP_OFFLOAD_PARAMS", "false").lower() == "true"
    return f"fsdp{os.environ.get('FSDP_VERSION', '1')}{'_cpu_offload' if offload else ''}"


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses(argv)
    cells = {
        f"{precision}, {'eager' if backend == 'no' else 'compiled'}": run_cell(precision, backend, args)
        for precision in args.precisions
        for backend in args.compile
    }
    if int(os.environ.get("RANK", "0")) == 0:
        name = launch_name()
        rows = [
            [
                cell,
                *(f"{found[column]:.1f}" if column in found else "-" for column in COLUMNS),
                "-" if found["peak_gib"] is None else f"{found['peak_gib']:.1f}",
                f"{found['losses'][0]:.3f} -> {found['losses'][-1]:.3f}",
            ]
            for cell, found in cells.items()
        ]
        print_rows([name, *(f"{column} ms" for column in COLUMNS), "peak GiB", "loss"], rows)
        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        record = {"environment": environment(), "arguments": vars(args), "cells": cells}
        (folder / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
    return cells


if __name__ == "__main__":
    main()
