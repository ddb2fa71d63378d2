"""Where does FP8 pay for experts? One mixture-of-experts layer, forward and backward, against transformers' bf16.

    python examples/benchmark_experts.py                            # an FP8 GPU, about three minutes
    python examples/benchmark_experts.py --smoke                    # emulated, on a CPU: a test of this script

For the layer shapes of Mixtral 8x7B and Qwen3-30B-A3B, at 16384 and 65536 tokens, the GPU time of the experts (routing
layout, both projections, gate, sum over experts; not the router) in these implementations:

    bf16          transformers' `grouped_mm`
    torchao       its prototype, rowwise (`torchao.prototype.moe_training`), on rows padded as ours are
    tensorwise, delayed, rowwise    `hf_fp8/experts.py`

Implementations take turns, and medians are compared. Times of `delayed` include what an optimizer step of one
micro-batch spends on scales and on the 8-bit copies of the weights ("of it, step"). Routing is random and even unless
`--routing uneven`, where experts get tokens in proportion to 1, 1/2, 1/3, ...

First, each implementation is checked against float64 on a small layer whose experts get 0, 1, 5, 37 and all other
tokens.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity
from transformers import HfArgumentParser, MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from hf_fp8 import FP8Config
from hf_fp8.casts import E4M3, Scaled
from hf_fp8.experts import convert_experts
from hf_fp8.grouped_gemm import grouped_gemm, route
from hf_fp8.linear import fp8_modules
from hf_fp8.scaling import ScalingState, WeightScales
from hf_fp8.transpose import row_major
from runs import environment, fp8_gpu, print_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16, TORCHAO = "bf16", "torchao"


@dataclass(frozen=True)
class Shape:
    """A layer: hidden size, width of an expert, number of experts, experts a token."""

    name: str
    hidden: int
    width: int
    experts: int
    top_k: int


SHAPES = (
    Shape("mixtral-8x7b", 4096, 14336, 8, 2),
    Shape("qwen3-30b-a3b", 2048, 768, 128, 8),
)
SMOKE_SHAPES = (Shape("small", 64, 96, 4, 2),)
CHECKED = Shape("checked", 512, 768, 8, 2)


@dataclass
class Arguments:
    """What is measured."""

    runs: list[str] = field(
        default_factory=lambda: [BF16, TORCHAO, "tensorwise", "delayed", "rowwise"],
        metadata={"help": "Implementations, bf16 first."},
    )
    tokens: list[int] = field(default_factory=lambda: [16384, 65536], metadata={"help": "Tokens of a batch."})
    shapes: list[str] = field(
        default_factory=lambda: [s.name for s in SHAPES], metadata={"help": "Layer shapes."}
    )
    routing: str = field(default="even", metadata={"help": "even or uneven."})
    eager: list[str] = field(
        default_factory=lambda: [BF16, "delayed"],
        metadata={"help": "Implementations timed without compile, too, at the smaller number of tokens."},
    )
    later: list[str] = field(
        default_factory=list, metadata={"help": "Implementations to time after all others, with bf16."}
    )
    repeats: int = field(default=10, metadata={"help": "Timed repetitions."})
    profile: list[str] = field(
        default_factory=list, metadata={"help": "Print the kernels of these implementations."}
    )
    kernels: int = field(default=16, metadata={"help": "How many kernels to print."})
    gemms: bool = field(default=True, metadata={"help": "Time the grouped GEMMs alone, too."})
    check: list[str] = field(
        default_factory=lambda: [BF16, TORCHAO, "tensorwise", "delayed", "rowwise"],
        metadata={"help": "Implementations to check against float64 first."},
    )
    seconds: float = field(
        default=float("inf"), metadata={"help": "Start no further case after this many seconds."}
    )
    output: str = field(
        default="outputs/benchmark_experts.json", metadata={"help": "JSON file of the results."}
    )
    smoke: bool = field(default=False, metadata={"help": "A small shape, compiled without kernels."})

    def __post_init__(self) -> None:
        if self.smoke:
            self.tokens, self.repeats, self.eager = [96], 2, []
            self.runs, self.check = ([run for run in x if run != TORCHAO] for x in (self.runs, self.check))


# --- implementations ----------------------------------------------------------------------------------------


def make_layer(run: str, shape: Shape) -> tuple[nn.Module, ScalingState | None]:
    """An experts layer in bf16 with the weights of a fixed seed, and what the delayed recipe keeps beside it."""
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=shape.hidden, intermediate_size=shape.width, num_local_experts=shape.experts
    )
    config._experts_implementation = "grouped_mm"
    with torch.device(DEVICE):
        layer = MixtralExperts(config).to(torch.bfloat16)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    if run == BF16:
        return layer, None
    if run == TORCHAO:
        layer.__class__ = TorchaoExperts
        return layer, None
    fp8 = FP8Config(recipe=run, emulate=not fp8_gpu())
    convert_experts(layer, fp8)
    if run != "delayed":
        return layer, None
    modules = fp8_modules(layer)
    state = ScalingState(WeightScales(nn.Sequential(), modules, DEVICE, keep_fp8=modules), fp8, DEVICE)
    state.weights.refresh()
    return layer, state


class TorchaoExperts(MixtralExperts):
    """The same layer through torchao's prototype, which wants groups of a multiple of 16 rows."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm as grouped

        routing = route(top_k_index, self.num_experts)
        padded = torch.nn.functional.pad(hidden_states, (0, 0, 0, 1))
        x = padded[routing.tokens]
        options = {"pad_token_groups_for_grouped_mm": False}
        up = grouped(x, self.gate_up_proj.transpose(-2, -1), routing.offsets, **options)
        inner = self._apply_gate(up)
        out = grouped(inner, self.down_proj.transpose(-2, -1), routing.offsets, **options)
        return (out[routing.places] * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)


