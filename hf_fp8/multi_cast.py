"""All FP8 weight copies of a model, cast by one kernel launch.

Once per optimizer step every weight is cast with its new scale. One by one the launches of a few hundred casts
cost more host time than the GPU needs for the work, which shows wherever the host is not ahead of the GPU
(small models, a loss read at every step).
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from hf_fp8.casts import E4M3, cast_saturating

_HAS_KERNEL = torch.cuda.is_available() and has_triton()
_CHUNK = 32768  # elements that one program of the kernel casts


class MultiCast:
    """`target.copy_(saturating cast of source * scale)` for lists of tensors.

    What the kernel must know of the tensors is kept from call to call, as long as they stay where they are.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[int, int, int, torch.dtype]] = []
        self._tables: list[_Table] = []

    def __call__(self, sources: list[Tensor], targets: list[Tensor], scales: Tensor) -> None:
        """Sources of any float dtype, targets e4m3 of the same shapes, `scales` fp32 (number of tensors,)."""
        if not sources:
            return
        if not _HAS_KERNEL or not all(_flat(s) and _flat(t) for s, t in zip(sources, targets, strict=True)):
            for source, target, scale in zip(sources, targets, scales.unbind(), strict=True):
                target.copy_(cast_saturating(source, scale, E4M3))
            return
        seen = [(s.data_ptr(), t.data_ptr(), s.numel(), s.dtype) for s, t in zip(sources, targets)]
        if seen != self._seen:
            self._seen, self._tables = seen, _tables(sources, targets)
        for table in self._tables:
            table.launch(scales)


@lru_cache(maxsize=8)
def chunks_of(sizes: tuple[int, ...], chunk: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cut tensors of these sizes into chunks: the tensor that each belongs to, and where in it the chunk starts."""
    counts = torch.tensor([-(-size // chunk) for size in sizes])
    owners = torch.arange(len(sizes)).repeat_interleave(counts)
    starts = (torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]) * chunk
    return owners.to(device), starts.to(device)


def _flat(tensor: Tensor) -> bool:
    """On a GPU, in one piece, and at an address that allows 16-byte reads."""
    return tensor.is_cuda and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


if _HAS_KERNEL:
    import triton
    import triton.language as tl

    @triton.jit
    def _cast(value, scale):
        # 448: the largest e4m3 number. A NaN stays one.
        value = tl.clamp(value.to(tl.float32) * scale, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        return value.to(tl.float8e4nv)

    @triton.jit
    def _cast_kernel(
        sources,
        targets,
        sizes,
        scales,
        indices,
        chunk_tensor,
        chunk_start,
        DTYPE: tl.constexpr,
        CHUNK: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        tensor = tl.load(chunk_tensor + tl.program_id(0))
        start = tl.multiple_of(tl.load(chunk_start + tl.program_id(0)), CHUNK)
        size = tl.load(sizes + tensor)
        scale = tl.load(scales + tl.load(indices + tensor))
        source = tl.multiple_of(tl.load(sources + tensor).to(tl.pointer_type(DTYPE)), 16)
        target = tl.multiple_of(tl.load(targets + tensor).to(tl.pointer_type(tl.float8e4nv)), 16)
        whole = start + CHUNK <= size  # without a mask the compiler reads and writes 16 bytes at once
        for first in range(0, CHUNK, BLOCK):
            place = start + first + tl.arange(0, BLOCK)
            if whole:
                tl.store(target + place, _cast(tl.load(source + place), scale))
            else:
                inside = place < size
                tl.store(target + place, _cast(tl.load(source + place, mask=inside), scale), mask=inside)

    _DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class _Table:
    """The tensors of one source dtype: their addresses, and which chunk belongs to which."""

    def __init__(self, sources: list[Tensor], targets: list[Tensor], indices: list[int]) -> None:
        device = sources[0].device
        self.dtype = sources[0].dtype
        self.tensors = [
            torch.tensor(column, dtype=torch.int64, device=device)
            for column in (
                [s.data_ptr() for s in sources],
                [t.data_ptr() for t in targets],
                [s.numel() for s in sources],
                indices,
            )
        ]
        self.owners, self.starts = chunks_of(tuple(s.numel() for s in sources), _CHUNK, device)

    def launch(self, scales: Tensor) -> None:
        sources, targets, sizes, indices = self.tensors
        _cast_kernel[(len(self.owners),)](
            sources,
            targets,
            sizes,
            scales,
            indices,
            self.owners,
            self.starts,
            DTYPE=_DTYPES[self.dtype],
            CHUNK=_CHUNK,
            BLOCK=4096,
            num_warps=8,
        )


def _tables(sources: list[Tensor], targets: list[Tensor]) -> list[_Table]:
    by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
    for index, source in enumerate(sources):
        by_dtype[source.dtype].append(index)
    return [_Table([sources[i] for i in at], [targets[i] for i in at], at) for at in by_dtype.values()]
