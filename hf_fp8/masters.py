"""fp32 masters in a checkpoint whose weights are in the dtype of the model: the bits that this dtype does not hold.

Under FSDP2 a model that was loaded in bf16 trains on fp32 masters. Its checkpoint holds each weight once, in bf16, as
every tool expects it, and a resumed run must go on from the same masters bit for bit. So the other bits are kept in a
folder of their own, as part of what only a resumed run needs, like the optimizer's moments: of bf16 weights 17 bits
each (an fp32 weight and one bit in all, where a second copy in fp32 would make 48), a little more of vectors.

Rounding to nearest even is no cut through the middle of the word: as integers, master and rounded weight differ by
-32768 to 32768, one more than 16 bits tell apart.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)

FOLDER = "fp8_masters"
_POWERS = (1, 2, 4, 8, 16, 32, 64, 128)


def remainder(master: Tensor, dtype: torch.dtype) -> Tensor:
    """What `master.to(dtype)` loses.

    Args:
        master: fp32, shape (rows, ...).
        dtype: bf16, or another of at most 32 bits.

    Returns:
        uint8, shape (rows, bytes): of bf16 the low 16 bits of the difference of both as integers, then one bit a
        weight for differences of 32768; of other dtypes the whole difference.
    """
    rows = _rows(master.contiguous())
    difference = rows.view(torch.int32) - rows.to(dtype).float().view(torch.int32)
    if dtype != torch.bfloat16:
        return difference.view(torch.uint8)
    highest = torch.nn.functional.pad(difference == 32768, (0, -rows.shape[1] % 8)).unflatten(1, (-1, 8))
    bits = (highest * torch.tensor(_POWERS, dtype=torch.uint8, device=rows.device)).sum(-1, dtype=torch.uint8)
    return torch.cat([difference.to(torch.int16).view(torch.uint8), bits], dim=1)


def restore(weight: Tensor, lost: Tensor) -> None:
    """Make the fp32 `weight`, which holds rounded values, in place the master that `remainder` gave `lost` for."""
    if weight.numel() == 0:
        return
    rows = _rows(weight)
    columns = rows.shape[1]
    if lost.shape[1] == 4 * columns:
        difference = lost.view(torch.int32)
    else:
        low, bits = lost[:, : 2 * columns].contiguous(), lost[:, 2 * columns :]
        powers = torch.tensor(_POWERS, dtype=torch.uint8, device=lost.device)
        highest = (bits.unsqueeze(-1) & powers).ne(0).flatten(1)[:, :columns]
        difference = low.view(torch.int16).int() + (highest.int() << 16)
    rows.view(torch.int32).add_(difference)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.view(tensor.shape[0], math.prod(tensor.shape[1:]))


@torch.no_grad()
def save_masters(state: dict[str, Tensor], dtypes: dict[str, torch.dtype], folder: str | Path) -> None:
    """Write what the weights of a checkpoint lose of the masters in `state`, if anything. Call on all ranks.

    Args:
        state: parameters and buffers by name, sharded along their first dimension or whole.
        dtypes: in which they are saved.
    """
    lost = {}
    for name, master in _once(state).items():
        if master.dtype == torch.float32 != dtypes[name]:
            lost[name] = _like(remainder(_local(master), dtypes[name]), master).cpu()
    if lost:
        dcp.save(lost, storage_writer=dcp.FileSystemWriter(Path(folder) / FOLDER))


@torch.no_grad()
def load_masters(state: dict[str, Tensor], folder: str | Path) -> None:
    """Give fp32 weights, loaded from a checkpoint, the bits that it keeps beside them. Call on all ranks."""
    path = Path(folder) / FOLDER
    if not path.is_dir():
        return
    reader = dcp.FileSystemReader(path)
    entries = reader.read_metadata().state_dict_metadata
    found: dict[str, Tensor] = {}
    for name, master in _once({name: state[name] for name in entries if name in state}).items():
        if master.dtype == torch.float32:
            width = cast(TensorStorageMetadata, entries[name]).size[1]
            rows = torch.zeros(len(_local(master)), width, dtype=torch.uint8)
            found[name] = _like(rows, master).cpu()
    sharded = any(isinstance(tensor, DTensor) for tensor in found.values())
    dcp.load(cast(dict[str, object], found), storage_reader=reader, no_dist=not sharded)
    for name, lost in found.items():
        weight = _local(state[name])
        restore(weight, _local(lost).to(weight.device))


def warn_of_rounded_masters(folder: str | Path) -> None:
    """For a run that cannot put a checkpoint's masters together."""
    if (Path(folder) / FOLDER).is_dir():
        logger.warning(
            "%s was saved under FSDP2 by a model with fp32 masters: FSDP1 goes on from its rounded weights. "
            "Resume with fsdp_version 2 to go on from the masters.",
            folder,
        )


def _once(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` without further names of the same tensor: the first stays."""
    first: dict[Tensor, str] = {}
    for name, tensor in state.items():
        first.setdefault(tensor, name)
    return {name: tensor for tensor, name in first.items()}


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _like(local: Tensor, master: Tensor) -> Tensor:
    """`local`, the rows of this rank, sharded as `master` is; on the device of the mesh."""
    if not isinstance(master, DTensor):
        return local
    size = torch.Size([master.shape[0], local.shape[1]])
    return DTensor.from_local(
        local, master.device_mesh, master.placements, run_check=False, shape=size, stride=(size[1], 1)
    )