def choose(tokens: int, shape: Shape, routing: str) -> Tensor:
    """(tokens, top_k) different experts for each token."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    odds = torch.ones(shape.experts, device=DEVICE)
    if routing == "uneven":
        odds = 1 / torch.arange(1, shape.experts + 1, device=DEVICE)
    return torch.multinomial(odds.expand(tokens, -1), shape.top_k, generator=generator)


class Step:
    """Forward and backward of a layer on fixed random data; with the delayed recipe also its once-a-step work."""

    def __init__(
        self, layer: nn.Module, state: ScalingState | None, tokens: int, shape: Shape, routing: str
    ) -> None:
        generator = torch.Generator(DEVICE).manual_seed(2)
        options: dict[str, Any] = {"device": DEVICE, "generator": generator}
        self.layer, self.state = layer, state
        self.x = torch.randn(tokens, shape.hidden, dtype=torch.bfloat16, **options).requires_grad_()
        self.grad = torch.randn(tokens, shape.hidden, dtype=torch.bfloat16, **options)
        self.choice = choose(tokens, shape, routing)
        weights = torch.rand(tokens, shape.top_k, **options)
        self.weights = (weights / weights.sum(-1, keepdim=True)).to(torch.bfloat16).requires_grad_()
        for tensor in (self.x, self.choice, self.weights):  # one graph for every number of tokens
            torch._dynamo.maybe_mark_dynamic(tensor, 0)

    def __call__(self) -> Tensor:
        self.x.grad = self.weights.grad = None
        self.layer.zero_grad(set_to_none=True)
        y = self.layer(self.x, self.choice, self.weights)
        y.backward(self.grad)
        return y

    def after(self) -> None:
        if self.state is not None:
            self.state.sync()


# --- numerics -----------------------------------------------------------------------------------------------


def sqnr(found: Tensor, right: Tensor) -> float:
    """Signal to quantization noise in dB."""
    return (20 * torch.log10(right.norm() / (found.double() - right).norm())).item()


def check(run: str) -> dict[str, float]:
    """SQNR of the output and of every gradient, with experts of 0, 1, 5, 37 and all other tokens."""
    layer, state = make_layer(run, CHECKED)
    reference = copy.deepcopy(make_layer(BF16, CHECKED)[0]).double()
    step = Step(layer, state, 343, CHECKED, "even")
    counts = [0, 1, 5, 37, 343 - 43, 0, 3, 340]
    experts = torch.arange(CHECKED.experts, device=DEVICE)
    step.choice = experts.repeat_interleave(torch.tensor(counts, device=DEVICE)).view(2, -1).t().contiguous()
    if state is not None:  # one calibrating step, as in training
        step()
        step.after()
    y = step()
    x, weights = (t.detach().double().requires_grad_() for t in (step.x, step.weights))
    right = exact(reference, x, step.choice, weights)
    right.backward(step.grad.double())
    found = {"output": (y, right), "dx": (step.x.grad, x.grad), "drouter": (step.weights.grad, weights.grad)}
    for (name, p), (_, q) in zip(layer.named_parameters(), reference.named_parameters()):
        found[f"d{name}"] = (p.grad, q.grad)
    return {name: sqnr(a, b) for name, (a, b) in found.items()}


def exact(layer: Any, x: Tensor, choice: Tensor, weights: Tensor) -> Tensor:
    """Every expert on every token, in float64."""
    each = torch.einsum("th,enh->etn", x, layer.gate_up_proj)
    each = torch.einsum("eti,ehi->eth", layer._apply_gate(each), layer.down_proj)
    picked = each[choice, torch.arange(len(x), device=x.device)[:, None]]
    return (picked * weights[..., None]).sum(1)


# --- time ---------------------------------------------------------------------------------------------------


def seconds(call: Callable[[], Any]) -> float:
    if DEVICE.type == "cpu":
        before = time.perf_counter()
        call()
        return time.perf_counter() - before
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(50_000_000)  # about 25 ms, in which the host gets ahead
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def time_together(steps: dict[str, Step], repeats: int) -> dict[str, tuple[float, float, float]]:
    """Median seconds of a step, of it the once-a-step work, and GiB at the peak; implementations take turns."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    peaks = {}
    for repeat in range(repeats):
        for name, step in steps.items():
            if DEVICE.type == "cuda" and repeat == 0:
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0
            pair = (seconds(step), seconds(step.after))
            if DEVICE.type == "cuda" and repeat == 0:
                peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**30
            times[name].append(pair)
    medians = {name: [statistics.median(column) for column in zip(*pairs)] for name, pairs in times.items()}
    return {name: (a + b, b, peaks.get(name, 0.0)) for name, (a, b) in medians.items()}


