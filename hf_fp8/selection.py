"""Which modules run in FP8, which do not, and why: `select` decides, `ConversionReport` tells.

Every module that holds a matrix product gets one row. The decision uses the module's role (`roles.py`),
its type and shape, the user's patterns, and a cost model of the GPU: FP8 saves time in the GEMMs and spends
some on casts, so a layer needs enough tokens and enough width to win.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor
from torchao.float8.float8_linear import Float8Linear
from transformers.pytorch_utils import Conv1D

from hf_fp8.config import FP8Config
from hf_fp8.linear import ALIGNMENT, FP8Module, convert_linear
from hf_fp8.roles import HEAD, TIED, expert_parameters, module_roles, plain_name

logger = logging.getLogger(__name__)

ASSUMED_TOKENS = 8192
HEAD_RECIPE = (
    "delayed"  # which converts the output head too unless told otherwise, by examples/convergence.py
)
LOW_COVERAGE = 0.5  # below this share of the FLOPs a warning says so


class Cost(NamedTuple):
    """GPU time of one linear's forward and backward: FLOPs / rate + cast elements * bytes / bandwidth + overhead."""

    rate: float  # FLOP/s
    cast_bytes: float  # per element of x, w and dy, at BANDWIDTH
    overhead: float  # seconds

    def seconds(self, rows: int, columns: int, tokens: int) -> float:
        elements = tokens * (rows + columns) + rows * columns
        return (
            6.0 * tokens * rows * columns / self.rate + self.cast_bytes * elements / BANDWIDTH + self.overhead
        )


# Fitted by examples/benchmark_linear.py on an H200 (torch 2.11), 20 shapes from 1024x1024 at 512 tokens to 8192x8192
# at 16384: median error 3 to 6 %, and the verdict "FP8 is faster" right for 78 of 80.
BANDWIDTH = 3.0e12
BF16 = Cost(767e12, 0.0, 9.3e-6)
FP8 = {
    "tensorwise": Cost(1607e12, 8.5, 27.0e-6),
    "rowwise": Cost(1741e12, 27.8, 37.5e-6),
    "rowwise_with_gw_hp": Cost(1231e12, 10.5, 23.1e-6),
    "delayed": Cost(1561e12, 6.4, 24.9e-6),
}


@dataclass(frozen=True)
class Row:
    """One GEMM-bearing module or 3-D expert parameter."""

    name: str
    shape: tuple[int, ...]
    converted: bool
    reason: str
    flops: float
    """Of its GEMMs in one training step, per token."""
    fp8_flops: float = 0.0
    """The part of `flops` that runs in FP8."""


@dataclass
class ConversionReport:
    """What was converted and what was not. `str()` is an aligned table with repeated blocks folded."""

    rows: list[Row]
    recipe: str
    tokens: int | None = None
    notes: list[str] = field(default_factory=list)
    """What else was done to the model: masters, compile, sharding, gather."""

    @property
    def converted(self) -> list[Row]:
        return [row for row in self.rows if row.converted]

    @property
    def flop_coverage(self) -> float:
        """Share of the FLOPs of all matrix products with weights (forward and backward) that runs in FP8, 0 to 1."""
        total = sum(row.flops for row in self.rows)
        return sum(row.fp8_flops for row in self.rows) / total if total else 0.0

    def __str__(self) -> str:
        summary = (
            f"FP8 ({self.recipe}): {len(self.converted)} of {len(self.rows)} layers, "
            f"{self.flop_coverage:.1%} of the matrix FLOPs"
        )
        return "\n".join([summary, *table(self.rows, "runs in"), *(f"- {note}" for note in self.notes)])


def select(model: nn.Module, config: FP8Config, tokens: int | None = None) -> ConversionReport:
    """Decide for every GEMM-bearing module of `model`. Nothing is changed.

    Args:
        tokens: rows of a micro-batch (batch size x sequence length) for the cost model; None assumes 8192.

    Raises:
        ValueError: nothing to convert, a pattern in `fp8_skip` without a match, a model that is quantized or
            already converted, or a switch set to `on` that this model cannot honour.
    """
    _refuse_foreign_models(model)
    rows = judge(model, config, tokens)
    _check(model, rows, config, module_roles(model))
    return ConversionReport(rows, config.recipe, tokens)


