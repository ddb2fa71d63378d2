"""Checkpoints: ordinary Hugging Face models, and beside them what a resumed run needs.

A model that a trainer saves opens with plain `from_pretrained`, sharded or not: weights under the names that
`save_pretrained` uses, in the dtype the model was loaded in, gathered one parameter at a time. So does a checkpoint,
except under SHARDED_STATE_DICT, where its weights are in the stock shards alone. Beside the model files:

    optimizer.pt, optimizer.bin, optimizer_0/   one process and DDP, FULL_STATE_DICT, SHARDED_STATE_DICT
    pytorch_model_fsdp_0/                       the weights under SHARDED_STATE_DICT, instead of model files: what
                                                `accelerate merge-weights` and the stock Trainer read
    pytorch_model_fsdp.bin                      the fp32 masters under FSDP1 with FULL_STATE_DICT
    fp8_masters/                                under FSDP2, what a bf16 model's weights lack of its fp32 masters
                                                (`masters.py`)
    fp8_scaling.pt                              the delayed recipe's history and scales
    fp8_checkpoint.json                         the mark of a whole checkpoint, written last (`completeness.py`)

A checkpoint is read by what lies in the folder, not by how this run would write one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_fp8.scaling import ScalingState
from hf_fp8.sharding import reshard

logger = logging.getLogger(__name__)

SCALING_FILE = "fp8_scaling.pt"
FSDP_WEIGHTS = "pytorch_model_fsdp"
T = TypeVar("T")

# --- weights, out -------------------------------------------------------------------------------------------


def full_state_dict(model: nn.Module, dtypes: dict[str, torch.dtype], *, keep: bool) -> dict[str, Tensor]:
    """The state dict of a sharded model in CPU memory, in `dtypes`, on the ranks that `keep` it; {} on the others.

    Collective, one parameter at a time. Tied weights share their memory. Of a PEFT model only what its
    `save_pretrained` writes.
    """
    reshard(model)
    tensors = tensors_of(model)
    if isinstance(model, PeftModel):
        adapters = [get_peft_model_state_dict(model, dict(tensors), name) for name in model.peft_config]
        saved = [id(tensor) for adapter in adapters for tensor in adapter.values()]
        plain = {id(t) for t in tensors.values()}.issuperset(saved)
        if plain:  # else it derives tensors from others: keep all
            tensors = {name: t for name, t in tensors.items() if id(t) in saved}
    gathered: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in gathered:
            whole = whole_tensor(tensor, dtypes.get(name))
            gathered[id(tensor)] = whole.cpu() if keep else torch.empty(0)
        if keep:
            state[name] = gathered[id(tensor)]
    return state


def save_shards(model: nn.Module, dtypes: dict[str, torch.dtype], folder: str | Path) -> None:
    """Write the weights of a sharded model in `dtypes` where Accelerate does and reads them. Call on all ranks."""
    state = get_model_state_dict(model)
    rounded = {
        name: tensor.to(dtypes[name]).cpu()  # a GPU need not hold the copies
        for name, tensor in state.items()
        if isinstance(tensor, Tensor) and tensor.dtype != dtypes[name]
    }
    dcp.save(
        {"model": {**state, **rounded}},
        storage_writer=dcp.FileSystemWriter(Path(folder) / f"{FSDP_WEIGHTS}_0"),
    )


def dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in tensors_of(model).items()}


def refuse_sharded_save(model: nn.Module) -> None:
    """Make `model.save_pretrained(folder)` say what to do where it would fail on the shards."""
    if not isinstance(model, PreTrainedModel | PeftModel):
        return
    save = cast(Any, model).save_pretrained

    def save_pretrained(*args: Any, **kwargs: Any) -> None:
        if len(args) < 3 and kwargs.get("state_dict") is None:
            raise RuntimeError(
                "save_pretrained() of a sharded model sees only this rank's part of the weights. Call "
                "trainer.save_model(folder) on all ranks; in a loop of your own, model.save_pretrained(folder, "
                "state_dict=accelerator.get_state_dict(model), is_main_process=accelerator.is_main_process)."
            )
        save(*args, **kwargs)

    model.__dict__["save_pretrained"] = save_pretrained


def unwrap(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def plain_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The class that `model` had before it was sharded."""
    return next(
        c for c in type(model).__mro__ if issubclass(c, PreTrainedModel) and not issubclass(c, FSDPModule)
    )


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers themselves, so that tied ones are the same object."""
    return {k: v for k, v in model.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}


@torch.no_grad()
def whole_tensor(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A parameter or buffer in `dtype`, gathered if it is sharded. Collective then."""
    tensor = tensor.detach()
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    if not isinstance(tensor, DTensor):
        return tensor
    on_device = cast(DTensor, tensor.to(tensor.device_mesh.device_type))  # offloaded shards are on the CPU
    return on_device.full_tensor()


# --- weights, in --------------------------------------------------------------------------------------------


def has_model_files(folder: str | Path) -> bool:
    """Whether the folder holds the weights of a whole model (no adapter) for `from_pretrained`."""
    names = (
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    )
    return any((Path(folder) / name).is_file() for name in names)


