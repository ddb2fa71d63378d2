"""Which modules run in FP8, which do not, and why: `select` decides, `ConversionReport` (`report.py`) tells.

Every module that holds a matrix product gets one row. The decision uses the module's role (`roles.py`),
its type and shape, the user's patterns, and the cost model of the GPU (`cost.py`).
"""

from __future__ import annotations

import logging
from collections import Counter
from fnmatch import fnmatchcase

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.tensor import DTensor
from torchao.float8.float8_linear import Float8Linear
from transformers.pytorch_utils import Conv1D

from hf_fp8 import cost
from hf_fp8.config import FP8Config
from hf_fp8.cost import ASSUMED_TOKENS, experts_seconds, is_slower
from hf_fp8.experts import convert_experts, expert_weights, why_not_convertible, why_not_on_this_device
from hf_fp8.linear import ALIGNMENT, FP8Module, convert_linear
from hf_fp8.report import ConversionReport, Row
from hf_fp8.roles import HEAD, TIED, expert_parameters, forward_is_replaced, module_roles, plain_name

logger = logging.getLogger(__name__)

# Converts the output head, too, unless told otherwise (by examples/convergence.py).
HEAD_RECIPE = "delayed"
LOW_COVERAGE = 0.5  # below this share of the FLOPs a warning says so


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
    _warn_of_slow_experts(model, rows, config, tokens)
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
        rows += _judge_experts(name, module, model, config, roles, tokens)
    return rows


def _judge_experts(
    name: str,
    module: nn.Module,
    model: nn.Module,
    config: FP8Config,
    roles: dict[str, str],
    tokens: int | None,
) -> list[Row]:
    """A row for each 3-D expert parameter of `module`; they convert together or not at all."""
    parameters = dict(expert_parameters(module))
    if not parameters:
        return []
    names = [f"{name}.{parameter}" for parameter in parameters]
    active = _experts_per_token(model, next(iter(parameters.values())).shape[0])
    reason = _experts_reason_not(names, module, model, config, roles, active * (tokens or ASSUMED_TOKENS))
    rows = []
    for row_name, parameter in zip(names, parameters.values(), strict=True):
        gemms = 3 if parameter.requires_grad else 2
        flops = 2.0 * parameter[0].numel() * active * gemms
        share = 0.0 if reason else (gemms - 1 if _grad_weight_hp(config, gemms) else gemms) / gemms
        rows.append(
            Row(row_name, tuple(parameter.shape), not reason, reason, flops, flops * share, expert=True)
        )
    return rows


def _experts_reason_not(
    names: list[str],
    module: nn.Module,
    model: nn.Module,
    config: FP8Config,
    roles: dict[str, str],
    work: int,
) -> str:
    """Why an experts module stays in high precision, empty if it converts. `work`: tokens times experts a token."""
    parent = names[0].rpartition(".")[0]
    if config.experts == "off":
        return "fp8_experts=off"
    if any(matches(pattern, name, model) for pattern in config.skip for name in names):
        return "fp8_skip"
    if parent in roles:
        return roles[parent]
    if isinstance(model.get_submodule(parent.rpartition(".")[0]), BaseTunerLayer):
        return "adapters change the expert weights"
    reason = why_not_convertible(module) or ("" if config.emulate else why_not_on_this_device())
    if not (reason or config.emulate or cost.EXPERTS_PROVEN):
        return "experts stay in bf16 (fp8_experts=auto)"
    if reason or config.experts == "on" or config.convert_small or config.emulate:
        return reason
    bf16, fp8 = _experts_seconds(module, config.recipe, work)
    return "FP8 would be slower (fp8_experts=auto)" if fp8 > bf16 else ""


def _experts_seconds(module: nn.Module, recipe: str, work: int) -> tuple[float, float]:
    """Predicted seconds of a forward and backward, in bf16 and in FP8."""
    shapes = [tuple(getattr(module, name).shape) for name in expert_weights(module).values()]
    return experts_seconds(shapes, work, recipe)


