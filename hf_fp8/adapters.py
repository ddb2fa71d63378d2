"""PEFT adapters on a converted base: what merging them into the base does to its FP8 layers.

PEFT gives back the layer that it wrapped, and writes merged weights through `weight.data`, which leaves no
trace that `WeightScales` could see. It has no hook for either, so the methods of the model's tuner are
extended.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from hf_fp8.linear import revert


def follow_adapters(model: nn.Module, refresh: Callable[[], None]) -> None:
    """Make `merge_and_unload` and `unload` return plain layers, and call `refresh` after adapters are merged in place.

    Nothing to do for a model without adapters.
    """
    for module in model.modules():
        if isinstance(module, BaseTuner):
            tuner = cast(Any, module)
            for name in ("merge_and_unload", "unload"):
                setattr(tuner, name, partial(_unload, getattr(tuner, name)))
            for name in ("merge_adapter", "unmerge_adapter"):
                setattr(tuner, name, partial(_merge, getattr(tuner, name), refresh))


def _unload(unload: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    return revert(unload(*args, **kwargs))


def _merge(merge: Callable[..., None], refresh: Callable[[], None], *args: Any, **kwargs: Any) -> None:
    merge(*args, **kwargs)
    refresh()
