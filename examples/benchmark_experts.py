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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity
from transformers import HfArgumentParser, MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from hf_fp8 import FP8Config
from hf_fp8.experts import convert_experts
from hf_fp8.grouped_gemm import route
from hf_fp8.linear import fp8_modules
from hf_fp8.scaling import ScalingState, WeightScales
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
    repeats: int = field(default=10, metadata={"help": "Timed repetitions."})
    profile: list[str] = field(
        default_factory=list, metadata={"help": "Print the kernels of these implementations."}
    )
    kernels: int = field(default=16, metadata={"help": "How many kernels to print."})
    check: bool = field(default=True, metadata={"help": "Check against float64 first."})
    output: str = field(
        default="outputs/benchmark_experts.json", metadata={"help": "JSON file of the results."}
    )
    smoke: bool = field(default=False, metadata={"help": "A small shape, compiled without kernels."})

    def __post_init__(self) -> None:
        if self.smoke:
            self.tokens, self.repeats, self.eager = [96], 2, []
            self.runs = [run for run in self.runs if run != TORCHAO]


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
    state = ScalingState(WeightScales(nn.Sequential(), modules, DEVICE, keep_fp8=True), fp8, DEVICE)
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


def measure(shape: Shape, args: Arguments, *, compiled: bool) -> list[dict[str, Any]]:
    """All implementations at every number of tokens."""
    torch._dynamo.reset()
    layers = {}
    for run in args.runs if compiled else args.eager:
        layer, state = make_layer(run, shape)
        if compiled:
            layer.compile(backend="aot_eager" if args.smoke else "inductor")
        layers[run] = (layer, state)
    rows = []
    for tokens in args.tokens if compiled else args.tokens[:1]:
        steps = {}
        for run, (layer, state) in layers.items():
            step = Step(layer, state, tokens, shape, args.routing)
            try:
                for _ in range(3):
                    step()
                    step.after()
            except Exception as error:
                print(f"{run} failed at {tokens} tokens of {shape.name}: {str(error)[:400]}")
                continue
            steps[run] = step
        for run, (time_, of_it, peak) in time_together(steps, args.repeats).items():
            key = {"shape": shape.name, "tokens": tokens, "compiled": compiled, "routing": args.routing}
            rows.append({**key, "run": run, "seconds": time_, "step_seconds": of_it, "gib": peak})
        for run in args.profile if compiled and tokens == args.tokens[0] and not args.smoke else ():
            print_kernels(run, steps[run], shape, tokens, args.kernels)
    return rows


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
    facts = environment()
    print(", ".join(f"{name} {value}" for name, value in facts.items()) + "\n")
    checks = {}
    if args.check:
        for run in args.runs:
            try:
                checks[run] = check(run)
            except Exception as error:
                print(f"{run} failed in the check: {str(error)[:400]}")
        names = list(next(iter(checks.values())))
        print_rows(
            ("SQNR in dB", *names), [(run, *(f"{c[n]:.1f}" for n in names)) for run, c in checks.items()]
        )
    shapes = SMOKE_SHAPES if args.smoke else [s for s in SHAPES if s.name in args.shapes]
    rows = []
    for shape in shapes:
        for compiled in (True, False):
            rows += measure(shape, args, compiled=compiled)
    print_times(rows)
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    record = {"environment": facts, "settings": asdict(args), "sqnr": checks, "measured": rows}
    output.write_text(json.dumps(record) + "\n")
    print(f"\nwritten: {output}")


if __name__ == "__main__":
    main()