def judge(model: nn.Module, config: FP8Config, tokens: int | None = None) -> list[Row]:
    """The rows of `select`, whatever they come to."""
    roles = module_roles(model)
    rows: list[Row] = []
    for name, module in model.named_modules():
        weight = _weight_of(module)
        if weight is not None:
            gemms = 3 if weight.requires_grad else 2  # forward, grad_input, and grad_weight if it trains
            flops = 2.0 * weight.numel() * gemms
            reason = _reason_not(name, module, weight, model, config, roles, tokens)
            share = 0.0 if reason else (gemms - 1 if _grad_weight_hp(config, gemms) else gemms) / gemms
            rows.append(
                Row(name, tuple(_gemm_shape(module, weight)), not reason, reason, flops, flops * share)
            )
        for parameter_name, parameter in expert_parameters(module):
            gemms = 3 if parameter.requires_grad else 2
            active = _experts_per_token(model, parameter.shape[0])
            flops = 2.0 * parameter[0].numel() * active * gemms
            rows.append(
                Row(
                    f"{name}.{parameter_name}",
                    tuple(parameter.shape),
                    False,
                    "expert weights stay in bf16",
                    flops,
                )
            )
    return rows


def convert(model: nn.Module, report: ConversionReport, config: FP8Config) -> None:
    """Convert in place what `report` says. Parameter objects stay the same objects."""
    roles = module_roles(model)
    for row in report.converted:
        convert_linear(model.get_submodule(row.name), config, head=roles.get(row.name) == HEAD)
    if report.flop_coverage < LOW_COVERAGE:
        logger.warning(
            "Only %.1f%% of the matrix FLOPs of this model run in FP8; the report names the rest and why.",
            100 * report.flop_coverage,
        )


def is_slower(rows: int, columns: int, tokens: int, recipe: str) -> bool:
    """Whether FP8 loses on a (rows, columns) weight at this many tokens, by the cost model above."""
    return BF16.seconds(rows, columns, tokens) < FP8[recipe].seconds(rows, columns, tokens)


def _reason_not(
    name: str,
    module: nn.Module,
    weight: nn.Parameter,
    model: nn.Module,
    config: FP8Config,
    roles: dict[str, str],
    tokens: int | None,
) -> str:
    """Why the module stays in high precision, empty if it converts."""
    role = roles.get(name)
    rows, columns = _gemm_shape(module, weight)[:2]
    if role == HEAD and (config.head == "on" or (config.head == "auto" and config.recipe == HEAD_RECIPE)):
        role = None
    if any(matches(pattern, name, model) for pattern in config.skip):
        return "fp8_skip"
    if role:
        return f"{role} (fp8_head={config.head})" if role == HEAD else role
    if type(module) not in (nn.Linear, Conv1D):
        return f"not convertible: {type(module).__name__}"
    if rows % ALIGNMENT or columns % ALIGNMENT:
        return f"dimensions are not multiples of {ALIGNMENT}"
    if not (config.convert_small or config.emulate) and is_slower(
        rows, columns, tokens or ASSUMED_TOKENS, config.recipe
    ):
        return "FP8 would be slower (fp8_convert_small)"
    return ""


def check_patterns(model: nn.Module, rows: list[Row], config: FP8Config) -> None:
    """Raise `ValueError` for a pattern in `fp8_skip` that matches no row."""
    for pattern in config.skip:
        if not any(matches(pattern, row.name, model) for row in rows):
            names = ", ".join(row.name for row in rows[:4])
            raise ValueError(
                f"fp8_skip pattern {pattern!r} matches no layer of this model, whose layers are {names}, …"
            )