class Benchmark:
    """Layers are made and compiled once; results are kept as they come."""

    def __init__(self, args: Arguments) -> None:
        self.args, self.started = args, time.perf_counter()
        self.rows: list[dict[str, Any]] = []
        self.layers: dict[tuple[str, str, bool], tuple[nn.Module, ScalingState | None]] = {}
        torch._dynamo.config.recompile_limit = 64  # all layers share the code of one forward

    def measure(self, shape: Shape, tokens: int, runs: list[str], *, compiled: bool) -> None:
        if time.perf_counter() - self.started > self.args.seconds:
            print(f"Time is up before {shape.name} at {tokens} tokens.")
            return
        steps = {}
        for run in runs:
            try:
                steps[run] = self._warm(run, shape, tokens, compiled=compiled)
            except Exception as error:
                print(f"{run} failed at {tokens} tokens of {shape.name}: {str(error)[:400]}")
        key = {"shape": shape.name, "tokens": tokens, "compiled": compiled, "routing": self.args.routing}
        new = [
            {**key, "run": run, "seconds": time_, "step_seconds": of_it, "gib": peak}
            for run, (time_, of_it, peak) in time_together(steps, self.args.repeats).items()
        ]
        self.rows += new
        print_times(new)
        print_agreement(steps)
        profiled = compiled and tokens == self.args.tokens[0] and DEVICE.type == "cuda"
        for run in self.args.profile if profiled else ():
            if run in steps:
                print_kernels(run, steps[run], shape, tokens, self.args.kernels)

    def _warm(self, run: str, shape: Shape, tokens: int, *, compiled: bool) -> Step:
        key = (run, shape.name, compiled)
        if key not in self.layers:
            layer, state = make_layer(run, shape)
            if compiled:
                layer.compile(backend="aot_eager" if self.args.smoke else "inductor")
            self.layers[key] = (layer, state)
        step = Step(*self.layers[key], tokens, shape, self.args.routing)
        for _ in range(3):
            step()
            step.after()
        return step


def print_agreement(steps: dict[str, Step]) -> None:
    """The SQNR of the output and of each gradient (of weights, one expert's) against the first implementation, bf16."""
    found: dict[str, list[Tensor]] = {}
    for run, step in steps.items():
        y = step()
        one = [cast(Tensor, p.grad)[-1] for p in step.layer.parameters()]
        found[run] = [y.detach(), cast(Tensor, step.x.grad), cast(Tensor, step.weights.grad), *one]
    reference, *others = found
    for run in others:
        names = ("output", "dx", "drouter", *(f"d{name}" for name, _ in steps[run].layer.named_parameters()))
        each = [sqnr(a, b.double()) for a, b in zip(found[run], found[reference])]
        said = ", ".join(f"{name} {value:.1f}" for name, value in zip(names, each))
        print(f"SQNR of {run} against {reference} in dB: {said}")


