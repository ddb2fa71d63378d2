"""`FP8TrainingArguments`: the command-line flags, each one field of `FP8Config`.

Flags left out stay None until construction and are then filled from the launch config, so that an
explicit flag wins over the file and both end in the same `FP8Config`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, Optional

from transformers import TrainingArguments

from hf_fp8.config import FP8Config, launch_mixed_precision

# HfArgumentParser lets only a boolean with a default stand without a value: `--fp8_emulate`.
_SWITCH: dict[str, Any] = {"nargs": "?", "const": True}


@dataclass
class FP8ArgumentsMixin:
    """FP8 flags for any `TrainingArguments`: `class FP8SFTConfig(FP8ArgumentsMixin, SFTConfig)`."""

    # HfArgumentParser reads these annotations at run time and knows Optional, not `X | None`, on Python 3.10.
    fp8: Optional[bool] = field(  # noqa: UP045
        default=None, metadata={"help": "Train in FP8 (default: true).", **_SWITCH}
    )
    fp8_recipe: Optional[Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"]] = field(  # noqa: UP045
        default=None, metadata={"help": "How FP8 scales are chosen; see the recipe guide."}
    )
    fp8_skip: Optional[list[str]] = field(  # noqa: UP045
        default=None, metadata={"help": "Module-name patterns (glob) that stay in high precision."}
    )
    fp8_convert_small: Optional[bool] = field(  # noqa: UP045
        default=None,
        metadata={"help": "Also convert layers where FP8 is slower than bf16 (default: false).", **_SWITCH},
    )
    fp8_head: Optional[Literal["auto", "on", "off"]] = field(  # noqa: UP045
        default=None, metadata={"help": "LM head GEMMs in FP8 (default: auto, with `delayed`)."}
    )
    fp8_all_gather: Optional[Literal["auto", "on", "off"]] = field(  # noqa: UP045
        default=None, metadata={"help": "FSDP2 gathers weights as FP8 (default: auto)."}
    )
    fp8_emulate: Optional[bool] = field(  # noqa: UP045
        default=None,
        metadata={"help": "Emulate FP8 GEMMs on hardware without them (default: false).", **_SWITCH},
    )
    fp8_amax_history_len: Optional[int] = field(  # noqa: UP045
        default=None, metadata={"help": "Delayed recipe: optimizer steps of amax history."}
    )
    fp8_amax_margin: Optional[int] = field(  # noqa: UP045
        default=None, metadata={"help": "Delayed recipe: headroom of the scale in powers of two."}
    )
    fp8_amax_sync: Optional[bool] = field(  # noqa: UP045
        default=None,
        metadata={"help": "Delayed recipe: share amax over data-parallel ranks (default: true).", **_SWITCH},
    )
    fp8_weight_cache: Optional[Literal["auto", "on", "off"]] = field(  # noqa: UP045
        default=None,
        metadata={"help": "Keep FP8 copies of weights or shards for a whole optimizer step (default: auto)."},
    )
    fp8_experts: Optional[Literal["auto", "on", "off"]] = field(  # noqa: UP045
        default=None, metadata={"help": "Mixture-of-experts GEMMs in FP8 (default: auto)."}
    )
    fp8_offload_optimizer: bool = field(
        default=False,
        metadata={
            "help": "One GPU: Adam's state lives and steps on the CPU (torchao). Needs --max_grad_norm 0."
        },
    )
    fp8_ref_model: bool = field(
        default=False,
        metadata={"help": "TRL: run the reference model in FP8, too. It stays in high precision otherwise."},
    )
    torch_compile_regional: bool = field(
        default=True,
        metadata={
            "help": "With --torch_compile: compile each repeated block; false compiles the whole model."
        },
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # One without fields of its own needs no decorator; one with fields is a dataclass only with it.
        if "__annotations__" not in vars(cls):
            dataclass(cls)

    def __post_init__(self) -> None:
        said = {name: getattr(self, flag) for flag, name in _FLAGS.items()}
        config = FP8Config.from_launch(**said)
        for flag, name in _FLAGS.items():
            setattr(self, flag, list(config.skip) if name == "skip" else getattr(config, name))
        super().__post_init__()  # type: ignore[misc]  # the TrainingArguments beside this mixin
        self._set_compute_dtype()

    def _set_compute_dtype(self) -> None:
        """bf16 around the FP8 GEMMs, whatever spelling of mixed precision asked for it."""
        args: Any = self
        if not self.fp8:
            if launch_mixed_precision() == "fp8" and args.mixed_precision == "fp8":
                args.mixed_precision = "bf16"
            return
        if args.fp16 or args.mixed_precision == "fp16":
            where = "--fp16" if args.fp16 else "mixed_precision: fp16 in the launch config"
            raise ValueError(
                f"{where} contradicts FP8 training, which computes in bf16 around the FP8 GEMMs. "
                "Drop it (bf16 is set for you), or pass --fp8 false."
            )
        if args.fp16_full_eval:
            raise ValueError(
                "--fp16_full_eval contradicts FP8 training, which evaluates in bf16. Drop the flag."
            )
        args.mixed_precision = "bf16"

    @property
    def fp8_config(self) -> FP8Config:
        """The `FP8Config` of the flags as they are now, also after an attribute was set in Python."""
        values = {name: getattr(self, flag) for flag, name in _FLAGS.items()}
        return FP8Config.from_launch(**values)


def _flag(name: str) -> str:
    return "fp8" if name == "enabled" else f"fp8_{name}"


_FLAGS = {_flag(f.name): f.name for f in fields(FP8Config)}


@dataclass
class FP8TrainingArguments(FP8ArgumentsMixin, TrainingArguments):
    """`TrainingArguments` with the FP8 flags.

    Raises:
        ValueError: an unknown value, or flags that contradict each other or the launch config.
    """
