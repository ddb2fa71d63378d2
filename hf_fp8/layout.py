"""What a model looks like as an FP8 checkpoint, and the stream that makes one of its weights.

The format is the one that DeepSeek-V3 was published in and that transformers (`FineGrainedFP8Config`), vLLM and
SGLang read as `quant_method: fp8`: each block of 128 x 128 weights has one fp32 scale,

    name.weight             (N, K) e4m3
    name.weight_scale_inv   (N / 128, K / 128) fp32,    weight = e4m3 * scale_inv

and inputs are quantized at run time. A layer takes part if this package would convert it (`selection.py`) and every
reader can load it: a reader that finds another shape than it expects either stops or, worse, multiplies by the
wrong scale. What stays in high precision is named in `modules_to_not_convert`.

`fp8_layout` decides from a skeleton on the meta device; `quantize_weights` then maps a stream of full weights (of
`iter_full_weights`, or of files) to a stream of the checkpoint's tensors, one weight in memory at a time.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from posixpath import commonpath
from typing import Any

import torch
from torch import Tensor, nn
from torchao.float8.float8_utils import to_fp8_saturated
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import meta_device_safe_creation_ops
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.quantizers_utils import should_convert_module

from hf_fp8.adapters import base_of
from hf_fp8.casts import E4M3
from hf_fp8.checkpoint import plain_class, unwrap
from hf_fp8.config import FP8Config
from hf_fp8.report import Row
from hf_fp8.scaling import SMALLEST_AMAX
from hf_fp8.selection import check_patterns, judge, matches
from hf_fp8.streaming import weight_groups

BLOCK = 128

# Layers that vLLM loads into one matrix (`packed_modules_mapping` of its models), which it refuses if only some are
# quantized.
_FUSED = [
    frozenset(names.split())
    for names in (
        "q_proj k_proj v_proj",
        "query key value",
        "gate_proj up_proj",
        "w1 w3",
        "q_a_proj kv_a_proj_with_mqa",
        "in_proj_qkv in_proj_z",
        "in_proj_b in_proj_a",
    )
]


@dataclass(frozen=True)
class Layout:
    """Which weights of a model are stored in FP8, and every tensor of the checkpoint."""

    rows: list[Row]
    """A row for every layer that multiplies by a weight; `converted` means stored in FP8."""
    shapes: dict[str, torch.Size]
    """Of the full weights, in the order in which they are streamed."""
    quantized: frozenset[str]
    """Those of them that become FP8."""
    tensors: dict[str, Tensor]
    """Meta tensors in the shapes and dtypes of the checkpoint, in order."""
    not_converted: list[str]
    """Modules in high precision, by their names in the file and in the model."""

    @property
    def quantization_config(self) -> dict[str, Any]:
        """For `config.json`."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": self.not_converted,
        }


