"""Where does FP8 pay? One compiled linear, forward and backward, FP8 against bf16, over a grid of shapes.

    python examples/benchmark_linear.py                             # an FP8 GPU, about three minutes
    python examples/benchmark_linear.py --smoke                     # emulated, on a CPU: a test of this script

For every weight (out, in) and number of tokens: the GPU time of bf16 and of each recipe, written to JSON.
Then a cost model is fitted per recipe,

    bf16:  seconds = FLOPs / rate + overhead
    FP8:   seconds = FLOPs / rate + elements * bytes / bandwidth + overhead

where FLOPs are those of the three GEMMs and elements those of the three operands that are cast: input,
weight and output gradient. `bytes` are relative to `--bandwidth`, so they hold everything that grows with
the operands. Relative errors are minimised, since the times span three orders of magnitude. The constants
feed `hf_fp8/selection.py`.

A graph is compiled per weight, with the number of tokens left open; `--static` compiles every shape.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import HfArgumentParser

from hf_fp8 import FP8Config
from hf_fp8.linear import FP8Linear, convert_linear
from hf_fp8.scaling import ScalingState, WeightScales
from runs import environment, fp8_gpu, print_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = "bf16"
TOKENS: tuple[int, ...] = (512, 2048, 8192, 16384)
SMOKE_TOKENS: tuple[int, ...] = (32, 128, 256)
# (in, out), the extremes first: a run that ends early has seen the whole range.
WEIGHTS: tuple[tuple[int, int], ...] = (
    (4096, 4096),
    (1024, 1024),
    (14336, 4096),
    (2048, 8192),
    (8192, 8192),
    (1024, 4096),
    (4096, 14336),
    (2048, 2048),
    (4096, 1024),
    (4096, 128256),
)
SMOKE_WEIGHTS: tuple[tuple[int, int], ...] = ((64, 64), (64, 128), (128, 256))
MAX_OUTPUT = 4096 * 128256  # elements of an output: the LM head is measured at 4096 tokens at most


def make_linear(recipe: Any, in_features: int, out_features: int) -> nn.Linear:
    """A bf16 linear without bias, converted by `hf_fp8` unless `recipe` is bf16."""
    linear = nn.Linear(in_features, out_features, bias=False, device=DEVICE, dtype=torch.bfloat16)
    if recipe != BF16:
        config = FP8Config(recipe=recipe, emulate=not fp8_gpu())
        convert_linear(linear, config)
        if recipe == "delayed":
            set_scales(cast(FP8Linear, linear), config)
    return linear


def set_scales(linear: FP8Linear, config: FP8Config) -> None:
    """One calibrating step and one sync, as in training.

    No FP8 copy of the weight is kept: its two casts in `forward` and `backward` stand for the amax and the cast that
    a training step spends on it outside.
    """
    state = ScalingState(WeightScales(nn.Sequential(linear), {"linear": linear}, DEVICE), config, DEVICE)
    state.weights.refresh()
    x = torch.randn(16, linear.in_features, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    y = linear(x)
    y.backward(torch.randn_like(y))
    linear.zero_grad(set_to_none=True)
    state.sync()


@dataclass
class Arguments:
    """What is measured."""

    recipes: list[str] = field(
        default_factory=lambda: ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"],
        metadata={"help": "FP8 recipes to compare with bf16."},
    )
    repeats: int = field(default=10, metadata={"help": "Timed repetitions."})
    seconds: float = field(
        default=180.0, metadata={"help": "Start no further weight after this many seconds."}
    )
    bandwidth: float = field(default=3.0e12, metadata={"help": "Memory bandwidth, bytes per second."})
    static: bool = field(default=False, metadata={"help": "Compile every number of tokens on its own."})
    output: str = field(
        default="outputs/benchmark_linear.json", metadata={"help": "JSON file of the results."}
    )
    smoke: bool = field(default=False, metadata={"help": "Few small shapes, not compiled."})

    def __post_init__(self) -> None:
        if self.smoke:
            self.repeats = 3


@dataclass(frozen=True)
class Measurement:
    """Forward and backward of one linear."""

    recipe: str
    tokens: int
    in_features: int
    out_features: int
    seconds: float

    @property
    def flops(self) -> float:
        return 6.0 * self.tokens * self.in_features * self.out_features

    @property
    def elements(self) -> float:
        weight = self.in_features * self.out_features
        return float(self.tokens * (self.in_features + self.out_features) + weight)


def gpu_seconds(
    linear: nn.Module, tokens: int, in_features: int, out_features: int, args: Arguments
) -> float:
    """Of forward and backward on random data, without the time of the optimizer."""
    # Tokens as (tokens / 16, 16): with the first left open, the compiler still sees that FP8 needs no padding.
    shape = (tokens // 16, 16)
    x = torch.randn(*shape, in_features, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(*shape, out_features, device=DEVICE, dtype=torch.bfloat16)
    if not args.static:
        torch._dynamo.maybe_mark_dynamic(x, 0)

    def step() -> None:
        x.grad = None
        linear.zero_grad(set_to_none=True)
        linear(x).backward(grad)

    for _ in range(3):
        step()
    if DEVICE.type == "cpu":
        return statistics.median(wall_seconds(step) for _ in range(args.repeats))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(args.repeats):
            step()
        torch.cuda.synchronize()
    # What the GPU worked, without the gaps between kernels: in a model, launches run ahead of the GPU.
    return sum(event.self_device_time_total for event in profile.key_averages()) / args.repeats / 1e6


def wall_seconds(step: Callable[[], None]) -> float:
    before = time.perf_counter()
    step()
    return time.perf_counter() - before


def measure(args: Arguments) -> list[Measurement]:
    """The grid, as far as the time allows; a weight is measured with all recipes or not at all."""
    weights = SMOKE_WEIGHTS if args.smoke else WEIGHTS
    token_counts = SMOKE_TOKENS if args.smoke else TOKENS
    done: list[Measurement] = []
    started = time.perf_counter()
    for in_features, out_features in tqdm(weights, desc="weights"):
        if time.perf_counter() - started > args.seconds:
            print(f"Time is up before {in_features} x {out_features}; give more --seconds for the rest.")
            break
        for recipe in (BF16, *args.recipes):
            torch._dynamo.reset()
            linear = make_linear(recipe, in_features, out_features)
            if not args.smoke:
                linear.compile(dynamic=False if args.static else None)
            for tokens in token_counts:
                if tokens * out_features <= MAX_OUTPUT:
                    seconds = gpu_seconds(linear, tokens, in_features, out_features, args)
                    done.append(Measurement(recipe, tokens, in_features, out_features, seconds))
    return done


def fit(measured: list[Measurement], with_casts: bool) -> dict[str, float]:
    """Least squares of the relative error: seconds per FLOP, per cast element, and per call."""
    columns = [[m.flops, m.elements if with_casts else 0.0, 1.0] for m in measured]
    seconds = np.array([m.seconds for m in measured])
    scaled = np.array(columns) / seconds[:, None]
    size = np.maximum(np.abs(scaled).max(0), 1e-300)  # columns of comparable size
    free = np.array([True, with_casts, True])
    while True:  # a cost cannot be negative: drop what would be
        solution = np.zeros(3)
        solution[free] = np.linalg.lstsq(scaled[:, free] / size[free], np.ones(len(measured)), rcond=None)[0]
        if (solution >= 0).all():
            break
        free &= solution > 0
    per_flop, per_element, overhead = solution / size
    errors = np.abs(np.array(columns) @ (solution / size) / seconds - 1)
    return {
        "seconds_per_flop": per_flop,
        "seconds_per_element": per_element,
        "seconds_per_call": overhead,
        "median_error": float(np.median(errors)),
        "largest_error": float(errors.max()),
    }


def predict(model: dict[str, float], m: Measurement) -> float:
    return (
        m.flops * model["seconds_per_flop"]
        + m.elements * model["seconds_per_element"]
        + model["seconds_per_call"]
    )


def print_speedups(measured: list[Measurement], recipes: list[str]) -> None:
    by_shape: dict[tuple[int, int, int], dict[str, float]] = {}
    for m in measured:
        by_shape.setdefault((m.tokens, m.in_features, m.out_features), {})[m.recipe] = m.seconds
    rows = [
        (
            f"{k} -> {n}, {tokens} tokens",
            f"{times[BF16] * 1e3:.3f}",
            *(f"{times[BF16] / times[r]:.2f}x" for r in recipes),
        )
        for (tokens, k, n), times in sorted(by_shape.items(), key=lambda item: item[1][BF16])
    ]
    print_rows(("linear", "bf16 ms", *recipes), rows)


def print_models(models: dict[str, dict[str, float]], measured: list[Measurement], args: Arguments) -> None:
    """The constants, and how often the model's verdict (FP8 faster or not) is the measured one."""
    bf16 = {(m.tokens, m.in_features, m.out_features): m for m in measured if m.recipe == BF16}
    rows = []
    for recipe, model in models.items():
        verdicts = [
            (predict(model, m) < predict(models[BF16], m))
            == (m.seconds < bf16[m.tokens, m.in_features, m.out_features].seconds)
            for m in measured
            if m.recipe == recipe
        ]
        right = "-" if recipe == BF16 else f"{sum(verdicts)} of {len(verdicts)}"
        cast_bytes = model["seconds_per_element"] * args.bandwidth
        rate = f"{1e-12 / model['seconds_per_flop']:.0f}" if model["seconds_per_flop"] else "-"
        constants = (rate, f"{cast_bytes:.1f}", f"{model['seconds_per_call'] * 1e6:.1f}")
        rows.append(
            (recipe, *constants, f"{model['median_error']:.0%}", f"{model['largest_error']:.0%}", right)
        )
    print()
    header = ("cost model", "TFLOP/s", "bytes/element", "overhead us", "error", "largest", "verdict right")
    print_rows(header, rows)


def main() -> None:
    (args,) = HfArgumentParser((Arguments,)).parse_args_into_dataclasses()
    facts = environment()
    measured = measure(args)
    models = {
        recipe: fit([m for m in measured if m.recipe == recipe], with_casts=recipe != BF16)
        for recipe in (BF16, *args.recipes)
    }
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "environment": facts,
        "models": models,
        "measured": [asdict(m) for m in measured],
    }
    output.write_text(json.dumps(record) + "\n")
    print("\n" + ", ".join(f"{name} {value}" for name, value in facts.items()) + "\n")
    print_speedups(measured, args.recipes)
    print_models(models, measured, args)
    print(f"\nwritten: {output}")


if __name__ == "__main__":
    main()
