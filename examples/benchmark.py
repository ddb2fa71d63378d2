"""How fast is it? FP8 training against bf16 and against the other ways to FP8, all in one run.

    python examples/benchmark.py --shape llama3-8b-8l --batch 4 --seq 4096
    python examples/benchmark.py --shape llama3.2-1b --modes bf16 torchao ours:tensorwise loop:tensorwise
    python examples/benchmark.py --smoke                            # tiny, emulated, on a CPU
    accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 2 examples/benchmark.py \\
        --dtype float32 --modes bf16 accelerate-fp8 ours:delayed ours:delayed,fsdp_reshard_after_forward=false

Modes, each a full training step (forward, backward, clipping, fused AdamW) on random tokens:

    bf16               the stock Trainer, bf16, Accelerate's regional compile
    accelerate-fp8     the stock Trainer on Accelerate's own torchao path (launch config `fp8_config: backend: AO`)
    torchao[:recipe]   `convert_to_float8_training` by hand, compiled blocks, the stock Trainer
    ours[:recipe,...]  `FP8Trainer`; options as in ours:delayed,head=off
    loop[:recipe,...]  the same through `FP8Plugin` in a bare loop: what Trainer's own work costs on top

`--profile` adds where the GPU time goes: GEMMs, casts, attention, optimizer, and the delayed recipe's work after
the optimizer step, in three more steps that do not count.

Under `accelerate launch` every mode trains sharded; options that start with `fsdp_` are keys of the launch
config's `fsdp_config` for one mode. The table then also shows what FSDP2 sends from each GPU in a step (counted in a
step after the measured ones), and the largest peak memory of all GPUs; times are those of rank 0. Accelerate's FP8
needs `--dtype float32` there.

The modes take turns, `--rounds` times. The clock is read on the GPU at the end of each step and waited for
only around the measured window; what Trainer itself waits for (it looks at every loss) counts. Times depend
on the machine; compare the ratios.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
import traceback
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Optional

import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    HfArgumentParser,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PrinterCallback,
    Qwen3Config,
    Qwen3MoeConfig,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hf_fp8 import FP8Plugin, FP8Trainer, FP8TrainingArguments
from kernel_times import KernelTimes, print_profile
from launched import Traffic, is_main, join, launch_config, leave, of_all_ranks, sharded, world_size
from runs import Run, clean_start, environment, fp8_gpu, parse_runs, peak_gib, print_rows

_LLAMA3: dict[str, Any] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
}
SHAPES: dict[str, PreTrainedConfig] = {
    "llama3-8b-8l": LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=8, **_LLAMA3),
    "llama3-8b": LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, **_LLAMA3),
    "llama3.2-1b": LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, tie_word_embeddings=True, **_LLAMA3
    ),
    "qwen3-0.6b": Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
    ),
    # Two and four layers of the published shapes, which fit one GPU with their optimizer.
    "mixtral-8x7b-2l": MixtralConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        vocab_size=32000,
    ),
    "qwen3-30b-a3b-4l": Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        vocab_size=151936,
    ),
    "tiny": LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
    ),
}
TAIL = 2  # steps after the measured window, whose logged losses may wait for the GPU
PROFILED = 3  # steps under the profiler, the last ones
CUDA = torch.cuda.is_available()


@dataclass
class Arguments:
    """What is measured."""

    # HfArgumentParser reads these annotations at run time and knows Optional, not `X | None`, on Python 3.10.
    modes: list[str] = field(
        default_factory=lambda: ["bf16", "accelerate-fp8", "torchao", "ours", "loop"],
        metadata={"help": "Modes to compare, see above; without a recipe ours and loop take the default."},
    )
    shape: str = field(default="llama3-8b-8l", metadata={"help": f"Model: {', '.join(SHAPES)}."})
    model_name_or_path: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "A pretrained model instead of a named shape."}
    )
    vocab: Optional[int] = field(default=None, metadata={"help": "Another vocabulary size."})  # noqa: UP045
    dtype: str = field(default="bfloat16", metadata={"help": "Weights as loaded: bfloat16 or float32."})
    batch: int = field(default=4, metadata={"help": "Sequences in a micro-batch."})
    seq: int = field(default=4096, metadata={"help": "Tokens in a sequence."})
    accumulation: int = field(default=1, metadata={"help": "Micro-batches in a step."})
    activation_checkpointing: bool = field(default=False, metadata={"help": "Recompute blocks in backward."})
    torch_compile: bool = field(default=CUDA, metadata={"help": "Compile the blocks."})
    warmup: int = field(default=5, metadata={"help": "Steps before the measured ones."})
    steps: int = field(default=12, metadata={"help": "Measured steps of a mode in a round."})
    rounds: int = field(default=2, metadata={"help": "How often the modes take turns."})
    output: str = field(default="outputs/benchmark.json", metadata={"help": "JSON file of the results."})
    profile: bool = field(default=False, metadata={"help": "Show where the GPU time goes."})
    plot: bool = field(default=False, metadata={"help": "Draw a PNG beside the JSON file."})
    smoke: bool = field(default=False, metadata={"help": "Tiny model, few steps: a test of this script."})

    def __post_init__(self) -> None:
        if self.smoke:
            self.shape, self.batch, self.seq, self.torch_compile = "tiny", 2, 64, False
            self.warmup, self.steps, self.rounds = 1, 3, 1
        if min(self.warmup, self.steps, self.rounds) < 1:
            raise ValueError("--warmup, --steps and --rounds must be at least 1.")
        if self.profile and not CUDA:
            raise ValueError("--profile shows times of GPU kernels; it needs a GPU.")

    @property
    def total_steps(self) -> int:
        return self.warmup + self.steps + TAIL + PROFILED * self.profile


class RandomTokens(Dataset):
    """Endless random sequences, the same in every mode; 64 distinct ones."""

    def __init__(self, vocab: int, seq: int) -> None:
        self.ids = torch.randint(0, vocab, (64, seq), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.ids[index % 64]
        return {"input_ids": ids, "labels": ids}


class Clock:
    """Times of step ends: events on the GPU's own timeline, so that reading them costs no synchronisation."""

    def __init__(self, args: Arguments) -> None:
        self.warmup, self.steps, self.last = args.warmup, args.steps, args.total_steps
        self.kernels = KernelTimes() if args.profile else None
        self.traffic = Traffic() if sharded() else None
        """Of the first step after the measured ones."""
        self._counting, self._profiling = ExitStack(), ExitStack()
        self.marks: list[Any] = []
        self.started = time.perf_counter()
        self.startup = 0.0
        """Seconds of the first step: compilation, calibration and all."""

    def step_end(self, step: int) -> None:
        """Call at the end of optimizer step `step`, counted from 1."""
        if step in (1, self.warmup, self.warmup + self.steps) and CUDA:
            torch.cuda.synchronize()
        if step == 1:
            self.startup = time.perf_counter() - self.started
        if self.warmup <= step <= self.warmup + self.steps:
            self.marks.append(self._now())
        if self.traffic is not None and step == self.warmup + self.steps:
            self._counting.enter_context(self.traffic.counted())
        if step == self.warmup + self.steps + 1:
            self._counting.close()
        if self.kernels is not None and step == self.last - PROFILED:
            self._profiling.enter_context(self.kernels.measured(PROFILED))
        if step == self.last:
            self._profiling.close()

    def milliseconds(self) -> list[float]:
        """Of each measured step."""
        return [a.elapsed_time(b) if CUDA else (b - a) * 1e3 for a, b in pairwise(self.marks)]

    def _now(self) -> Any:
        if not CUDA:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class ClockCallback(TrainerCallback):
    """Runs a `Clock` under Trainer, and logs the loss of the first and of the last step only."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.clock.started = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.clock.step_end(state.global_step)
        control.should_log = state.global_step in (1, state.max_steps - 1, state.max_steps)


def make_model(args: Arguments) -> PreTrainedModel:
    """The model on the training device, weights in `args.dtype`."""
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    if args.model_name_or_path:
        return AutoModelForCausalLM.from_pretrained(
            args.model_name_or_path, dtype=dtype, device_map={"": 0} if CUDA else None
        )
    changed = {"use_cache": False, "max_position_embeddings": max(args.seq, 2048)}
    if args.vocab:
        changed["vocab_size"] = args.vocab
    config = type(SHAPES[args.shape]).from_dict(SHAPES[args.shape].to_dict() | changed)
    with torch.device("cuda" if CUDA else "cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def training_values(args: Arguments) -> dict[str, Any]:
    """Arguments that every Trainer mode shares."""
    return {
        "output_dir": "outputs/benchmark",
        "per_device_train_batch_size": args.batch,
        "gradient_accumulation_steps": args.accumulation,
        "train_sampling_strategy": "sequential",
        "max_steps": args.total_steps,
        "learning_rate": 1e-5,
        "optim": "adamw_torch_fused",
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": not CUDA,
        "dataloader_pin_memory": CUDA,
        # Called activation_checkpointing from transformers 5.24 on; the old name goes in version 6.
        **({"gradient_checkpointing": True} if args.activation_checkpointing else {}),
    }


def measure_trainer(trainer: Trainer, args: Arguments) -> dict[str, Any]:
    clock = Clock(args)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(ClockCallback(clock))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return result(clock, losses[0], losses[-1])


def result(clock: Clock, loss_first: float, loss_last: float) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if clock.kernels is not None:
        extra |= {"kernel_ms": clock.kernels.by_kind, "after_step_ms": clock.kernels.by_label}
    if clock.traffic is not None:
        extra |= {"gathered_bytes": clock.traffic.gathered, "reduced_bytes": clock.traffic.reduced}
    return extra | {
        "step_ms": clock.milliseconds(),
        "startup_s": clock.startup,
        "peak_gib": peak_gib(),
        "loss_first": loss_first,
        "loss_last": loss_last,
    }


def measure_bf16(run: Run, args: Arguments, data: Dataset) -> dict[str, Any]:
    with launch_config(fp8=False, compiled=args.torch_compile, options=run.launch):
        training_args = TrainingArguments(
            **training_values(args), bf16=True, torch_compile=args.torch_compile
        )
        trainer = Trainer(model=make_model(args), args=training_args, train_dataset=data)
        return measure_trainer(trainer, args) | {"converted": 0}


def measure_accelerate(run: Run, args: Arguments, data: Dataset) -> dict[str, Any]:
    fp8 = {"MIXED_PRECISION": "fp8", "FP8_BACKEND": "AO"}
    with launch_config(fp8=True, compiled=args.torch_compile, options=run.launch, **fp8):
        training_args = TrainingArguments(**training_values(args), torch_compile=args.torch_compile)
        trainer = Trainer(model=make_model(args), args=training_args, train_dataset=data)
        measured = measure_trainer(trainer, args)
        return measured | {"converted": count(trainer.model_wrapped, Float8Linear)}


def measure_torchao(run: Run, args: Arguments, data: Dataset) -> dict[str, Any]:
    model = make_model(args)
    config = Float8LinearConfig.from_recipe_name(run.recipe or "tensorwise")
    if not fp8_gpu():
        object.__setattr__(config, "emulate", True)
    head = model.get_output_embeddings()
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: module is not head)
    if args.torch_compile:
        for block in model.model.layers:
            block.compile()
    with launch_config(fp8=False, compiled=False, options=run.launch):
        training_args = TrainingArguments(**training_values(args), bf16=True)
        trainer = Trainer(model=model, args=training_args, train_dataset=data)
        return measure_trainer(trainer, args) | {"converted": count(model, Float8Linear)}


def our_arguments(run: Run, args: Arguments) -> FP8TrainingArguments:
    values = training_values(args) | {"fp8_emulate": not fp8_gpu(), "torch_compile": args.torch_compile}
    if args.shape == "tiny":
        values["fp8_convert_small"] = True
    if run.recipe:
        values["fp8_recipe"] = run.recipe
    return FP8TrainingArguments(**values | run.options)


def measure_ours(run: Run, args: Arguments, data: Dataset) -> dict[str, Any]:
    with launch_config(fp8=True, compiled=args.torch_compile, options=run.launch):
        trainer = FP8Trainer(model=make_model(args), args=our_arguments(run, args), train_dataset=data)
        measured = measure_trainer(trainer, args)
    report = trainer.fp8_report
    return measured | {"converted": len(report.converted), "fp8_flop_share": report.flop_coverage}


def measure_loop(run: Run, args: Arguments, data: Dataset) -> dict[str, Any]:
    with launch_config(fp8=True, compiled=args.torch_compile, options=run.launch):
        return bare_loop(run, args, data)


def bare_loop(run: Run, args: Arguments, data: Dataset) -> dict[str, Any]:
    """The same model and the same work as `measure_ours`, without Trainer."""
    training_args = our_arguments(run, args)
    model = make_model(args)
    if args.activation_checkpointing:
        model.gradient_checkpointing_enable()
    plugin = FP8Plugin(training_args.fp8_config, tokens=args.batch * args.seq)
    dynamo = TorchDynamoPlugin(backend="inductor" if args.torch_compile else "no")
    accelerator = Accelerator(
        cpu=not CUDA,
        gradient_accumulation_steps=args.accumulation,
        dynamo_plugin=dynamo,
        **plugin.accelerator_kwargs(),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=True)
    loader = DataLoader(data, batch_size=args.batch, pin_memory=CUDA)
    model.train()
    clock = Clock(args)
    model, optimizer, loader = plugin.prepare(accelerator, model, optimizer, loader)
    first = last = torch.zeros(())
    step = 0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            clock.step_end(step)
            first, last = (loss.detach() if step == 1 else first), loss.detach()
        if step == args.total_steps:
            break
    assert plugin.report is not None
    losses = (statistics.fmean(of_all_ranks(loss.item())) for loss in (first, last))
    measured = result(clock, *losses)
    return measured | {
        "converted": len(plugin.report.converted),
        "fp8_flop_share": plugin.report.flop_coverage,
    }


def count(model: nn.Module, kind: type[nn.Module]) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


MEASURES = {
    "bf16": measure_bf16,
    "accelerate-fp8": measure_accelerate,
    "torchao": measure_torchao,
    "ours": measure_ours,
    "loop": measure_loop,
}


def measured(run: Run, args: Arguments, data: Dataset) -> dict[str, Any]:
    """One mode in one round. A baseline that crashes is a result: it has an `error`, and the exit status is 1."""
    clean_start()
    try:
        found = MEASURES[run.kind](run, args, data)
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    everywhere = of_all_ranks(found)
    failed = [(rank, each) for rank, each in enumerate(everywhere) if "error" in each]
    if failed:
        where = "" if len(failed) == len(everywhere) else f"rank {failed[0][0]}: "
        return {"error": where + failed[0][1]["error"]}
    peaks = [each["peak_gib"] for each in everywhere if each["peak_gib"] is not None]
    return everywhere[0] | {"peak_gib": max(peaks, default=None)}


def summarise(rounds: list[dict[str, Any]], args: Arguments) -> dict[str, Any]:
    """One mode over its rounds: medians of time, the largest memory, the first round's start-up and losses."""
    median = statistics.median(ms for done in rounds for ms in done["step_ms"])
    peaks = [done["peak_gib"] for done in rounds if done["peak_gib"] is not None]
    return rounds[0] | {
        "step_ms": [ms for done in rounds for ms in done["step_ms"]],
        "median_ms": median,
        "median_ms_by_round": [statistics.median(done["step_ms"]) for done in rounds],
        "tokens_per_second": args.batch * args.seq * args.accumulation * world_size() / median * 1e3,
        "peak_gib": max(peaks, default=None),
    }


