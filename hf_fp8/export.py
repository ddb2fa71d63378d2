"""`export_fp8`: an FP8 checkpoint for inference, of a model in training or of a folder of weights.

The format is described in `layout.py`. Weights are quantized once, from the values that training holds (fp32 masters
under FSDP2), one at a time, and written in shards as they come. Then the folder is loaded with plain transformers,
which turns FP8 weights back into high precision on a CPU, and compared with the source.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import FineGrainedFP8Config, PreTrainedModel

from hf_fp8.checkpoint import from_rank_0, on_rank_0
from hf_fp8.layout import Layout, fp8_layout, quantize_weights
from hf_fp8.report import Row, table
from hf_fp8.sources import INDEX, WEIGHTS, FolderSource, ModelSource, Source, is_main

# Rounding to e4m3 is off by at most 1/16 of a weight, or by 2**-10 of the scale of its block where it is tiny.
LARGEST_ERROR = 0.07


@dataclass(frozen=True)
class ExportReport:
    """What was written. `str()` is a short table."""

    path: Path
    rows: list[Row]
    """Every layer that multiplies by a weight; `converted` means stored in FP8."""
    bytes_before: int
    """Of all weights as they were given."""
    bytes_after: int
    """Of all tensors of the checkpoint."""
    dtype: torch.dtype
    """Of what stays in high precision."""
    weight_error: float | None = None
    """The largest relative error (norm ratio) of a reloaded weight. None for `check=False`."""
    logit_error: float | None = None
    """Relative error (norm ratio) of the reloaded model's output for random tokens, against the high-precision model.
    None if `note` says why it was not taken."""
    note: str = ""

    @property
    def quantized(self) -> list[Row]:
        return [row for row in self.rows if row.converted]

    @property
    def kept(self) -> list[Row]:
        return [row for row in self.rows if not row.converted]

    def __str__(self) -> str:
        error = self.note if self.logit_error is None else f"relative logit error {self.logit_error:.2%}"
        summary = (
            f"FP8 checkpoint {self.path}: {len(self.quantized)} of {len(self.rows)} layers in FP8, "
            f"{self.bytes_before / 1e6:,.1f} MB became {self.bytes_after / 1e6:,.1f} MB, {error}"
        )
        return "\n".join([summary, *table(self.rows, "stored as", str(self.dtype).removeprefix("torch."))])


def export_fp8(
    model_or_dir: nn.Module | str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    skip: Sequence[str] = (),
    dtype: torch.dtype = torch.bfloat16,
    check: bool = True,
    max_shard_size: int | str = "5GB",
    processing_class: Any = None,
) -> ExportReport:
    """Write an FP8 checkpoint (e4m3 in blocks of 128 x 128) that transformers and vLLM load.

    Layers that FP8 training would convert are stored in FP8 if the format can hold them; the report names the others
    and why. Call it on all ranks: rank 0 writes, and every rank gets the report or the error.

    Args:
        model_or_dir: a transformers model, plain or converted by this package, in DDP or under FSDP2; or a folder with
            a high-precision checkpoint in safetensors, whose tokenizer and processor files are copied too.
        out_dir: a new or empty folder.
        skip: name patterns (glob) of layers to keep in high precision, as in `fp8_skip`.
        dtype: of what stays in high precision, except what transformers always keeps in fp32.
        check: load the result on the CPU and compare weights and logits. Needs memory for two models there, on rank 0,
            while the other ranks wait.
        max_shard_size: of a file, for example "5GB". About as much is held in memory at a time.
        processing_class: tokenizer or processor to save beside a model.

    Raises:
        ValueError: the source has adapters, is quantized or has no layer that fits the format; a pattern in `skip`
            matches nothing; `out_dir` holds files; a weight is not finite. Nothing is left in `out_dir`.
        RuntimeError: the reloaded checkpoint is not what was written. It is left for inspection.
    """
    options = (Path(out_dir), tuple(skip), dtype, check, max_shard_size)
    if isinstance(model_or_dir, nn.Module):
        return _export(ModelSource(model_or_dir, processing_class), *options, collective=True)
    folder = Path(model_or_dir)
    return from_rank_0(lambda: _export(FolderSource(folder), *options, collective=False))


def _export(
    source: Source,
    out: Path,
    skip: tuple[str, ...],
    dtype: torch.dtype,
    check: bool,
    max_shard_size: int | str,
    *,
    collective: bool,
) -> ExportReport:
    """`collective`: every rank is here, not only rank 0."""
    lead: Callable[[Callable[[], Any]], Any] = on_rank_0 if collective else lambda fn: fn()
    layout = fp8_layout(source.skeleton, skip=skip, dtype=dtype)
    lead(lambda: _refuse_used(out))
    weights = source.weights(layout)

    def write() -> ExportReport:
        try:
            return _write(source, weights, layout, out, dtype, max_shard_size)
        finally:
            if collective:
                deque(weights, maxlen=0)  # the other ranks gather to the end, also after an error here

    if collective and not is_main():
        deque(weights, maxlen=0)
    report = lead(write)
    if check:
        state = source.state()
        report = lead(lambda: _checked(report, source, state))
    return from_rank_0(lambda: report) if collective else report


# --- writing ------------------------------------------------------------------------------------------------


def _refuse_used(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = f"holds {sorted(p.name for p in out.iterdir())[0]}" if out.is_dir() else "is a file"
        raise ValueError(f"{out} {what}. An export goes to a new or empty folder.")


def _write(
    source: Source,
    weights: Iterator[tuple[str, Tensor]],
    layout: Layout,
    out: Path,
    dtype: torch.dtype,
    max_shard_size: int | str,
) -> ExportReport:
    """`config.json` is written last: without it a folder does not open."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        before = _write_weights(weights, layout, out, max_shard_size)
        source.save_companions(out)
        config = source.skeleton.config
        config.architectures = [source.cls.__name__]
        for part in (config, *(getattr(config, name) for name in config.sub_configs)):
            if part is not None:
                part.dtype = dtype
        config.quantization_config = layout.quantization_config
        config.save_pretrained(out)
    except BaseException:
        shutil.rmtree(out)
        raise
    after = sum(tensor.nbytes for tensor in layout.tensors.values())
    return ExportReport(out, layout.rows, before, after, dtype, note="not checked")