def fsdp_format(folder: str | Path) -> str | None:
    """The state dict type of the FSDP weights in a checkpoint, if it has any."""
    if (Path(folder) / f"{FSDP_WEIGHTS}_0").is_dir():
        return "SHARDED_STATE_DICT"
    return "FULL_STATE_DICT" if (Path(folder) / f"{FSDP_WEIGHTS}.bin").is_file() else None


@contextmanager
def reading_as(accelerator: Accelerator, state_dict_type: str | None) -> Iterator[None]:
    """Let Accelerate read the format that a checkpoint is in, whatever this run writes."""
    if state_dict_type is None:
        yield
        return
    plugin = accelerator.state.fsdp_plugin
    fields = ("state_dict_type", "state_dict_config", "optim_state_dict_config")
    own = {name: getattr(plugin, name) for name in fields}
    plugin.state_dict_config = plugin.optim_state_dict_config = None
    plugin.set_state_dict_type(state_dict_type)
    try:
        yield
    finally:
        vars(plugin).update(own)


def load_weights(model: PreTrainedModel, folder: str | Path) -> None:
    """Copy the weights of a saved model into a live one, sharded or not, through `from_pretrained`.

    It reverts nothing by hand: names, layouts and ties of the file are transformers' business. Call on all ranks.

    Raises:
        ValueError: the files lack weights of this model, or hold them in other shapes.
    """
    fp32 = any(p.dtype == torch.float32 for p in model.parameters())
    dtype = torch.float32 if fp32 else model.dtype
    plain = plain_class(model)

    def read() -> dict[str, Tensor]:
        loaded, info = cast(Any, plain).from_pretrained(
            folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
        wrong = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
        if wrong:
            raise ValueError(
                f"{folder} is not a checkpoint of this model: no fitting weights for {wrong[0]!r}."
            )
        return loaded.state_dict()

    if not isinstance(model, FSDPModule):
        model.load_state_dict(read())
        return
    sharded: Any = model
    full: dict[str, Any] = on_rank_0(read) or {}
    offload = any(
        p.device.type != p.device_mesh.device_type for p in sharded.parameters() if isinstance(p, DTensor)
    )
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=offload)
    set_model_state_dict(sharded, full, options=options)


def load_fsdp_weights(model: nn.Module, folder: str | Path) -> None:
    """Copy the weights of an FSDP checkpoint into a model that is not sharded. Each rank reads for itself.

    Raises:
        torch.distributed.checkpoint.api.CheckpointException, RuntimeError: the files lack weights of this model.
    """
    folder = Path(folder)
    if isinstance(model, PeftModel):
        name = model.active_adapter
        model.load_adapter(str(folder if name == "default" else folder / name), name, is_trainable=True)
        return
    if fsdp_format(folder) == "FULL_STATE_DICT":
        model.load_state_dict(
            torch.load(folder / f"{FSDP_WEIGHTS}.bin", map_location="cpu", weights_only=True)
        )
        return
    state = {"model": model.state_dict()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder / f"{FSDP_WEIGHTS}_0"), no_dist=True)
    model.load_state_dict(state["model"])


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | Path) -> None:
    """Load optimizer state in any of the three formats, for any number of ranks. Call on all ranks."""
    folder, model = Path(folder), unwrap(model)
    if (folder / "optimizer_0").is_dir():
        sharded_state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(sharded_state, storage_reader=dcp.FileSystemReader(folder / "optimizer_0"))
        set_optimizer_state_dict(model, optimizer, sharded_state["optimizer"])
        return

    def read() -> dict[str, Any]:
        if (folder / "optimizer.bin").is_file():
            return torch.load(folder / "optimizer.bin", map_location="cpu", weights_only=True)
        saved = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
        names = _optimizer_names(model, optimizer)
        return {
            "state": {names[i]: value for i, value in saved["state"].items()},
            "param_groups": [{**g, "params": [names[i] for i in g["params"]]} for g in saved["param_groups"]],
        }

    sharded = isinstance(model, FSDPModule)
    state = (on_rank_0(read) or {}) if sharded else read()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=sharded)
    set_optimizer_state_dict(model, optimizer, state, options=options)


def _optimizer_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Parameter names in the order in which `optimizer.state_dict()` numbers them."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[p] for group in optimizer.param_groups for p in group["params"]]


# --- FP8 state ----------------------------------------------------------------------------------------------


def save_scaling(scaling: ScalingState, folder: str | Path, *, write: bool) -> None:
    """Write the delayed recipe's history and scales into a checkpoint folder. Call on all ranks, `write` on one."""
    state = scaling.state_dict()
    if write:
        torch.save(state, Path(folder) / SCALING_FILE)


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


# --- ranks -------------------------------------------------------------------------------------------------


def on_rank_0(fn: Callable[[], T]) -> T | None:
    """`fn()` on rank 0, None on the others; what it raises is raised on all ranks, so that none waits in vain."""
    if not dist.is_initialized():
        return fn()
    value, failure = None, [None]
    if dist.get_rank() == 0:
        try:
            value = fn()
        except Exception as error:
            failure = [error]  # type: ignore[list-item]
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise failure[0]
    return value


def from_rank_0(fn: Callable[[], T]) -> T:
    """`fn()` of rank 0, a small value, on all ranks."""
    value = [on_rank_0(fn)]
    if dist.is_initialized():
        dist.broadcast_object_list(value, src=0)
    return value[0]  # type: ignore[return-value]