def compare(
    rounds: dict[str, list[dict[str, Any]]], errors: dict[str, str], args: Arguments
) -> dict[str, dict[str, Any]]:
    """The summaries of the modes measured so far, with their speed relative to bf16."""
    modes: dict[str, dict[str, Any]] = {
        name: {"error": errors[name]} if name in errors else summarise(done, args)
        for name, done in rounds.items()
        if done or name in errors
    }
    bf16 = modes.get("bf16", {}).get("median_ms")
    for mode in modes.values():
        if bf16 and "median_ms" in mode:
            mode["speedup"] = bf16 / mode["median_ms"]
    return modes


def print_table(modes: dict[str, dict[str, Any]]) -> None:
    header = ("mode", "ms/step", "tokens/s", "vs bf16", "peak GiB", "start s", "loss", "layers in FP8")
    if sharded():
        header += ("MB gathered", "MB reduced")
    rows = []
    for name, mode in modes.items():
        if "error" in mode:
            rows.append((name, "failed", *["-"] * (len(header) - 2)))
            continue
        ratio = f"{mode['speedup']:.3f}x" if "speedup" in mode else "-"
        peak = "-" if mode["peak_gib"] is None else f"{mode['peak_gib']:.1f}"
        losses = f"{mode['loss_first']:.2f} > {mode['loss_last']:.2f}"
        speed = (f"{mode['median_ms']:.1f}", f"{mode['tokens_per_second']:,.0f}", ratio)
        sent = [f"{mode[key] / 1e6:,.2f}" for key in ("gathered_bytes", "reduced_bytes") if key in mode]
        rows.append((name, *speed, peak, f"{mode['startup_s']:.1f}", losses, str(mode["converted"]), *sent))
    print()
    print_rows(header, rows)
    for name, mode in modes.items():
        if "error" in mode:
            print(f"\n{name}: {mode['error']}")
        loop = modes.get("loop" + name.removeprefix("ours"), {})
        if name.startswith("ours") and "median_ms" in mode and "median_ms" in loop:
            print(f"\nTrainer over a bare loop ({name}): {mode['median_ms'] / loop['median_ms'] - 1:+.1%}")


