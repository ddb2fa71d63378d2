"""FP8 state beside the model: a small file of its own, so that model checkpoints stay ordinary ones."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from hf_fp8.scaling import ScalingState

logger = logging.getLogger(__name__)

SCALING_FILE = "fp8_scaling.pt"


def save_scaling(scaling: ScalingState, folder: str | Path, *, write: bool) -> None:
    """Write the delayed recipe's history and scales into a checkpoint folder. Call on all ranks, `write` on one."""
    state = scaling.state_dict()
    if write:
        path = Path(folder) / SCALING_FILE
        torch.save(state, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)


def load_scaling(scaling: ScalingState, folder: str | Path) -> None:
    """Restore what `save_scaling` wrote. A checkpoint of another recipe has none: training calibrates anew.

    Raises:
        ValueError: the state belongs to a model with other converted modules.
    """
    path = Path(folder) / SCALING_FILE
    if not path.exists():
        logger.warning(
            "%s holds no FP8 scaling state (another recipe, or bf16): scales are calibrated anew.", folder
        )
        return
    scaling.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
