"""Run under `accelerate launch` by test_nccl.py: many short trainings in one process, and what each rank saw.

launched_nccl.py FOLDER LABEL CASE...

Writes FOLDER/LABEL.RANK after every case: `{case: {"found": ...} or {"error": traceback}}`. A case that fails on all
ranks does not keep the next ones from running. Without a GPU the same cases run in emulated FP8 at a smaller size.
"""

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from accelerate.utils import set_seed
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel

import models
from gloo import environment, forget_accelerate
from hf_fp8.linear import FP8Module, fp8_modules
from launch import CONFIGS

sys.path.append(str(Path(__file__).parent.parent / "examples"))
import convergence
from launched import is_main, join, leave, of_all_ranks, world_size
from runs import Run
from text_data import stdlib_tensors

CUDA = torch.cuda.is_available()
GLOBAL_BATCH = 8
STEPS = 8
SEQ = 64 if CUDA else 16
SIZE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "vocab_size": 256,
    # Without the atomic additions of fused attention kernels a training repeats itself bit for bit.
    "attn_implementation": "eager",
}
SMALL_SIZE = {"vocab_size": 256}
COMPILED = {"torch_compile": True, "torch_compile_backend": "inductor" if CUDA else "aot_eager"}
# A rank that fails alone leaves the other one waiting this long; then the launch ends.
PATIENCE = timedelta(seconds=90)


