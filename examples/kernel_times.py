"""Where the GPU time of a training step goes: milliseconds by kind of kernel, from torch.profiler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from runs import print_rows

# The first kind that has a part of the kernel's name takes it.
KINDS = {
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "collectives": ("nccl",),
    "optimizer": ("adam", "multi_tensor_apply", "lpnorm"),
    "GEMM": ("nvjet", "gemm", "cutlass", "xmma", "cublas", "gemv", "splitk"),
    "transposes": ("_transpose_kernel",),
    "weight casts": ("_cast_kernel",),
    "pointwise and casts": ("triton_",),
    "copies": ("memcpy", "memset"),
}
OURS = "hf_fp8: "  # what the package labels for profilers


class KernelTimes:
    """Milliseconds a step by kind of kernel, and of what hf_fp8 does after the optimizer step."""

    def __init__(self) -> None:
        self.by_kind: dict[str, float] = {}
        self.by_label: dict[str, float] = {}

    @contextmanager
    def measured(self, steps: int) -> Iterator[None]:
        """Around `steps` training steps. Profiling slows the host down, not the kernels."""
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            yield
            torch.cuda.synchronize()
        by_kind: dict[str, float] = defaultdict(float)
        by_label: dict[str, float] = defaultdict(float)
        for event in profiler.key_averages():
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
                by_kind[kind_of(event.key)] += event.self_device_time_total / 1e3 / steps
            elif event.key.startswith(OURS) and event.device_type == DeviceType.CPU:
                by_label[event.key.removeprefix(OURS)] += event.device_time_total / 1e3 / steps
        self.by_kind, self.by_label = dict(by_kind), dict(by_label)


def kind_of(kernel: str) -> str:
    """The kind of a kernel, `other` for an unknown name."""
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")


def print_profile(modes: dict[str, dict[str, Any]]) -> None:
    """GPU milliseconds a step by kind of kernel, and of the work after the optimizer step in % of the step."""
    profiled = {name: mode for name, mode in modes.items() if "kernel_ms" in mode}
    for key, title, unit in (("kernel_ms", "GPU ms a step", "ms"), ("after_step_ms", "after the step", "%")):
        kinds = sorted({kind for mode in profiled.values() for kind in mode[key]})
        rows = []
        for kind in kinds:
            times = [mode[key].get(kind, 0.0) for mode in profiled.values()]
            shares = [time / mode["median_ms"] for time, mode in zip(times, profiled.values())]
            rows.append(
                (kind, *([f"{t:.1f}" for t in times] if unit == "ms" else [f"{s:.2%}" for s in shares]))
            )
        if rows:
            print()
            print_rows((title, *profiled), rows)
