"""Measuring under `accelerate launch`: a run's launch environment, what ranks tell each other, FSDP2's traffic.

Everything here also works in a single process without a launcher.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

PATIENCE = timedelta(minutes=5)  # a rank that fails alone leaves the others waiting this long


def join(patience: timedelta = PATIENCE) -> None:
    """Take this rank's device, and its place in the process group, which then serves every run of the process."""
    PartialState(cpu=not torch.cuda.is_available(), **({"timeout": patience} if _launched() else {}))


def _launched() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def leave() -> None:
    """End the process group; other ranks may still be at work on their last run."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def sharded() -> bool:
    """Whether the launch config asks for FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def of_all_ranks(value: Any) -> list[Any]:
    """`value` of every rank, in rank order, on every rank. A collective; the value is pickled."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextmanager
def launch_config(
    *, fp8: bool, compiled: bool, options: Mapping[str, str] | None = None, **values: str
) -> Iterator[None]:
    """The environment that `accelerate launch` would have set up for one run, while its trainer is built and runs.

    `fp8`: keep what the launch config says about FP8; without it the run is one of mixed precision bf16.
    `options`: keys of `fsdp_config` and their values, over those of the launch config.
    `values`: other variables, without `ACCELERATE_` in front.

    Raises:
        ValueError: an option that the launch config could not have set either.
    """
    before = dict(os.environ)
    unknown = [key for key in options or {} if key.upper() not in before]
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)}: no option of this launch. Start with accelerate launch --config_file "
            "accelerate_configs/fsdp2.yaml, and name a key of fsdp_config."
        )
    if not fp8:
        for name in [name for name in os.environ if name.startswith("ACCELERATE_FP8_")]:
            del os.environ[name]
        values = {"MIXED_PRECISION": "bf16", **values}
    values = {
        "DYNAMO_BACKEND": "INDUCTOR" if compiled else "NO",
        "DYNAMO_USE_REGIONAL_COMPILATION": "true",
        **values,
    }
    os.environ.update({f"ACCELERATE_{name}": value for name, value in values.items()})
    # Every rank makes the same weights itself. Accelerate refuses the other way with its own FP8.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    os.environ.update({key.upper(): value for key, value in (options or {}).items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Traffic:
    """Bytes that FSDP2 sends from this rank to the others: all-gathers of weights, reduce-scatters of gradients.

    Of N ranks each sends its part to N - 1 others in an all-gather, and the parts of N - 1 others in a
    reduce-scatter; it receives as much. The few scalars of scales and norms are not counted.
    """

    def __init__(self) -> None:
        self.gathered = 0
        self.reduced = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Around whole steps. Blocks may be compiled: FSDP2's collectives run outside of the graphs."""
        gather, scatter = DefaultAllGather.__call__, DefaultReduceScatter.__call__

        def count_gather(comm: Any, output_tensor: Any, input_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self.gathered += output_tensor.nbytes - input_tensor.nbytes
            return gather(comm, output_tensor, input_tensor, *args, **kwargs)

        def count_scatter(comm: Any, output_tensor: Any, input_tensor: Any, *args: Any, **kwargs: Any) -> Any:
            self.reduced += input_tensor.nbytes - output_tensor.nbytes
            return scatter(comm, output_tensor, input_tensor, *args, **kwargs)

        DefaultAllGather.__call__, DefaultReduceScatter.__call__ = count_gather, count_scatter
        try:
            yield
        finally:
            DefaultAllGather.__call__, DefaultReduceScatter.__call__ = gather, scatter