def llama(dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    return models.llama(**{**(SIZE if CUDA else SMALL_SIZE), **changes}).to(dtype)


def make_trainer(folder: str, model: nn.Module, **changes: Any) -> Any:
    flags = {
        "per_device_train_batch_size": GLOBAL_BATCH // world_size(),
        "per_device_eval_batch_size": GLOBAL_BATCH // world_size(),
        "max_steps": STEPS,
        "use_cpu": not CUDA,
        "fp8_emulate": not CUDA,
        "fp8_convert_small": True,
    }
    return models.trainer(folder, model, models.texts(2 * GLOBAL_BATCH, SEQ), **{**flags, **changes})


def facts(trainer: Any) -> dict[str, Any]:
    logged = trainer.state.log_history
    modules = fp8_modules(trainer.accelerator.unwrap_model(trainer.model))
    return {
        "losses": models.losses(trainer),
        "norms": [entry["grad_norm"] for entry in logged if "grad_norm" in entry],
        "evaluations": [entry["eval_loss"] for entry in logged if "eval_loss" in entry],
        "fsdp": 2
        if isinstance(trainer.model, FSDPModule)
        else 1
        if isinstance(trainer.model, FullyShardedDataParallel)
        else 0,
        "converted": len(modules),
        "notes": "\n".join(trainer.fp8_report.notes),
        "scales": {
            f"{name}.{buffer}": value.tolist()
            for name, module in modules.items()
            for buffer, value in module.named_buffers()
            if buffer.endswith("_scale") and value is not None
        },
    }


def train(folder: str, model: nn.Module, **flags: Any) -> dict[str, Any]:
    trainer = make_trainer(folder, model, **flags)
    trainer.train()
    return facts(trainer)


# --- the cases ----------------------------------------------------------------------------------------------


def gather(folder: str, recipe: str, switch: str) -> dict[str, Any]:
    """Weights that bf16 holds exactly: gathered in bf16 and then cast, they are the same FP8 bits."""
    return train(folder, llama(torch.bfloat16), fp8_recipe=recipe, fp8_all_gather=switch)


def recipe(folder: str, recipe: str, **flags: Any) -> dict[str, Any]:
    return train(folder, llama(), fp8_recipe=recipe, **flags)


def tied(folder: str) -> dict[str, Any]:
    model: Any = llama(tie_word_embeddings=True)
    found = train(folder, model)
    return found | {
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "head_in_fp8": isinstance(model.lm_head, FP8Module),
    }


def clipped(folder: str, **flags: Any) -> dict[str, Any]:
    """Under fsdp2_cpu_offload.yaml the shards, gradients and optimizer are in host memory."""
    trainer = make_trainer(folder, llama(), max_grad_norm=0.1, **flags)
    fsdp = trainer.accelerator.state.fsdp_plugin
    if isinstance(fsdp.cpu_offload, CPUOffloadPolicy) and not CUDA:
        fsdp.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # pinning needs CUDA
    trainer.train()
    devices = {parameter.device.type for parameter in trainer.model.parameters()}
    return facts(trainer) | {"devices": sorted(devices)}


def validated(folder: str) -> dict[str, Any]:
    return train(folder, llama(), eval_strategy="steps", eval_steps=2, **COMPILED)


def resume(folder: str, recipe: str) -> dict[str, Any]:
    """Six steps; the same again; and the last three again from the checkpoint in the middle."""
    flags = {"fp8_recipe": recipe, "max_steps": 6, "lr_scheduler_type": "cosine"}
    saving = {**flags, "save_strategy": "steps", "save_steps": 3}
    whole = train(folder, llama(torch.bfloat16), **saving)
    again = train(folder, llama(torch.bfloat16), **flags)
    resumed = make_trainer(folder, llama(torch.bfloat16), **flags)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    return {"whole": whole, "again": again, "resumed": facts(resumed)}


def resume_elsewhere(folder: str, recipe: str) -> dict[str, Any]:
    """The checkpoint that `resume` wrote on two ranks, continued by whoever runs this."""
    checkpoint = Path(folder).parent.parent / "two" / f"resume-{recipe}" / "checkpoint-3"
    flags = {"fp8_recipe": recipe, "max_steps": 6, "lr_scheduler_type": "cosine"}
    trainer = make_trainer(folder, llama(torch.bfloat16), **flags)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return facts(trainer)


def converge(folder: str, recipe: str) -> dict[str, Any]:
    """examples/convergence.py at a small size: real text, warm-up, cosine schedule, weight decay, clipping."""
    args = convergence.Arguments(
        hidden_size=256 if CUDA else 64,
        intermediate_size=1024 if CUDA else 128,
        layers=4 if CUDA else 2,
        heads=4,
        steps=100 if CUDA else 20,
        batch=GLOBAL_BATCH // world_size(),
        seq=256 if CUDA else 64,
        learning_rate=1e-3,
        warmup=10 if CUDA else 4,
        final_steps=20 if CUDA else 5,
        max_bytes=2_000_000,
        eval_sequences=GLOBAL_BATCH,
        output_dir=folder,
    )
    text, held_out = stdlib_tensors(args.max_bytes)
    sequences = convergence.ByteBlocks(text, args.steps * GLOBAL_BATCH, args.seq)
    held_out_sequences = convergence.ByteBlocks(held_out, args.eval_sequences, args.seq)
    return convergence.train(Run(recipe, recipe), args, sequences, held_out_sequences)


@dataclass
class Case:
    run: Callable[[str], dict[str, Any]]
    env: dict[str, str] = field(default_factory=dict)


def fsdp_variables(config: str) -> dict[str, str]:
    """What `accelerate launch` exports for the `fsdp_config` of a file in accelerate_configs."""
    options = yaml.safe_load((CONFIGS / config).read_text())["fsdp_config"]
    if not CUDA:  # there FSDP1 cannot send weights from rank 0
        options |= {"fsdp_cpu_ram_efficient_loading": False, "fsdp_sync_module_states": False}
    return {
        key.upper(): str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in options.items()
    }


RECIPES = {"tensorwise": COMPILED, "delayed": COMPILED, "rowwise": {}, "rowwise_with_gw_hp": {}}
SCALED = ("tensorwise", "delayed")  # the recipes with one scale a weight
CASES = {
    **{
        f"gather-{name}-{way}": Case(partial(gather, recipe=name, switch=way))
        for name in SCALED
        for way in ("on", "off")
    },
    **{f"recipe-{name}": Case(partial(recipe, recipe=name, **flags)) for name, flags in RECIPES.items()},
    "tied": Case(tied),
    "clipped": Case(partial(clipped, fp8_all_gather="off")),
    "offload": Case(clipped),
    "fsdp1": Case(validated, fsdp_variables("fsdp1.yaml")),
    **{f"resume-{name}": Case(partial(resume, recipe=name)) for name in SCALED},
    **{f"resume-elsewhere-{name}": Case(partial(resume_elsewhere, recipe=name)) for name in SCALED},
    **{f"converge-{name}": Case(partial(converge, recipe=name)) for name in SCALED},
}


# --- running them -------------------------------------------------------------------------------------------


def fresh() -> None:
    """Forget the last case: what Accelerate and Dynamo hold, memory, random numbers."""
    forget_accelerate()
    torch._dynamo.reset()
    gc.collect()
    set_seed(0)


def attempt(case: Case, folder: str) -> dict[str, Any]:
    fresh()
    started = time.perf_counter()
    try:
        with environment(**case.env):
            found = {"found": case.run(folder)}
    except Exception:
        found = {"error": traceback.format_exc()}
    return found | {"seconds": time.perf_counter() - started}


def main(folder: str, label: str, names: list[str]) -> None:
    join(PATIENCE)
    rank = dist.get_rank() if dist.is_initialized() else 0
    done: dict[str, dict[str, Any]] = {}
    for name in names:
        if is_main():
            print(f"{label}: {name}", file=sys.stderr, flush=True)
        done[name] = attempt(CASES[name], os.path.join(folder, label, name))
        Path(folder, f"{label}.{rank}").write_text(json.dumps(done))
        failed = of_all_ranks("error" in done[name])
        if any(failed) and not all(failed):
            break  # the ranks stand at different points: nothing they would say from here on means anything
    leave()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
