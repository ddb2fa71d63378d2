"""`FP8Config`: the one source of truth for every FP8 option.

Flags (`FP8TrainingArguments`), Python (`FP8Config(...)`) and an Accelerate launch file
(`FP8Config.from_launch()`) all end in the same frozen object. This is the only file of the package that
reads FP8 environment variables.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
import yaml

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"]
Switch = Literal["auto", "on", "off"]

DEFAULT_RECIPE: Recipe = "delayed"
LAUNCH_PREFIX = "ACCELERATE_FP8_"
# Keys that Accelerate's launcher exports on its own for `mixed_precision: fp8` (accelerate 1.15,
# `commands/launch.py`, group "FP8 Arguments") and that mean nothing here.
_FOREIGN_KEYS = frozenset(
    "use_autocast_during_eval margin interval format amax_compute_algo override_fprop override_dgrad "
    "override_wgrad opt_level use_mxfp8_block_scaling pad_inner_dim".split()
)
# The launcher exports this history length even where the file says nothing, so it cannot be told from silence.
_LAUNCHER_HISTORY_LEN = 1024


@dataclass(frozen=True)
class FP8Config:
    """Everything that decides how a model is trained in FP8.

    Raises:
        ValueError: an unknown value or a combination that cannot work; the message names the remedy.
    """

    enabled: bool = True
    """Train in FP8. Off: the same trainer in bf16, with nothing converted."""
    recipe: Recipe = DEFAULT_RECIPE
    """How scales are chosen: see the recipe guide in the README."""
    skip: tuple[str, ...] = ()
    """Module-name patterns (glob) that stay in high precision. One that matches nothing is an error."""
    convert_small: bool = False
    """Also convert layers whose shape makes FP8 slower than bf16."""
    head: Switch = "auto"
    """LM head GEMMs in FP8. `auto`: with the delayed recipe, unless the head is tied to the input embedding."""
    all_gather: Switch = "auto"
    """FSDP2 gathers weights as FP8: half the bytes of bf16."""
    emulate: bool = False
    """Compute the FP8 GEMMs in float32 on rounded operands: exact semantics without FP8 hardware, slow."""
    amax_history_len: int = 16
    """Delayed recipe: optimizer steps whose largest amax sets the scale."""
    amax_margin: int = 1
    """Delayed recipe: headroom in powers of two, scale = fp8_max / (amax * 2**margin)."""
    amax_sync: bool = True
    """Delayed recipe: share amax over the data-parallel ranks, one all-reduce per optimizer step."""
    weight_cache: Switch = "auto"
    """Keep FP8 copies of the weights (`delayed`), or of each rank's shards under FSDP2, for the whole optimizer step:
    1 byte a parameter. `auto`: where a copy is read more than once: with gradient accumulation, activation
    checkpointing or FSDP2, of frozen weights and of experts."""
    experts: Switch = "auto"
    """Mixture-of-experts GEMMs in FP8."""

    def __post_init__(self) -> None:
        for name, choices in (("recipe", get_args(Recipe)), *((n, get_args(Switch)) for n in _SWITCHES)):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"fp8_{name}={getattr(self, name)!r} is not known. Use one of: {', '.join(choices)}."
                )
        if isinstance(self.skip, str) or not all(isinstance(p, str) and p for p in self.skip):
            raise ValueError(
                f"fp8_skip={self.skip!r} must be a list of module-name patterns, "
                'for example --fp8_skip "*.down_proj" "model.layers.0.*".'
            )
        object.__setattr__(self, "skip", tuple(self.skip))
        for name in ("enabled", "convert_small", "emulate", "amax_sync"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"fp8_{name}={getattr(self, name)!r} must be true or false.")
        if not isinstance(self.amax_history_len, int) or self.amax_history_len < 1:
            raise ValueError(
                f"fp8_amax_history_len={self.amax_history_len!r} must be a whole number of at least 1."
            )
        if not isinstance(self.amax_margin, int) or not 0 <= self.amax_margin <= 8:
            raise ValueError(
                f"fp8_amax_margin={self.amax_margin!r} must be a whole number from 0 to 8: it is a power of two."
            )
        if self.recipe.startswith("rowwise") and self.all_gather == "on":
            raise ValueError(
                f"fp8_all_gather=on does not work with fp8_recipe={self.recipe}: a gathered FP8 weight has one scale, "
                "a rowwise weight has one a row. Use fp8_all_gather=auto, or fp8_recipe=tensorwise or delayed."
            )

    @classmethod
    def from_launch(cls, **overrides: Any) -> FP8Config:
        """The configuration that `accelerate launch` passed to this process (`fp8_config:` of its file).

        `overrides` win over the file; an override of None means "not said".

        Raises:
            ValueError: a key under `fp8_config:` that neither this package nor Accelerate knows, or a
                backend other than AO.
        """
        explicit = {k: _switch(k, v) for k, v in overrides.items() if v is not None}
        said = {**_launch_values(), **explicit}
        return cls(**said)

    def check_hardware(self, device: torch.device) -> None:
        """Raise `RuntimeError` where FP8 GEMMs cannot run on `device` and `emulate` is off.

        FP8 tensor cores need CUDA compute capability 8.9 (Ada) or 9.0 and newer (Hopper, Blackwell).
        """
        if not self.enabled or self.emulate:
            return
        if device.type != "cuda":
            raise RuntimeError(
                f"FP8 needs an NVIDIA GPU of compute capability 8.9 or newer, but training runs on {device.type!r}. "
                "Pass --fp8_emulate true (slow, same numerics) to test here, or --fp8 false to train in bf16."
            )
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < (8, 9):
            raise RuntimeError(
                f"FP8 needs an NVIDIA GPU of compute capability 8.9 or newer, but {torch.cuda.get_device_name(device)} "
                f"has {major}.{minor}. Pass --fp8 false to train in bf16, or --fp8_emulate true to test slowly."
            )


_SWITCHES = ("head", "all_gather", "weight_cache", "experts")


def launch_mixed_precision() -> str:
    """The `mixed_precision` that `accelerate launch` set for this process, `"no"` without a launcher."""
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()


def keep_accelerate_from_converting() -> None:
    """Make sure that Accelerate converts nothing itself.

    `Accelerator.fp8_backend` reads `ACCELERATE_FP8_BACKEND` at every call, even when its mixed precision is
    bf16 (accelerate 1.15), and would convert the model a second time.
    """
    if LAUNCH_PREFIX + "BACKEND" in os.environ:
        os.environ[LAUNCH_PREFIX + "BACKEND"] = "NO"


def _launch_values() -> dict[str, Any]:
    """Fields of `FP8Config` that the launcher's environment sets."""
    known = {field.name for field in fields(FP8Config)} - {"enabled"}
    said: dict[str, Any] = {}
    for variable, text in os.environ.items():
        if not variable.startswith(LAUNCH_PREFIX):
            continue
        key = variable.removeprefix(LAUNCH_PREFIX).lower()
        # A pattern such as *.down_proj would be an alias to YAML; only a list is YAML here.
        value = text if key == "skip" and not text.startswith("[") else yaml.safe_load(text)
        if key == "backend":
            if text.upper() not in ("AO", "NO"):
                raise ValueError(
                    f"fp8_config.backend is {text!r}, but hf_fp8 runs on torchao. Set `backend: AO` in the launch "
                    "config (or leave it out), or train with the stock Trainer for Transformer Engine or MS-AMP."
                )
        elif key == "enable_fsdp_float8_all_gather":
            if value is False:  # the launcher's default is true
                said.setdefault("all_gather", "off")
        elif key in _FOREIGN_KEYS or (key, value) == ("amax_history_len", _LAUNCHER_HISTORY_LEN):
            continue
        elif key not in known:
            raise ValueError(
                f"fp8_config.{key} in the launch config is not an option of hf_fp8. "
                f"Known: {', '.join(sorted(known))}."
            )
        else:
            said[key] = _typed(key, value)
    return said


def _typed(key: str, value: Any) -> Any:
    if key == "skip":
        patterns = value.split(",") if isinstance(value, str) else (value or ())
        return tuple(text for pattern in patterns if (text := str(pattern).strip()))
    return _switch(key, value)


def _switch(key: str, value: Any) -> Any:
    """YAML, of a launch config or of an arguments file, reads a bare on/off as a boolean."""
    if key in _SWITCHES and isinstance(value, bool):
        return "on" if value else "off"
    return value
