"""CPU offload: of everything under FSDP2, and of the optimizer on one GPU."""

import logging
import math
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchao.optim import CPUOffloadOptimizer

import models
from gloo import FSDP_ENV, Ranks, environment
from hf_fp8 import FP8Config, FP8Plugin, offload
from hf_fp8.linear import fp8_modules
from hf_fp8.offload import check_offload_backend, offload_optimizer, use_cores

OFFLOAD = {"FSDP_OFFLOAD_PARAMS": "true"}


def train(folder: str, recipe: str, gather: str, resume: bool) -> dict[str, Any]:
    model = models.bf16_llama()
    flags = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "fp8_all_gather": gather}
    trainer = models.trainer(folder, model, fp8_recipe=recipe, **flags)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
    return {
        "sharded": isinstance(model, FSDPModule),
        "losses": models.losses(trainer),
        "norms": [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry],
        "fused": all(group["fused"] for group in trainer.optimizer.param_groups),
        "notes": "\n".join(trainer.fp8_report.notes),
        "weights": models.whole(model),
        "weight scales": [m.fp8_weight_scale for m in fp8_modules(model).values()],
    }


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_offloaded_run_clips_trains_and_resumes_as_the_run_without(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    """Gradients of norm 2.6 and more are clipped to 1. Accelerate pins memory by default, which needs a GPU."""
    recipe = "delayed" if kind == "FULL_STATE_DICT" else "tensorwise"
    env = {"FSDP_STATE_DICT_TYPE": kind}
    without = ranks(train, str(tmp_path / "a"), recipe, "off", False, fsdp=True, env=env)
    offloaded = ranks(train, str(tmp_path / "b"), recipe, "auto", False, fsdp=True, env={**env, **OFFLOAD})
    resumed = ranks(train, str(tmp_path / "b"), recipe, "auto", True, fsdp=True, env={**env, **OFFLOAD})
    # Norms on the CPU are taken by row. Delayed, the exact scale is that of the gathered bf16 weight instead of the
    # fp32 shards'.
    tolerance = 5e-3 if recipe == "delayed" else 1e-6
    for each, again, expected in zip(offloaded, resumed, without, strict=True):
        assert each["sharded"] and each["fused"] and min(each["norms"]) > 2
        assert "parameters on CPU" in each["notes"]
        assert each["losses"] == pytest.approx(expected["losses"], rel=tolerance)
        assert each["norms"] == pytest.approx(expected["norms"], rel=10 * tolerance)
        assert set(each["weight scales"]) == {None}  # nothing is read on the CPU, and nothing can go stale
        assert again["losses"] == each["losses"]
        for name, weight in each["weights"].items():
            assert torch.equal(again["weights"][name], weight), name


def warnings_of_slow_steps(fused: bool) -> list[str]:
    plugin = FP8Plugin(FP8Config(emulate=True))
    fsdp = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_offload=True
    )
    accelerator = Accelerator(fsdp_plugin=fsdp, **plugin.accelerator_kwargs())
    model = models.llama()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hf_fp8.offload")
    logger.addHandler(handler)
    try:
        plugin.prepare(accelerator, model, optimizer)
    finally:
        logger.removeHandler(handler)
    return seen


def test_adam_that_is_not_fused_gets_a_warning(ranks: Ranks) -> None:
    for seen in ranks(warnings_of_slow_steps, False, fsdp=True):
        assert len(seen) == 1 and "fused=True" in seen[0] and "adamw_torch_fused" in seen[0]
    assert ranks(warnings_of_slow_steps, True, fsdp=True) == [[], []]


