"""Does FP8 training reach the same loss as bf16? Every recipe on the same data in the same order.

    python examples/convergence.py                                  # 200M parameters, 2,000 steps, one GPU
    python examples/convergence.py --resume --runs delayed:margin=1 delayed:history=1024
    python examples/convergence.py --moe --output_dir outputs/convergence_moe       # a mixture of experts
    python examples/convergence.py --smoke                          # tiny, emulated, on a CPU

A byte-level Llama learns the Python standard library's source. `bf16` is the stock Trainer, every other run
is `FP8Trainer` with the same arguments; all keep fp32 weights. A second `bf16` differs by nondeterminism
only; `bf16:seed=1` also starts from other weights, which gives a wider estimate of the spread. A run agrees
with bf16 if its final loss is within the spread of the bf16 runs or 0.5 %, whichever is larger.

Writes `convergence.json` after every run (so that a long series can be interrupted and taken up again with
`--resume`) and draws `convergence.png`.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from tqdm.auto import tqdm
from transformers import (
    HfArgumentParser,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from hf_fp8 import FP8Trainer, FP8TrainingArguments
from runs import Run, clean_start, environment, fp8_gpu, parse_runs, peak_gib, print_rows
from text_data import byte_llama, byte_mixtral, stdlib_tensors

TOLERANCE = 0.005


@dataclass
class Arguments:
    """Sizes and runs."""

    runs: list[str] = field(
        default_factory=lambda: ["bf16", "bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"],
        metadata={"help": "Runs: bf16 or a recipe, with options as in delayed:margin=1."},
    )
    hidden_size: int = field(default=1024, metadata={"help": "Width of the model."})
    intermediate_size: int = field(default=4096, metadata={"help": "Width of its MLP."})
    moe: bool = field(
        default=False, metadata={"help": "Eight experts of a quarter of that width, two a token."}
    )
    layers: int = field(default=12, metadata={"help": "Blocks."})
    heads: int = field(default=16, metadata={"help": "Attention heads."})
    steps: int = field(default=2000, metadata={"help": "Optimizer steps of a run."})
    batch: int = field(default=8, metadata={"help": "Sequences in a step."})
    seq: int = field(default=512, metadata={"help": "Bytes in a sequence."})
    learning_rate: float = field(default=6e-4, metadata={"help": "Peak learning rate, cosine to a tenth."})
    warmup: int = field(default=100, metadata={"help": "Warm-up steps."})
    final_steps: int = field(
        default=100, metadata={"help": "The final loss is the mean of this many last steps."}
    )
    eval_sequences: int = field(default=256, metadata={"help": "Held-out sequences."})
    max_bytes: int = field(default=40_000_000, metadata={"help": "Bytes of source text to read."})
    torch_compile: bool = field(default=torch.cuda.is_available(), metadata={"help": "Compile the model."})
    output_dir: str = field(default="outputs/convergence", metadata={"help": "Where JSON and PNG go."})
    resume: bool = field(default=False, metadata={"help": "Keep the runs of an earlier convergence.json."})
    time_limit: float = field(
        default=float("inf"), metadata={"help": "Start no run that would end after this many seconds."}
    )
    smoke: bool = field(default=False, metadata={"help": "Tiny model, 20 steps: a test of this script."})

    def __post_init__(self) -> None:
        if self.smoke:
            self.hidden_size, self.intermediate_size, self.layers, self.heads = 64, 128, 2, 4
            self.steps, self.batch, self.seq, self.warmup, self.final_steps = 20, 4, 64, 4, 5
            self.eval_sequences, self.max_bytes, self.torch_compile = 16, 500_000, False

    def settings(self) -> dict[str, Any]:
        """What two runs must share to be compared."""
        other = {"runs", "output_dir", "resume", "time_limit", "smoke", "torch_compile"}
        return {name: value for name, value in asdict(self).items() if name not in other}


class ByteBlocks(Dataset):
    """Sequences of bytes from fixed places of one uint8 tensor: item i is the same in every run."""

    def __init__(self, data: torch.Tensor, count: int, seq: int) -> None:
        self.data, self.seq = data, seq
        places = torch.randint(0, len(data) - seq, (count,), generator=torch.Generator().manual_seed(1))
        self.places: list[int] = places.tolist()

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.data[self.places[index] : self.places[index] + self.seq].long()
        return {"input_ids": ids, "labels": ids}


class Progress(TrainerCallback):
    """A bar with the current loss, and the time at every step's end (a logged loss has been waited for)."""

    def __init__(self, name: str, steps: int) -> None:
        self.bar = tqdm(total=steps, desc=name)
        self.times: list[float] = []

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is not None and "loss" in logs:
            self.times.append(time.perf_counter())
            self.bar.update()
            self.bar.set_postfix(loss=f"{logs['loss']:.3f}", refresh=False)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.bar.close()


