"""Run under `accelerate launch` by test_compile.py: training on batches of many lengths, and what it compiled.

launched_compile.py OUT.json CASES.json
"""

import json
import os
import sys
from collections import Counter
from types import CodeType
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule

import models
from hf_fp8.linear import FP8Linear


def main(out: str, cases: str) -> None:
    found = {name: compiled(out, case) for name, case in json.loads(cases).items()}
    with open(f"{out}.{os.environ.get('RANK', '0')}", "w") as file:
        json.dump(found, file)


def compiled(out: str, case: dict[str, Any]) -> dict[str, Any]:
    """Trains one step on each length; counts graphs, and FP8 layers that were run without one."""
    torch._dynamo.reset()
    counters.clear()
    frames: Counter[str] = Counter()
    eager: list[str] = []
    forward = FP8Linear.fp8_forward

    def watched(self: FP8Linear, *args: Any) -> torch.Tensor:
        if not torch.compiler.is_compiling():  # a constant inside a graph
            eager.append(type(self).__name__)
        return forward(self, *args)

    def compiled_frame(code: CodeType, new_code: CodeType) -> None:
        frames[code.co_name] += 1

    FP8Linear.fp8_forward = watched
    hook = torch._dynamo.convert_frame.register_bytecode_hook(compiled_frame)
    try:
        return {
            **train(out, case),
            "eager": len(eager),
            "frames": frames,
            "graphs": counters["stats"]["unique_graphs"],
            "breaks": dict(counters["graph_break"]),
            "limit": dict(counters["recompile_limit"]),
        }
    finally:
        hook.remove()
        FP8Linear.fp8_forward = forward


def train(out: str, case: dict[str, Any]) -> dict[str, Any]:
    model = models.llama(num_hidden_layers=case["layers"])
    names = list(model.state_dict())
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    data = [row for length in case["lengths"] for row in models.texts(4 * world_size, length)]
    trainer = models.trainer(f"{out}.d", model, data, max_steps=len(case["lengths"]), **case["flags"])
    trainer.train()
    return {
        "losses": models.losses(trainer),
        "sharded": isinstance(trainer.model, FSDPModule),
        "compiled": [name for name, m in model.named_modules() if m._compiled_call_impl is not None],
        "names_kept": list(model.state_dict()) == names,
        "notes": trainer.fp8_report.notes,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