def convert(model: nn.Module, report: ConversionReport, config: FP8Config) -> None:
    """Convert in place what `report` says. Parameter objects stay the same objects."""
    roles = module_roles(model)
    for row in report.converted:
        if not row.expert:
            convert_linear(model.get_submodule(row.name), config, head=roles.get(row.name) == HEAD)
    for parent in dict.fromkeys(row.name.rpartition(".")[0] for row in report.converted if row.expert):
        convert_experts(model.get_submodule(parent), config)
    if report.flop_coverage < LOW_COVERAGE:
        logger.warning(
            "Only %.1f%% of the matrix FLOPs of this model run in FP8; the report names the rest and why.",
            100 * report.flop_coverage,
        )


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
        role = f"{HEAD} of a forward that was replaced" if forward_is_replaced(model) else None
    if any(matches(pattern, name, model) for pattern in config.skip):
        return "fp8_skip"
    if "forward" in vars(module):
        return "its forward was replaced"
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
    if config.head == "on" and forward_is_replaced(model):
        raise ValueError(
            "fp8_head=on, but the forward of the model was replaced (TRL does so), and may read the weight of the head "
            "without calling it. Use fp8_head=auto."
        )
    if config.experts == "on":
        _check_experts([row for row in rows if row.expert], config)
    if not any(row.converted for row in rows):
        reasons = Counter(row.reason for row in rows).most_common()
        found = "; ".join(f"{count} x {reason}" for reason, count in reasons) or "no linear layer at all"
        raise ValueError(
            f"FP8 was asked for, but no layer of {type(model).__name__} can be converted: {found}. "
            "Relax fp8_skip, pass --fp8_convert_small true if shapes are the reason, or train with --fp8 false."
        )


def _check_experts(rows: list[Row], config: FP8Config) -> None:
    if not rows:
        raise ValueError("fp8_experts=on, but this model has no expert weights. Use fp8_experts=auto.")
    if not any(row.converted for row in rows):
        if not (config.emulate or cost.EXPERTS_PROVEN):
            raise ValueError(
                "fp8_experts=on: on a GPU, experts in FP8 are not yet shown to be right at full size. "
                "Use fp8_experts=auto, which leaves them in bf16, or fp8_emulate to try them."
            )
        reasons = ", ".join(dict.fromkeys(row.reason for row in rows))
        raise ValueError(
            f"fp8_experts=on, but no expert weights of this model can run in FP8: {reasons}. Use fp8_experts=auto."
        )


def _warn_of_slow_experts(model: nn.Module, rows: list[Row], config: FP8Config, tokens: int | None) -> None:
    """With `fp8_experts=on`: name the experts that the cost model says are slower in FP8, with its numbers."""
    parents = dict.fromkeys(row.name.rpartition(".")[0] for row in rows if row.expert and row.converted)
    for parent in parents if config.experts == "on" and not config.emulate else ():
        module = model.get_submodule(parent)
        shape = next(p.shape for _, p in expert_parameters(module))
        work = _experts_per_token(model, shape[0]) * (tokens or ASSUMED_TOKENS)
        bf16, fp8 = _experts_seconds(module, config.recipe, work)
        if fp8 > bf16:
            logger.warning(
                "fp8_experts=on, but experts such as %s are slower in FP8: about %.2f ms forward and backward against "
                "%.2f ms in bf16, at %d tokens. Use fp8_experts=auto, or larger micro-batches.",
                parent,
                fp8 * 1e3,
                bf16 * 1e3,
                tokens or ASSUMED_TOKENS,
            )
            return


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


_TOP_K = ("num_experts_per_tok", "moe_topk", "top_k_experts")  # the last two: Aria, Gemma 4


def _experts_per_token(model: nn.Module, experts: int) -> int:
    """How many of `experts` work on a token: the router's top-k, from the model's configuration."""
    for module in model.modules():
        config = vars(module).get("config")
        if config is not None:
            text = config.get_text_config() if hasattr(config, "get_text_config") else config
            return next((int(k) for name in _TOP_K if (k := getattr(text, name, None))), experts)
    return experts


def matches(pattern: str, name: str, model: nn.Module) -> bool:
    """Whether a pattern of `fp8_skip` means the layer of this name, in or out of its PEFT wrapper."""
    return fnmatchcase(name, pattern) or fnmatchcase(plain_name(name, model), pattern)