def make_trainer(run: Run, args: Arguments, train: Dataset, held_out: Dataset) -> Trainer:
    """The run's trainer: stock for bf16, ours for a recipe."""
    values: dict[str, Any] = {
        "output_dir": args.output_dir,
        "max_steps": args.steps,
        "per_device_train_batch_size": args.batch,
        "per_device_eval_batch_size": args.batch,
        "learning_rate": args.learning_rate,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "warmup_steps": args.warmup,
        "optim": "adamw_torch_fused",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "bf16": True,
        "use_cpu": not torch.cuda.is_available(),
        "torch_compile": args.torch_compile,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,  # a NaN must show
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
        "train_sampling_strategy": "sequential",  # the same order in every run, whatever its seed
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    trainer_class, arguments_class = Trainer, TrainingArguments
    if run.kind != "bf16":
        trainer_class, arguments_class = FP8Trainer, FP8TrainingArguments
        # Numerics are the question here, so layers that are too small to gain speed are converted too.
        values |= {"fp8_recipe": run.kind, "fp8_convert_small": True, "fp8_emulate": not fp8_gpu()}
    training_args = arguments_class(**values | run.options)
    set_seed(training_args.seed)
    build = byte_mixtral if args.moe else byte_llama
    model = build(args.hidden_size, args.intermediate_size, args.layers, args.heads, args.seq)
    trainer = trainer_class(model=model, args=training_args, train_dataset=train, eval_dataset=held_out)
    trainer.remove_callback(PrinterCallback)
    return trainer


def train(run: Run, args: Arguments, train_set: Dataset, held_out: Dataset) -> dict[str, Any]:
    """One run from fresh weights; its record for the JSON file."""
    clean_start()
    started = time.perf_counter()
    trainer = make_trainer(run, args, train_set, held_out)
    progress = Progress(run.name, args.steps)
    trainer.add_callback(progress)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    settled = progress.times[len(progress.times) // 10 :]  # without compilation
    return {
        "kind": run.kind,
        "final_loss": statistics.fmean(losses[-args.final_steps :]),
        "eval_loss": trainer.evaluate()["eval_loss"],
        "ms_per_step": statistics.median(b - a for a, b in pairwise(settled)) * 1e3,
        "peak_gib": peak_gib(),
        "seconds": time.perf_counter() - started,
        "parameters": trainer.get_num_trainable_parameters(),
        "fp8_flop_share": trainer.fp8_report.flop_coverage if isinstance(trainer, FP8Trainer) else 0.0,
        "losses": [round(loss, 5) for loss in losses],
    }


def compare(runs: dict[str, dict[str, Any]]) -> None:
    """Add to every run its difference to the bf16 mean, as a share of it, and whether that is within the spread."""
    bf16 = [run["final_loss"] for run in runs.values() if run["kind"] == "bf16"]
    if not bf16:
        return
    mean = statistics.fmean(bf16)
    allowed = max((max(bf16) - min(bf16)) / mean, TOLERANCE)
    for run in runs.values():
        run["difference"] = run["final_loss"] / mean - 1
        run["within_spread"] = abs(run["difference"]) <= allowed


def print_table(runs: dict[str, dict[str, Any]]) -> None:
    header = ("run", "final loss", "eval loss", "vs bf16", "within", "ms/step", "peak GiB")
    rows = []
    for name, run in runs.items():
        difference = f"{run['difference']:+.2%}" if "difference" in run else "-"
        within = {True: "yes", False: "NO", None: "-"}[run.get("within_spread")]
        peak = "-" if run["peak_gib"] is None else f"{run['peak_gib']:.1f}"
        losses = (f"{run['final_loss']:.4f}", f"{run['eval_loss']:.4f}")
        rows.append((name, *losses, difference, within, f"{run['ms_per_step']:.1f}", peak))
    print()
    print_rows(header, rows)


def smoothed(losses: list[float], window: int) -> torch.Tensor:
    """Running mean over `window` steps, `(len(losses) - window + 1,)`."""
    return torch.tensor(losses, dtype=torch.float64).unfold(0, window, 1).mean(-1)


def draw(runs: dict[str, dict[str, Any]], args: Arguments, path: Path) -> None:
    """Loss curves above, their difference to the bf16 mean below, both smoothed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    window = max(1, args.steps // 40)
    x = range(window, args.steps + 1)
    curves = {name: smoothed(run["losses"], window) for name, run in runs.items()}
    bf16 = [curves[name] for name, run in runs.items() if run["kind"] == "bf16"]
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9, 8), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    colours = (f"C{i}" for i in count())
    for name, curve in curves.items():
        is_bf16 = runs[name]["kind"] == "bf16"
        style = {"color": "0.7", "linewidth": 3.0} if is_bf16 else {"color": next(colours), "linewidth": 1.0}
        top.plot(x, curve, label=f"{name}: {runs[name]['final_loss']:.4f}", **style)
        if bf16:
            bottom.plot(x, (curve / torch.stack(bf16).mean(0) - 1) * 100, **style)
    top.set_ylabel("training loss (nats per byte)")
    top.set_yscale("log")
    for axis_formatter in (top.yaxis.set_major_formatter, top.yaxis.set_minor_formatter):
        axis_formatter("{x:.3g}")
    top.legend(title="run: final loss")
    bottom.axhspan(-TOLERANCE * 100, TOLERANCE * 100, color="0.9")
    bottom.set_ylabel("difference to bf16 (%)")
    bottom.set_ylim(-3, 3)
    bottom.set_xlabel(f"optimizer step (mean of {window})")
    parameters = next(iter(runs.values()))["parameters"]
    figure.suptitle(
        f"Byte-level {'Mixtral' if args.moe else 'Llama'}, {parameters / 1e6:.3g}M parameters, FP8 recipes against bf16"
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    (args,) = HfArgumentParser((Arguments,)).parse_args_into_dataclasses()
    asked = parse_runs(args.runs)
    output = Path(args.output_dir, "convergence.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"settings": args.settings(), "environment": environment(), "runs": {}}
    if args.resume and output.exists():
        earlier = json.loads(output.read_text())
        if earlier["settings"] != record["settings"]:
            raise ValueError(
                f"{output} holds runs with other sizes: {earlier['settings']}. "
                "Give the same sizes, another --output_dir, or leave out --resume."
            )
        record["runs"] = earlier["runs"]

    train_bytes, held_out_bytes = stdlib_tensors(args.max_bytes)
    train_set = ByteBlocks(train_bytes, args.steps * args.batch, args.seq)
    held_out = ByteBlocks(held_out_bytes, args.eval_sequences, args.seq)
    started = time.perf_counter()
    runs = record["runs"]
    for run in asked:
        if run.name in runs:
            continue
        longest = max((done["seconds"] for done in runs.values()), default=0.0)
        if time.perf_counter() - started + longest > args.time_limit:
            print(f"Time limit: {run.name} and what follows wait for another call with --resume.")
            break
        runs[run.name] = train(run, args, train_set, held_out)
        output.write_text(json.dumps(record) + "\n")
    compare(runs)
    output.write_text(json.dumps(record) + "\n")
    draw(runs, args, output.with_suffix(".png"))
    print_table(runs)
    print(f"\n{len(train_bytes) / 1e6:.1f} MB of text; written: {output}, {output.with_suffix('.png')}")


if __name__ == "__main__":
    main()