def print_gemms(shape: Shape, tokens: int) -> None:
    """The three products of the first projection alone, with bf16 and with 8-bit operands, in TFLOP/s."""
    rows = tokens * shape.top_k // (16 * shape.experts) * 16 * shape.experts
    offsets = torch.arange(1, shape.experts + 1, device=DEVICE, dtype=torch.int32) * (rows // shape.experts)
    n, k = 2 * shape.width, shape.hidden
    scale = torch.ones((), device=DEVICE)
    lines = []
    for dtype in (torch.bfloat16, E4M3):
        x, dy = (torch.randn(rows, size, device=DEVICE, dtype=torch.bfloat16).to(dtype) for size in (k, n))
        w = torch.randn(shape.experts, n, k, device=DEVICE, dtype=torch.bfloat16).to(dtype)
        for fast in (True, False) if dtype == E4M3 else (False,):
            rates = []
            backward = ((dy, w), (dy.t(), x))
            if dtype == E4M3:  # with the copies that the kernel wants made before
                backward = ((dy, row_major(w.mT).mT), (row_major(dy.t()), row_major(x.t()).t()))
            for a, b in ((x, w.mT), *backward):
                if dtype == E4M3:
                    pair = (Scaled(a, scale), Scaled(b, scale))
                    call = partial(grouped_gemm, *pair, offsets, torch.bfloat16, fast=fast, emulate=False)
                else:
                    call = partial(torch._grouped_mm, a, b, offs=offsets)
                call()
                best = statistics.median(seconds(call) for _ in range(7))
                rates.append(f"{2e-12 * rows * n * k / best:.0f}")
            name = "bf16" if dtype != E4M3 else f"FP8, {'fast' if fast else 'full'} accumulation"
            lines.append((f"{shape.name}, {tokens} tokens, {name}", *rates))
    print()
    print_rows(("GEMM alone, TFLOP/s", "output", "grad_input", "grad_weight"), lines)


def print_kernels(run: str, step: Step, shape: Shape, tokens: int, most: int) -> None:
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            step()
            step.after()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events) / 3e3
    print(f"\n{run}, {shape.name}, {tokens} tokens: {total:.2f} ms of kernels")
    rows = [
        (event.key[:110], f"{event.count / 3:.0f}", f"{event.self_device_time_total / 3e3:.3f}")
        for event in events[:most]
    ]
    print_rows(("kernel", "calls", "ms"), rows)


def print_times(rows: list[dict[str, Any]]) -> None:
    bf16 = {(r["shape"], r["tokens"], r["compiled"]): r["seconds"] for r in rows if r["run"] == BF16}
    lines = [
        (
            f"{r['shape']}, {r['tokens']} tokens, {'compiled' if r['compiled'] else 'eager'}, {r['run']}",
            f"{r['seconds'] * 1e3:.3f}",
            f"{r['step_seconds'] * 1e3:.3f}",
            f"{bf16.get((r['shape'], r['tokens'], r['compiled']), float('nan')) / r['seconds']:.2f}x",
            f"{r['gib']:.1f}",
        )
        for r in rows
    ]
    print()
    print_rows(("experts", "ms", "of it, step", "vs bf16", "GiB"), lines)


def main() -> None:
    (args,) = HfArgumentParser((Arguments,)).parse_args_into_dataclasses()
    record: dict[str, Any] = {"environment": environment(), "settings": asdict(args), "sqnr": {}}
    print(", ".join(f"{name} {value}" for name, value in record["environment"].items()) + "\n")
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    for run in args.check:
        try:
            record["sqnr"][run] = check(run)
        except Exception as error:
            print(f"{run} failed in the check: {str(error)[:400]}")
    for run, found in record["sqnr"].items():
        print(f"SQNR in dB, {run}: {', '.join(f'{name} {value:.1f}' for name, value in found.items())}")
    shapes = SMOKE_SHAPES if args.smoke else [s for s in SHAPES if s.name in args.shapes]
    benchmark = Benchmark(args)
    cases = [(shape, tokens, args.runs, True) for tokens in args.tokens for shape in shapes]
    cases += [(shape, args.tokens[0], [BF16, *args.later], True) for shape in shapes if args.later]
    cases += [(shape, args.tokens[0], args.eager, False) for shape in shapes if args.eager]
    for shape, tokens, runs, compiled in cases:
        benchmark.measure(shape, tokens, runs, compiled=compiled)
        output.write_text(json.dumps(record | {"measured": benchmark.rows}) + "\n")
        if fp8_gpu() and args.gemms and (tokens, runs) == (args.tokens[0], args.runs):
            try:
                print_gemms(shape, tokens)
            except RuntimeError as error:
                print(f"the GEMMs alone failed: {str(error)[:400]}")
    print(f"\nwritten: {output}")


if __name__ == "__main__":
    main()