def draw(modes: dict[str, dict[str, Any]], title: str, path: Path) -> None:
    """Bars of tokens per second, with the ratio to bf16."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    done = {name: mode for name, mode in modes.items() if "error" not in mode}
    figure, axes = plt.subplots(figsize=(9, 1 + 0.5 * len(done)), layout="constrained")
    bars = axes.barh(list(done), [mode["tokens_per_second"] for mode in done.values()])
    axes.bar_label(bars, [f" {mode.get('speedup', math.nan):.2f}x" for mode in done.values()])
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("tokens per second")
    axes.set_title(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    (args,) = HfArgumentParser((Arguments,)).parse_args_into_dataclasses()
    runs = parse_runs(args.modes, launch_options=True)
    unknown = [run.name for run in runs if run.kind not in MEASURES]
    if unknown:
        raise ValueError(f"Unknown modes: {', '.join(unknown)}. Known: {', '.join(MEASURES)}.")
    join()
    facts = environment()
    config = (
        AutoConfig.from_pretrained(args.model_name_or_path) if args.model_name_or_path else SHAPES[args.shape]
    )
    data = RandomTokens(args.vocab or config.get_text_config().vocab_size, args.seq)
    rounds: dict[str, list[dict[str, Any]]] = {run.name: [] for run in runs}
    errors: dict[str, str] = {}
    modes: dict[str, dict[str, Any]] = {}
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    for turn in range(args.rounds):
        for run in runs:
            if run.name in errors:
                continue
            if is_main():
                print(f"round {turn + 1}/{args.rounds}: {run.name}", file=sys.stderr, flush=True)
            found = measured(run, args, data)
            if "error" in found:
                errors[run.name] = found["error"]
            else:
                rounds[run.name].append(found)
            modes = compare(rounds, errors, args)
            if is_main():  # after each mode: what was measured survives an interruption
                record = {"environment": facts, "arguments": asdict(args), "modes": modes}
                output.write_text(json.dumps(record) + "\n")
    if is_main():
        show(modes, args, facts)
    leave()
    sys.exit(any("error" in mode for mode in modes.values()))


def show(modes: dict[str, dict[str, Any]], args: Arguments, facts: dict[str, str]) -> None:
    """What was measured, on the terminal and as a picture."""
    size = f"{args.accumulation} x {args.batch} x {args.seq} tokens"
    if world_size() > 1:
        size = f"{world_size()} ranks, {size} each"
    title = f"{args.model_name_or_path or args.shape}, {size}, {facts['device']}"
    versions = ", ".join(f"{name} {value}" for name, value in facts.items() if name != "device")
    print(f"\n{title}\n{versions}")
    print_table(modes)
    print_profile(modes)
    if args.plot:
        draw(modes, title, Path(args.output).with_suffix(".png"))


if __name__ == "__main__":
    main()