def skeleton(cls: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """A model without memory: its parameters are on the meta device."""
    with torch.device("meta"), meta_device_safe_creation_ops():
        return cls(copy.deepcopy(config))


def skeleton_of(model: PreTrainedModel) -> PreTrainedModel:
    """A skeleton of a live model, also a sharded one."""
    plain = skeleton(plain_class(model), model.config)
    if "_weight_conversions" in vars(model):  # it is saved under the names that it was loaded from
        plain._weight_conversions = vars(model)["_weight_conversions"]
    return plain


def rollout_layout(
    model: nn.Module, *, skip: Sequence[str] = (), dtype: torch.dtype = torch.bfloat16
) -> Layout:
    """What `quantize_weights` needs to make FP8 rollout weights of `iter_full_weights(model)`.

    The same for a model in training from its first update to its last: decide it once.

    Args:
        model: as for `iter_full_weights`; of a PEFT model, the base that its adapters are merged into.
        skip, dtype: as for `export_fp8`.

    Raises:
        ValueError: see `export_fp8`.
    """
    base = base_of(unwrap(model))
    if not isinstance(base, PreTrainedModel):
        raise ValueError(
            f"The FP8 format is that of transformers models, got {type(base).__name__}. Pass the model inside it, here "
            "and to iter_full_weights."
        )
    return fp8_layout(skeleton_of(base), skip=skip, dtype=dtype)


def fp8_layout(
    model: PreTrainedModel, *, skip: Sequence[str] = (), dtype: torch.dtype = torch.bfloat16
) -> Layout:
    """Decide for every weight of `model`, a `skeleton`.

    Args:
        skip: name patterns (glob) of layers to keep in high precision, as in `fp8_skip`.
        dtype: of what stays in high precision, except what transformers keeps in fp32.

    Raises:
        ValueError: a pattern that matches nothing, or a model without a layer that the format can hold.
    """
    config = FP8Config(skip=tuple(skip), convert_small=True, head="off")
    rows = judge(model, config)
    check_patterns(model, rows, config)
    groups = list(weight_groups(model))
    reasons = _reasons(model, rows, groups, config)
    rows = [
        replace(row, converted=not reasons[row.name], reason=reasons[row.name], fp8_flops=0.0) for row in rows
    ]
    if not any(row.converted for row in rows):
        found = "; ".join(sorted(set(reasons.values()))) or "no linear layer at all"
        raise ValueError(f"No layer of {type(model).__name__} can be stored in FP8: {found}.")
    stored = {_key(model, row): row.converted for row in rows}
    shapes, quantized, not_converted = {}, set(), {_module(model, row) for row in rows if not row.converted}
    tensors: dict[str, Tensor] = {}
    for names, weights in groups:
        fp32 = any(_stays_fp32(model, name, dtype) for name in names)
        for name, weight in weights.items():
            shapes[name] = weight.shape
            if stored.get(names[0]):
                quantized.add(name)
                tensors[name] = _meta(weight.shape, E4M3)
                tensors[f"{name}_scale_inv"] = _meta([n // BLOCK for n in weight.shape], torch.float32)
            else:
                high = torch.float32 if fp32 else dtype
                tensors[name] = _meta(weight.shape, high if weight.is_floating_point() else weight.dtype)
        if stored.get(names[0]) is False:
            not_converted.add(_module_in_file(list(weights)))
    return Layout(rows, shapes, frozenset(quantized), tensors, sorted(not_converted))


def quantize_weights(weights: Iterable[tuple[str, Tensor]], layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Full weights, in any order, to the tensors of the FP8 checkpoint: a scale follows its weight.

    Each weight is quantized from the values given, on the device where it is.

    Raises:
        ValueError: a weight that the layout does not have, of another shape, or not finite.
    """
    for name, weight in weights:
        if layout.shapes.get(name) != weight.shape:
            raise ValueError(
                f"{name!r} has shape {tuple(weight.shape)}, and a model of this configuration "
                f"{_described(layout.shapes.get(name))}. Layers that were added or replaced by hand cannot be exported."
            )
        if weight.is_floating_point() and not weight.isfinite().all():
            raise ValueError(
                f"{name!r} holds NaN or infinity. Export a checkpoint from before training diverged."
            )
        if name in layout.quantized:
            data, scale_inv = quantize_blocks(weight)
            yield name, data
            yield f"{name}_scale_inv", scale_inv
        else:
            yield name, weight.to(layout.tensors[name].dtype)


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(N, K) -> e4m3 of the same shape, and what to multiply it by: amax / 448 a block, fp32 (N / 128, K / 128)."""
    rows, columns = (size // BLOCK for size in weight.shape)
    blocks = weight.float().reshape(rows, BLOCK, columns, BLOCK)
    amax = blocks.abs().amax((1, 3))
    scale_inv = amax.clamp(min=SMALLEST_AMAX) / torch.finfo(E4M3).max
    data = to_fp8_saturated(blocks / scale_inv[:, None, :, None], E4M3)
    return data.reshape(weight.shape), scale_inv


# --- what the format and its readers can hold ----------------------------------------------------------------


Groups = list[tuple[list[str], dict[str, Tensor]]]


def _reasons(model: PreTrainedModel, rows: list[Row], groups: Groups, config: FP8Config) -> dict[str, str]:
    """Row name -> why it stays in high precision, empty if it does not."""
    written = {name: (names, weights) for names, weights in groups for name in names}
    reasons = {}
    for row in rows:
        key = _key(model, row)
        if not _is_expert(model, row):
            reason = row.reason.partition(" (")[0]  # without the flag
        else:
            reason = "fp8_skip" if any(matches(p, row.name, model) for p in config.skip) else ""
        reasons[row.name] = reason or _unfit(model, row, *written[key])
    for members in _together(model, rows):
        high = [name for name in members if reasons[name]]
        if high:
            reasons |= {
                n: f"loaded together with {high[0].rpartition('.')[2]}" for n in members if not reasons[n]
            }
    return reasons


def _unfit(model: PreTrainedModel, row: Row, names: list[str], weights: dict[str, Tensor]) -> str:
    """Why a layer that FP8 training would convert has no place in the format, empty if it has."""
    module = model.get_submodule(_module(model, row))
    if isinstance(module, Conv1D):
        return "Conv1D stores its weight transposed"
    if not should_convert_module(_module(model, row), list(model._keep_in_fp32_modules or ())):
        return "transformers keeps it in high precision"
    if _is_expert(model, row) and not _module(model, row).endswith(".experts"):
        return "transformers loads FP8 experts only from a module named experts"
    if len(names) > 1 or not all(name.endswith(".weight") and w.ndim == 2 for name, w in weights.items()):
        return (
            "its file does not hold it as one matrix"
            if not _is_expert(model, row)
            else ("its file holds all experts in one tensor")
        )
    if any(size % BLOCK for weight in weights.values() for size in weight.shape):
        return f"dimensions are not multiples of {BLOCK}"
    return ""


def _together(model: PreTrainedModel, rows: list[Row]) -> list[list[str]]:
    """Rows that a reader loads as one: all experts of a module, and what vLLM fuses."""
    sets: dict[tuple[str, Any], list[str]] = {}
    for row in rows:
        parent, _, leaf = row.name.rpartition(".")
        if _is_expert(model, row):
            sets.setdefault((parent, "experts"), []).append(row.name)
        for fused in _FUSED:
            if leaf in fused:
                sets.setdefault((parent, fused), []).append(row.name)
    return list(sets.values())


def _is_expert(model: PreTrainedModel, row: Row) -> bool:
    """Whether the row is a parameter of its own, not a module with a weight."""
    return row.name.rpartition(".")[2] in model.get_submodule(row.name.rpartition(".")[0])._parameters


def _key(model: PreTrainedModel, row: Row) -> str:
    """The row's weight in the state dict."""
    return row.name if _is_expert(model, row) else f"{row.name}.weight"


def _module(model: PreTrainedModel, row: Row) -> str:
    return row.name.rpartition(".")[0] if _is_expert(model, row) else row.name


def _module_in_file(names: list[str]) -> str:
    """The module that tensors of a file belong to: `a.experts` for `a.experts.0.w1.weight`, `a.experts.1.w1.weight`."""
    return commonpath([name.rpartition(".")[0].replace(".", "/") for name in names]).replace("/", ".")


def _stays_fp32(model: PreTrainedModel, name: str, dtype: torch.dtype) -> bool:
    """As `from_pretrained(dtype=dtype)` decides."""
    patterns = set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        patterns |= set(model._keep_in_fp32_modules or ())
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)


def _meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _described(shape: torch.Size | None) -> str:
    return "has no such weight" if shape is None else f"expects {tuple(shape)}"
