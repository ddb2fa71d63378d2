"""What `convergence.py` and `benchmark.py` share: naming runs, a clean start for each, and the machine's facts.

A run is written `kind:option,key=value`: `bf16`, `delayed:margin=1`, `ours:rowwise,head=off`. Keys are the
FP8 flags without their prefix (`margin` for `--fp8_amax_margin`), or any other training argument; `benchmark.py` also
takes keys of a launch config's `fsdp_config`.
"""

from __future__ import annotations

import gc
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState

from hf_fp8 import FP8TrainingArguments

_SHORT = {"margin": "fp8_amax_margin", "history": "fp8_amax_history_len", "sync": "fp8_amax_sync"}
_FLAGS = {f.name for f in fields(FP8TrainingArguments)}


@dataclass(frozen=True)
class Run:
    """One run as typed on the command line."""

    name: str
    """As typed; the second of two equal ones ends in `#2`."""
    kind: str
    """The word before the colon."""
    recipe: str | None = None
    """The option without a key, if any."""
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of `FP8TrainingArguments` and their values."""
    launch: dict[str, str] = field(default_factory=dict)
    """Keys of a launch config's `fsdp_config` and their values."""


def parse_runs(texts: Sequence[str], *, launch_options: bool = False) -> list[Run]:
    """Runs from the command line.

    `launch_options`: take keys such as `fsdp_reshard_after_forward`, too.

    Raises:
        ValueError: a key that is no training argument.
    """
    runs: list[Run] = []
    for index, text in enumerate(texts):
        kind, _, rest = text.partition(":")
        items = [item.partition("=") for item in rest.split(",") if item]
        recipe = next((key for key, sign, _ in items if not sign), None)
        said = {key: value for key, sign, value in items if sign}
        launch = {key: said.pop(key) for key in list(said) if launch_options and _of_launch(key)}
        options = {_flag(key, text): _value(key, value) for key, value in said.items()}
        earlier = texts[:index].count(text)
        runs.append(Run(f"{text}#{earlier + 1}" if earlier else text, kind, recipe, options, launch))
    return runs


def _of_launch(key: str) -> bool:
    return key.startswith("fsdp_") and key not in _FLAGS


def _flag(key: str, text: str) -> str:
    flag = _SHORT.get(key) or (f"fp8_{key}" if f"fp8_{key}" in _FLAGS else key)
    if flag not in _FLAGS:
        known = sorted([*_SHORT, *(name.removeprefix("fp8_") for name in _FLAGS if name.startswith("fp8_"))])
        raise ValueError(
            f"{key!r} in the run {text!r} is no training argument. FP8 options: {', '.join(known)}."
        )
    return flag


def _value(key: str, text: str) -> Any:
    if key == "skip":
        return [text]
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def clean_start() -> None:
    """Forget the last run: its memory, its compiled code and Accelerate's process-wide state."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch._dynamo.reset()
    torch.compiler.set_stance("default")  # a run that failed in its calibration leaves another one
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib() -> float | None:
    """Largest GPU memory allocated since `clean_start`, in GiB; None on a CPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None


def fp8_gpu() -> bool:
    """Whether this process has a GPU with FP8 tensor cores (Ada, Hopper, Blackwell)."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def environment() -> dict[str, str]:
    """Hardware, versions and commit, for the record of a measurement."""
    packages = ("torch", "torchao", "transformers", "accelerate")
    return {
        "device": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"CPU ({platform.machine()})",
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "commit": _commit(),
    }


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def print_rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """An aligned table: first column to the left, the others to the right."""
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    for line in (header, *rows):
        cells = [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths))]
        print("  ".join(cells).rstrip())
