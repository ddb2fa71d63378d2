"""`generate` of a model under FSDP2, as RL trainers call it between updates."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method


def let_generate(model: nn.Module, before: Callable[[], None]) -> None:
    """Make `generate` of `model`, an FSDP2 root, gather its weights on all ranks alike.

    A wrapper (PEFT, a value head) generates with the model inside it, whose calls pass no hooks of the root: the whole
    call counts as a forward of the root. (A rank whose texts have ended goes on until those of all ranks have:
    transformers does so for a module that FSDP manages.)

    Args:
        before: called first, as a forward of the model would call it: FSDP2 must see the hooks of the FP8 gather.
    """
    if not callable(getattr(type(model), "generate", None)):
        return
    register_fsdp_forward_method(model, "generate")
    gathered: Any = model.generate

    @wraps(gathered)
    def generate(*args: Any, **kwargs: Any) -> Any:
        before()
        return gathered(*args, **kwargs)

    model.generate = generate  # type: ignore[assignment]