def _check(model: nn.Module, rows: list[Row], config: FP8Config, roles: dict[str, str]) -> None:
    check_patterns(model, rows, config)
    if config.head == "on" and not any(roles.get(row.name) == HEAD for row in rows):
        why = "its head is tied to the input embedding" if TIED in roles.values() else "it has no output head"
        raise ValueError(f"fp8_head=on, but {why}. Use fp8_head=auto.")
    if config.experts == "on":
        if not any(len(row.shape) == 3 for row in rows):
            raise ValueError("fp8_experts=on, but this model has no expert weights. Use fp8_experts=auto.")
        raise ValueError(
            "fp8_experts=on: expert GEMMs do not run in FP8 in this version. Use fp8_experts=auto."
        )
    if not any(row.converted for row in rows):
        reasons = Counter(row.reason for row in rows).most_common()
        found = "; ".join(f"{count} x {reason}" for reason, count in reasons) or "no linear layer at all"
        raise ValueError(
            f"FP8 was asked for, but no layer of {type(model).__name__} can be converted: {found}. "
            "Relax fp8_skip, pass --fp8_convert_small true if shapes are the reason, or train with --fp8 false."
        )


def _refuse_foreign_models(model: nn.Module) -> None:
    quantized = [
        m for m in model.modules() if vars(m).get("is_quantized") or vars(m).get("quantization_method")
    ]
    if quantized:
        raise ValueError(
            f"{type(quantized[0]).__name__} is quantized, and FP8 training needs high-precision weights to cast. "
            "Load it without quantization_config, or train with --fp8 false."
        )
    for name, parameter in model.named_parameters():
        if type(parameter) is not nn.Parameter and not isinstance(parameter, DTensor):
            raise ValueError(
                f"{name!r} is a {type(parameter).__name__}: quantized or otherwise special, and FP8 training needs "
                "plain high-precision weights to cast. Load the model without quantization, or train with "
                "--fp8 false."
            )
    for name, module in model.named_modules():
        if isinstance(module, Float8Linear):
            raise ValueError(
                f"{name!r} was already converted by torchao. Pass the model as from_pretrained returned it: "
                "hf_fp8 converts it itself."
            )
        if isinstance(module, FP8Module):
            raise ValueError(
                f"{name!r} was already converted by hf_fp8 for another trainer or plugin. "
                "Use a freshly loaded model for each."
            )


def _weight_of(module: nn.Module) -> nn.Parameter | None:
    """The weight of a module that multiplies by it: linears, convolutions, routers; not embeddings or norms."""
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim < 2 or isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return None
    return weight


def _gemm_shape(module: nn.Module, weight: nn.Parameter) -> tuple[int, ...]:
    """(out, in) of the GEMM."""
    if isinstance(module, Conv1D):
        return weight.shape[1], weight.shape[0]
    return tuple(weight.shape)


def _grad_weight_hp(config: FP8Config, gemms: int) -> bool:
    return config.recipe == "rowwise_with_gw_hp" and gemms == 3


def _experts_per_token(model: nn.Module, experts: int) -> int:
    """How many of `experts` work on a token: the router's top-k, from the model's configuration."""
    for module in model.modules():
        config = vars(module).get("config")
        if config is not None:
            text = config.get_text_config() if hasattr(config, "get_text_config") else config
            return int(getattr(text, "num_experts_per_tok", None) or experts)
    return experts


def matches(pattern: str, name: str, model: nn.Module) -> bool:
    """Whether a pattern of `fp8_skip` means the layer of this name, in or out of its PEFT wrapper."""
    return fnmatchcase(name, pattern) or fnmatchcase(plain_name(name, model), pattern)


def table(rows: list[Row], column: str, high: str = "bf16") -> list[str]:
    """`rows` as aligned lines with a header, repeated blocks folded. `column` says what FP8 or `high` is true of."""
    lines = [("module", "shape", "count", column, "reason"), *_fold(rows, high)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]


def _fold(rows: list[Row], high: str) -> list[tuple[str, str, str, str, str]]:
    """Rows that differ only in block numbers become one: `model.layers.0-31.mlp.up_proj`."""
    groups: dict[tuple[str, tuple[int, ...], bool, str], list[list[int]]] = {}
    for row in rows:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "{}", row.name)
        indices = [int(part) for part in row.name.split(".") if part.isdigit()]
        groups.setdefault((pattern, row.shape, row.converted, row.reason), []).append(indices)
    return [
        (
            pattern.format(*(_ranges(sorted(set(column))) for column in zip(*members, strict=True))),
            "x".join(map(str, shape)),
            str(len(members)),
            "FP8" if converted else high,
            reason,
        )
        for (pattern, shape, converted, reason), members in groups.items()
    ]


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