def threads(cores: int, processes: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(offload, "available_cores", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        use_cores()
        return torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def test_optimizer_on_the_cpu_gets_its_share_of_the_cores_unless_it_was_given_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert threads(8, 2, 1, monkeypatch) == 4  # what accelerate launch leaves
    assert threads(8, 2, 3, monkeypatch) == 3
    assert threads(2, 4, 1, monkeypatch) == 1


def test_process_group_without_a_cpu_backend_is_refused_with_the_remedy() -> None:
    check_offload_backend("cpu:gloo,cuda:nccl", torch.device("cuda"))
    with pytest.raises(ValueError, match="fsdp2_cpu_offload") as raised:
        check_offload_backend("cuda:nccl", torch.device("cuda"))
    assert "cpu:gloo,cuda:nccl" in str(raised.value)


# --- the optimizer alone ------------------------------------------------------------------------------------


def build(folder: str, **flags: Any) -> None:
    models.trainer(folder, models.llama(), fp8_offload_optimizer=True, **flags)


def test_offloaded_optimizer_is_refused_where_it_cannot_be_right(ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path)
    with pytest.raises(ValueError, match="--max_grad_norm 0"):
        build(folder)
    with pytest.raises(ValueError, match="training runs on 'cpu'"):
        build(folder, max_grad_norm=0.0)
    for fsdp in (False, True):
        for error in ranks.errors(build, folder, fsdp=fsdp):
            assert error is not None and error[0] == "ValueError"
            assert "one GPU" in error[1] and "fsdp2_cpu_offload.yaml" in error[1]
    with pytest.raises(ValueError, match="got SGD"):
        offload_optimizer(torch.optim.SGD(models.llama().parameters()))


# --- on a GPU -----------------------------------------------------------------------------------------------


GPU = {"use_cpu": False, "fp8_emulate": False, "fp8_convert_small": True, "max_steps": 3}


def one_process() -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("recipe", "kind"), [("tensorwise", "SHARDED_STATE_DICT"), ("delayed", "FULL_STATE_DICT")]
)
def test_on_a_gpu_parameters_live_on_the_cpu_and_buffers_stay(tmp_path: Path, recipe: str, kind: str) -> None:
    flags = {**GPU, "fp8_recipe": recipe, "save_strategy": "steps", "save_steps": 2}
    with environment(**one_process(), **{**FSDP_ENV, **OFFLOAD, "FSDP_STATE_DICT_TYPE": kind}):
        found = []
        try:
            for resume in (None, str(tmp_path / "checkpoint-2")):
                model = models.bf16_llama()
                trainer = models.trainer(str(tmp_path), model, **flags)
                assert "cpu:gloo" in dist.get_backend_config()
                trainer.train(resume_from_checkpoint=resume)
                assert isinstance(model, FSDPModule)
                assert {p._local_tensor.device.type for p in model.parameters()} == {"cpu"}
                assert {buffer.device.type for buffer in model.buffers()} == {"cuda"}
                moments = [state["exp_avg"] for state in trainer.optimizer.optimizer.state.values()]
                assert {m._local_tensor.device.type for m in moments if isinstance(m, DTensor)} == {"cpu"}
                found.append((models.losses(trainer), models.whole(model)))
        finally:
            dist.destroy_process_group()
    (losses, weights), (again, same) = found
    assert all(math.isfinite(loss) for loss in losses) and again == losses
    assert all(torch.equal(same[name], weight) for name, weight in weights.items())


@pytest.mark.gpu
def test_offloaded_optimizer_takes_the_steps_of_the_one_on_the_gpu(tmp_path: Path) -> None:
    flags = {**GPU, "max_grad_norm": 0.0, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    on_gpu = models.trainer(str(tmp_path / "gpu"), models.llama(), **flags)
    on_gpu.train()
    found = []
    for resume in (None, str(tmp_path / "cpu/checkpoint-2")):
        offloaded = models.trainer(str(tmp_path / "cpu"), models.llama(), fp8_offload_optimizer=True, **flags)
        offloaded.train(resume_from_checkpoint=resume)
        optimizer = offloaded.optimizer.optimizer
        assert isinstance(optimizer, CPUOffloadOptimizer)
        assert all(p.device.type == "cpu" for p in optimizer.param_d2h_map.values())
        found.append(models.losses(offloaded))
    assert found[0] == found[1] == pytest.approx(models.losses(on_gpu), rel=1e-3)
