"""The optimizer step on the CPU: which implementation of Adam, and what the way to the GPU costs beside it.

    python examples/offload.py --parameters 500_000_000 --threads 16

AdamW on fp32 tensors of a Llama block's shapes, as an offloaded run steps on them: fused (one vectorised, threaded
kernel a tensor), foreach, and the plain loop over parameters; on a GPU also fused there, and copies of the same
size from and to pinned memory. Implementations take turns; medians. For whole training steps see `matrix.py`.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import HfArgumentParser

from runs import environment, print_rows

SHAPES = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))
IMPLEMENTATIONS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}
CUDA = torch.cuda.is_available()


@dataclass
class Arguments:
    """What is measured."""

    parameters: int = field(
        default=218_000_000, metadata={"help": "Elements; 218 million are one block of Llama-3-8B."}
    )
    threads: int = field(default=0, metadata={"help": "CPU threads; 0: torch's choice."})
    rounds: int = field(default=5, metadata={"help": "How often each is measured."})
    output: str = field(default="outputs/offload.json", metadata={"help": "JSON file of the results."})


def tensors(count: int, device: str) -> list[torch.Tensor]:
    """At least `count` elements in a block's shapes, shortened to `count`, with gradients."""
    made: list[torch.Tensor] = []
    while count > 0:
        rows, columns = SHAPES[len(made) % len(SHAPES)]
        rows = min(rows, -(-count // columns))
        made.append(torch.randn(rows, columns, device=device, requires_grad=True))
        made[-1].grad = torch.randn_like(made[-1])
        count -= rows * columns
    return made


def stepper(count: int, device: str, **options: bool) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(tensors(count, device), lr=1e-5, **options)
    optimizer.step()  # makes its state
    return optimizer.step


def copier(count: int, source: str, target: str) -> Callable[[], object]:
    def host(device: str) -> torch.Tensor:
        return torch.empty(count, device=device, pin_memory=device == "cpu")

    here, there = host(source), host(target)
    return lambda: there.copy_(here, non_blocking=True)


def milliseconds(work: Callable[[], object]) -> float:
    if CUDA:
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if CUDA:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    if args.threads:
        torch.set_num_threads(args.threads)
    count = args.parameters
    works = {f"AdamW on CPU, {name}": stepper(count, "cpu", **o) for name, o in IMPLEMENTATIONS.items()}
    if CUDA:
        works["AdamW on GPU, fused"] = stepper(count, "cuda", fused=True)
        works["copy to GPU, fp32"] = copier(count, "cpu", "cuda")
        works["copy to CPU, fp32"] = copier(count, "cuda", "cpu")
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(args.rounds):
        for name, work in works.items():
            times[name].append(milliseconds(work))
    medians = {name: statistics.median(values) for name, values in times.items()}
    fused = medians["AdamW on CPU, fused"]
    print_rows(
        [f"{count:,} parameters, {torch.get_num_threads()} threads", "ms", "against fused"],
        [[name, f"{value:.1f}", f"{value / fused:.2f}x"] for name, value in medians.items()],
    )
    record = {
        "environment": environment(),
        "parameters": count,
        "threads": torch.get_num_threads(),
        "ms": medians,
    }
    path = Path(args.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
