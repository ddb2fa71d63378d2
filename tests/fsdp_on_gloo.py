"""Real FSDP2 on CPU ranks.

Accelerate shards on GPUs only: asked for FSDP2 on a CPU it quietly uses DDP. Inside `fsdp_on_gloo()` its
`PartialState` sets up CPU ranks over gloo, as ever, and then calls them multi-GPU, so that everything after
it takes the FSDP2 path. The models are sharded for real; only the label is not true.

As a program it runs a script that way: `fsdp_on_gloo.py SCRIPT ARGS...`, under `accelerate launch`.
"""

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.state import PartialState
from accelerate.utils import DistributedType


@contextmanager
def fsdp_on_gloo() -> Iterator[None]:
    original = PartialState.__init__

    def init(self: PartialState, cpu: bool = False, **kwargs: Any) -> None:
        original(self, cpu=True, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = init
    try:
        yield
    finally:
        PartialState.__init__ = original


if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    with fsdp_on_gloo():
        runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of gloo that still run would abort an orderly exit, now and then