def _write_weights(
    weights: Iterator[tuple[str, Tensor]], layout: Layout, out: Path, max_shard_size: int | str
) -> int:
    """Writes each file when its last tensor has come; returns the bytes that came in."""
    split = split_torch_state_dict_into_shards(layout.tensors, max_shard_size=max_shard_size)
    shards: dict[str, dict[str, Tensor]] = {name: {} for name in split.filename_to_tensors}
    before = 0

    def counted() -> Iterator[tuple[str, Tensor]]:
        nonlocal before
        for name, weight in weights:
            before += weight.nbytes
            yield name, weight

    for name, tensor in quantize_weights(counted(), layout):
        file = split.tensor_to_filename[name]
        shards[file][name] = tensor.cpu().contiguous()
        if len(shards[file]) == len(split.filename_to_tensors[file]):
            save_file(shards.pop(file), out / file, metadata={"format": "pt"})
    if shards:
        missing = next(n for n in layout.tensors if split.tensor_to_filename[n] in shards)
        raise ValueError(f"The model has no {missing!r}, which a model of its configuration saves.")
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return before


# --- checking -----------------------------------------------------------------------------------------------


def _checked(report: ExportReport, source: Source, state: dict[str, Tensor]) -> ExportReport:
    """Load the checkpoint as a user would, and compare it with the high-precision `state`."""
    out = report.path
    file = out / (INDEX if (out / INDEX).is_file() else WEIGHTS)
    model, info = cast(Any, source.cls).from_pretrained(
        out,
        dtype=source.dtype,
        quantization_config=FineGrainedFP8Config(dequantize=True),
        output_loading_info=True,
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise RuntimeError(
                f"transformers reports {kind.replace('_', ' ')} for the exported {file}: {sorted(info[kind])[0]!r}."
            )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(source.dtype)  # transformers 5.19 leaves routers in bf16
    errors = {
        name: relative_error(tensor, state[name])
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point()
    }
    worst = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))
    if not errors[worst] <= LARGEST_ERROR:
        raise RuntimeError(
            f"{worst!r} of the exported {file} is off by {errors[worst]:.2%} (norm ratio) when transformers loads it, "
            f"where FP8 allows {LARGEST_ERROR:.0%}."
        )
    if source.cls.main_input_name != "input_ids":
        note = f"logits not compared: the model takes {source.cls.main_input_name}, not tokens"
        return replace(report, weight_error=errors[worst], note=note)
    found = _logits(model)
    model.load_state_dict(state)
    error = relative_error(found, _logits(model))
    if not found.isfinite().all():
        raise RuntimeError(
            f"The model that transformers loads from {file} computes logits that are not finite."
        )
    return replace(report, weight_error=errors[worst], logit_error=error, note="")


def _logits(model: PreTrainedModel) -> Tensor:
    """The model's output for two random sequences of 32 tokens, always the same."""
    vocabulary = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    # Tokens that stand for images come late in a vocabulary.
    ids = torch.randint(0, min(vocabulary, 1000), (2, 32), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})}
    with torch.no_grad():
        output = model(**inputs)
    return output["logits"] if "logits" in output else output[0]


def relative_error(found: Tensor, right: Tensor) -> float:
    """Norm of the difference over the norm of what is right."""
    right = right.double()
    difference = (found.double() - right).norm()
    return (difference / right.norm()).item() if difference else 0.0
