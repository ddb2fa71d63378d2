"""The delayed recipe, and tensorwise FP8 gather, on real gloo ranks: one collective a step, equal scales."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM, TrainerCallback

from gloo import Ranks
from hf_fp8 import FP8Plugin, gathering
from hf_fp8.casts import E4M3
from hf_fp8.checkpoint import SCALING_FILE
from hf_fp8.linear import fp8_modules
from test_scaling import (
    AskDuring,
    Chain,
    RecordedTrainer,
    amax_of,
    delayed,
    fp8_trainer,
    normal,
    published_scale,
    snapshot,
    tiny_llama,
    token_data,
)

Flags = dict[str, Any]
KEEP_GATHERED = {"FSDP_RESHARD_AFTER_FORWARD": "false"}


# --- what the ranks run -------------------------------------------------------------------------------------


def rank_trainer(folder: str, flags: Flags, dtype: torch.dtype = torch.float32) -> RecordedTrainer:
    """Per rank and step, two rows a micro-batch. Asserts nothing yet: the model is sharded when it first runs."""
    model: LlamaForCausalLM = tiny_llama().to(dtype)
    return fp8_trainer(folder, model, **flags)


def assert_distributed(trainer: RecordedTrainer, fsdp: bool) -> None:
    wrapped = trainer.model_wrapped
    assert isinstance(wrapped, FSDPModule if fsdp else DistributedDataParallel)
    assert trainer.accelerator.num_processes == dist.get_world_size()


def weight_scales(model: nn.Module) -> list[float]:
    return [m.fp8_weight_scale.item() for m in fp8_modules(model).values() if m.fp8_weight_scale is not None]


def run(
    folder: str,
    fsdp: bool,
    flags: Flags,
    *,
    dtype: torch.dtype = torch.float32,
    evaluations: int = 0,
    ask: Any = None,
    resume: str | None = None,
) -> dict[str, Any]:
    """Train; what a rank has to tell about it."""
    trainer = rank_trainer(folder, flags, dtype)
    if ask is not None:
        trainer.add_callback(AskDuring(ask))
    before = [trainer.evaluate()["eval_loss"] for _ in range(evaluations)]
    trainer.train(resume_from_checkpoint=resume)
    assert_distributed(trainer, fsdp)
    after = [trainer.evaluate()["eval_loss"] for _ in range(evaluations)]
    return {
        "losses": trainer.losses,
        "micro": trainer.micro_losses,
        "eval": before + after,
        "after": trainer.record.after,
        "weight_scales": weight_scales(trainer.model),
        "notes": trainer.fp8_report.notes,
    }


def run_with(folder: str, fsdp: bool, flags: Flags, options: Flags) -> dict[str, Any]:
    return run(folder, fsdp, flags, **options)


def one_step(
    state: Mapping[str, Any] | None, parts: list[list[Tensor]], fsdp: bool, config: Flags
) -> dict[str, Any]:
    """One optimizer step of a plain Accelerate loop, learning rate 0, from a given FP8 state.

    Rank r takes the micro-batches `parts[r]`; a process alone takes those of all ranks.
    """
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    mine = [batch for part in parts for batch in part] if alone else parts[dist.get_rank()]
    plugin = FP8Plugin(delayed(**config))
    accelerator = Accelerator(gradient_accumulation_steps=len(mine), **plugin.accelerator_kwargs())
    model = tiny_llama()
    model, optimizer = plugin.prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.0))
    assert isinstance(model, FSDPModule) == fsdp
    assert isinstance(model, DistributedDataParallel) == (not fsdp and not alone)
    assert plugin.scaling is not None
    if state is not None:
        plugin.scaling.load_state_dict(dict(state))
    for batch in mine:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    assert plugin.scaling.step.item() == (0 if state is None else state["step"]) + 1
    return {
        **snapshot(plugin.scaling),
        "weight_scales": weight_scales(model),
        "state": plugin.scaling.state_dict(),
    }


def batches(seed: int, count: int = 1) -> list[Tensor]:
    rows = torch.stack([row["input_ids"] for row in token_data(2 * count, seed=seed)])
    return list(rows.split(2))


@contextmanager
def counted_max_reduces(sizes: list[int]) -> Iterator[None]:
    """Appends the size of each all-reduce MAX; only scales are shared that way."""
    real = dist.all_reduce

    def counting(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        if op == dist.ReduceOp.MAX:
            sizes.append(tensor.numel())
        return real(tensor, op, *args, **kwargs)

    dist.all_reduce = counting
    try:
        yield
    finally:
        dist.all_reduce = real


def reductions_per_step(folder: str, fsdp: bool, flags: Flags) -> dict[str, Any]:
    """For each optimizer step, the sizes of the MAX reductions inside its micro-batches and outside of them."""
    sizes: list[int] = []
    inside: list[int] = []
    steps: list[tuple[list[int], list[int]]] = []
    versions: list[list[int]] = []

    class Counting(RecordedTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            start = len(sizes)
            loss = super().training_step(*args, **kwargs)
            inside.extend(sizes[start:])
            del sizes[start:]
            return loss

    class AtStepEnd(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            steps.append((list(inside), list(sizes)))
            versions.append([m.fp8_weight_scale._version for m in fp8_modules(trainer.model).values()])
            inside.clear()
            sizes.clear()

    trainer = rank_trainer(folder, flags)
    trainer.__class__ = Counting
    trainer.add_callback(AtStepEnd())
    with counted_max_reduces(sizes):
        trainer.train()
    assert_distributed(trainer, fsdp)
    writes = {b - a for old, new in pairwise(versions) for a, b in zip(old, new, strict=True)}
    return {"steps": steps, "modules": len(fp8_modules(trainer.model)), "scale writes": writes}


def chain_loop(
    inputs: list[list[Tensor]], gradients: list[list[Tensor]], accumulation: int, config: Flags
) -> dict[str, Any]:
    """A DDP loop over one linear layer: rank r sees `inputs[r]`, one a micro-batch. Returns history and log texts."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("hf_fp8").addHandler(handler)
    try:
        plugin = FP8Plugin(delayed(**config))
        accelerator = Accelerator(gradient_accumulation_steps=accumulation, **plugin.accelerator_kwargs())
        model = Chain(32, 48)
        model, optimizer = plugin.prepare(
            accelerator, model, torch.optim.SGD(model.chain.parameters(), lr=0.0)
        )
        assert isinstance(model, DistributedDataParallel)
        assert plugin.scaling is not None
        rank = dist.get_rank()
        for x, dy in zip(inputs[rank], gradients[rank], strict=True):
            with accelerator.accumulate(model):
                accelerator.backward((model(x) * dy).sum() * accumulation)
                optimizer.zero_grad()  # first: not even NaN gradients reach the weights
                optimizer.step()
        plugin.scaling.log_values()
    finally:
        logging.getLogger("hf_fp8").removeHandler(handler)
    return {
        "history": plugin.scaling.history[:, 0],
        "scales": plugin.scaling.scales(),
        "texts": [r.getMessage() for r in records if r.levelno >= logging.WARNING],
    }


# --- scales over ranks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fsdp, gather", [(False, "auto"), (True, "on"), (True, "off")])
def test_scales_are_equal_on_all_ranks_and_those_of_one_process_that_saw_both_batches(
    ranks: Ranks, fsdp: bool, gather: str
) -> None:
    config = {"amax_history_len": 4, "amax_margin": 2, "all_gather": gather}
    parts = [batches(11, 2), batches(12, 2)]
    calibrated = ranks(one_step, None, parts, fsdp, config, world_size=1, fsdp=fsdp)[0]["state"]

    (alone,) = ranks(one_step, calibrated, parts, fsdp, config, world_size=1, fsdp=fsdp)
    both = ranks(one_step, calibrated, parts, fsdp, config, fsdp=fsdp)
    for mine in both:
        assert torch.equal(mine["scales"], both[0]["scales"])
        assert torch.equal(mine["history"], both[0]["history"])
        assert mine["weight_scales"] == alone["weight_scales"]
        assert torch.equal(mine["history"][0], alone["history"][0])  # inputs
        assert torch.equal(mine["scales"][0], alone["scales"][0])
        # The loss of a process alone is divided by four micro-batches, that of two ranks by two.
        newest, reference = mine["history"][1, :, 0], alone["history"][1, :, 0]
        torch.testing.assert_close(newest, 2 * reference, rtol=2**-7, atol=0)

    fresh = ranks(one_step, None, parts, fsdp, config, fsdp=fsdp)  # calibrated on unequal data
    assert torch.equal(fresh[0]["scales"], fresh[1]["scales"])
    assert torch.equal(fresh[0]["history"], fresh[1]["history"])


@pytest.mark.parametrize("fsdp", [False, True])
def test_without_sync_activation_scales_are_each_ranks_own_and_weight_scales_are_shared(
    ranks: Ranks, fsdp: bool
) -> None:
    config = {"amax_history_len": 4, "amax_sync": False}
    parts = [batches(11), batches(12)]
    both = ranks(one_step, None, parts, fsdp, config, fsdp=fsdp)
    assert both[0]["weight_scales"] == both[1]["weight_scales"]
    model = tiny_llama()
    whole = [published_scale(amax_of(m.weight), E4M3) for m in (*layers_of(model), model.lm_head)]
    assert both[0]["weight_scales"] == whole
    assert not torch.equal(both[0]["scales"], both[1]["scales"])
    for rank in (0, 1):
        (alone,) = ranks(one_step, None, [parts[rank]], fsdp, config, world_size=1, fsdp=fsdp)
        assert torch.equal(both[rank]["history"], alone["history"])
        assert torch.equal(both[rank]["scales"], alone["scales"])


def layers_of(model: LlamaForCausalLM) -> list[nn.Linear]:
    return [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"]


@pytest.mark.parametrize("sync", [True, False])
def test_ddp_leaves_each_ranks_recorded_amax_alone_until_the_sync(ranks: Ranks, sync: bool) -> None:
    """DDP broadcasts rank 0's buffers before a forward; rank 1's largest values are in its first micro-batch."""
    inputs = [[normal(16, 32, amax=1.0 + rank * 6 * (i % 3 == 0)) for i in range(6)] for rank in (0, 1)]
    gradients = [[normal(16, 48, amax=0.5 + rank * 4 * (i % 3 == 0)) for i in range(6)] for rank in (0, 1)]
    both = ranks(chain_loop, inputs, gradients, 3, {"amax_history_len": 4, "amax_sync": sync})
    for rank in (0, 1):
        seen = (0, 1) if sync else (rank,)
        for row, data in enumerate((inputs, gradients)):
            expected = [max(amax_of(x) for r in seen for x in data[r][i : i + 3]) for i in (3, 0)]
            assert both[rank]["history"][row].tolist() == [*expected, 0.0, 0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_nonfinite_amax_of_any_rank_is_named_on_every_rank_and_spoils_no_history(
    ranks: Ranks, culprit: int, bad: float
) -> None:
    inputs = [[normal(16, 32) for _ in range(3)] for _ in range(2)]
    inputs[culprit][1][2, 3] = bad
    gradients = [[normal(16, 48) for _ in range(3)] for _ in range(2)]
    both = ranks(chain_loop, inputs, gradients, 1, {"amax_history_len": 4})
    for mine in both:
        assert any("chain.0" in text and "step 2" in text for text in mine["texts"])
        assert mine["history"].isfinite().all() and mine["scales"].isfinite().all()
        assert torch.equal(mine["scales"], both[0]["scales"])


# --- collectives --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fsdp, flags, per_module",
    [
        (False, {}, 3),
        (True, {}, 3),
        (True, {"fp8_all_gather": "off"}, 3),
        (True, {"fp8_amax_sync": False}, 1),
        (True, {"fp8_recipe": "tensorwise"}, 1),
    ],
)
def test_one_max_reduction_per_optimizer_step_and_none_in_a_micro_batch(
    ranks: Ranks, tmp_path: Path, fsdp: bool, flags: Flags, per_module: int
) -> None:
    """The first step may also calibrate. Two amaxes a layer and its weight's travel in one tensor."""
    flags = {**flags, "gradient_accumulation_steps": 2, "max_steps": 4}
    for told in ranks(reductions_per_step, str(tmp_path), fsdp, flags, fsdp=fsdp):
        assert len(told["steps"]) == 4
        first, *later = told["steps"]
        assert first[1] == [per_module * told["modules"]]
        assert later == [([], [per_module * told["modules"]])] * 3
        assert told["scale writes"] == {1}  # of each weight scale, from step to step


def test_ddp_without_sync_reduces_nothing(ranks: Ranks, tmp_path: Path) -> None:
    flags = {"fp8_amax_sync": False, "max_steps": 3}
    for told in ranks(reductions_per_step, str(tmp_path), False, flags):
        assert told["steps"] == [([], [])] * 3


# --- calibration, gather, compile ---------------------------------------------------------------------------


@pytest.mark.parametrize("fsdp", [False, True])
def test_the_first_loss_of_every_rank_is_that_of_tensorwise(ranks: Ranks, tmp_path: Path, fsdp: bool) -> None:
    flags = {"gradient_accumulation_steps": 2, "max_steps": 2}
    told = {
        recipe: ranks(run, str(tmp_path), fsdp, {**flags, "fp8_recipe": recipe}, fsdp=fsdp)
        for recipe in ("delayed", "tensorwise")
    }
    for mine, reference in zip(told["delayed"], told["tensorwise"], strict=True):
        assert mine["micro"][0] == reference["micro"][0]
        assert mine["micro"] != reference["micro"]
    assert told["delayed"][0]["micro"] != told["delayed"][1]["micro"]  # the ranks saw different data


@pytest.mark.parametrize("world_size", [2, 3])
def test_fp8_gather_on_and_off_give_the_same_first_loss_for_a_bf16_model(
    ranks: Ranks, tmp_path: Path, world_size: int
) -> None:
    """On three ranks no weight's rows divide evenly: all gather in bf16, with the scale of the padded shards."""
    told = {
        gather: ranks(
            run_with,
            str(tmp_path),
            True,
            {"fp8_all_gather": gather, "max_steps": 2},
            {"dtype": torch.bfloat16},
            fsdp=True,
            world_size=world_size,
        )
        for gather in ("auto", "off")
    }
    gathered = {2: "all 15", 3: "0 of 15"}[world_size]
    assert any(f"FP8 all-gather: {gathered}" in note for note in told["auto"][0]["notes"])
    for on, off in zip(told["auto"], told["off"], strict=True):
        assert on["micro"][0] == off["micro"][0]
        assert on["micro"][1] == pytest.approx(off["micro"][1], abs=0.02)


@pytest.mark.parametrize("fsdp", [False, True])
def test_compile_and_recomputation_change_no_bit_on_ranks(ranks: Ranks, tmp_path: Path, fsdp: bool) -> None:
    plain = {"gradient_accumulation_steps": 2, "max_steps": 3}
    flags = {
        **plain,
        "compiled": True,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }
    eager = ranks(run, str(tmp_path), fsdp, plain, fsdp=fsdp)
    compiled = ranks(run, str(tmp_path), fsdp, flags, fsdp=fsdp)
    for mine, reference in zip(compiled, eager, strict=True):
        assert mine["micro"] == reference["micro"]
        assert any("compiled by block" in note for note in mine["notes"])
        for ours, theirs in zip(mine["after"], reference["after"], strict=True):
            assert all(torch.equal(ours[key], theirs[key]) for key in ours)


# --- weights that stay gathered, weights changed outside the optimizer ----------------------------------------


def gathers_per_step(folder: str, flags: Flags) -> dict[str, Any]:
    """How often each FP8 weight is gathered in an optimizer step, evaluations before and after included apart."""
    calls: list[int] = []
    per_step: list[set[int]] = []
    real = gathering._pre_all_gather

    def counting(shard: Tensor, mesh: Any) -> Any:
        calls.append(id(shard))
        return real(shard, mesh)

    class AtStepEnd(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            calls.clear()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            per_step.append({calls.count(shard) for shard in calls})

    gathering._pre_all_gather = counting
    try:
        trainer = rank_trainer(folder, flags)
        trainer.add_callback(AtStepEnd())
        losses = [trainer.evaluate()["eval_loss"] for _ in range(2)]
        trainer.train()
        losses += [trainer.evaluate()["eval_loss"] for _ in range(2)]
    finally:
        gathering._pre_all_gather = real
    assert_distributed(trainer, True)
    return {"per step": per_step, "micro": trainer.micro_losses, "eval": losses}


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_with_reshard_after_forward_off_a_weight_is_gathered_once_per_optimizer_step(
    ranks: Ranks, tmp_path: Path, recipe: str
) -> None:
    flags = {"gradient_accumulation_steps": 4, "max_steps": 3, "fp8_recipe": recipe}
    kept = ranks(gathers_per_step, str(tmp_path), flags, fsdp=True, env=KEEP_GATHERED)
    freed = ranks(gathers_per_step, str(tmp_path), flags, fsdp=True)
    for mine, reference in zip(kept, freed, strict=True):
        assert mine["micro"] == reference["micro"]
        assert mine["eval"] == reference["eval"]
        # The first step may find weights gathered by the evaluation before it.
        assert mine["per step"][1:] == [{1}, {1}]
        # Forward and backward of four micro-batches; the head stays gathered in between.
        assert reference["per step"][1:] == [{4, 8}, {4, 8}]


def test_an_fp8_head_that_stays_gathered_after_an_evaluation_is_no_obstacle(
    ranks: Ranks, tmp_path: Path
) -> None:
    """FSDP2 keeps the tail of the model gathered from forward to backward, and an evaluation has no backward."""
    flags = {"fp8_head": "on", "max_steps": 2}
    told = ranks(run_with, str(tmp_path), True, flags, {"evaluations": 2}, fsdp=True)
    without = ranks(run_with, str(tmp_path), True, flags, {}, fsdp=True)
    for mine, reference in zip(told, without, strict=True):
        assert mine["micro"] == reference["micro"]
        assert mine["eval"][0] == mine["eval"][1] and mine["eval"][2] == mine["eval"][3] != mine["eval"][0]


def evaluations_around_a_change(folder: str, flags: Flags, change: str) -> dict[str, Any]:
    trainer = rank_trainer(folder, flags)
    trainer.train()
    assert_distributed(trainer, True)
    model, weights = trainer.model, trainer.fp8_plugin.weights
    assert weights is not None
    told = {"before": trainer.evaluate()["eval_loss"], "best": trainer.state.best_model_checkpoint}
    if change == "ema":
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("proj.weight"):
                    parameter.lerp_(parameter * 6.0, 1.0)
    told["noticed"] = trainer.evaluate()["eval_loss"]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    weights.refresh()
    told["by hand"] = trainer.evaluate()["eval_loss"]
    return told


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_weight_scales_of_shards_follow_an_in_place_change(ranks: Ranks, tmp_path: Path, recipe: str) -> None:
    flags = {"fp8_recipe": recipe, "max_steps": 2}
    for told in ranks(evaluations_around_a_change, str(tmp_path), flags, "ema", fsdp=True):
        assert told["noticed"] == told["by hand"] != told["before"]


@pytest.mark.parametrize("env", [{}, KEEP_GATHERED])
def test_weight_scales_of_shards_follow_the_load_of_the_best_model(
    ranks: Ranks, tmp_path: Path, env: dict[str, str]
) -> None:
    flags = {
        "max_steps": 3,
        "learning_rate": 1e-2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # the loss falls: an early checkpoint is the best
    }
    for told in ranks(evaluations_around_a_change, str(tmp_path), flags, "none", fsdp=True, env=env):
        assert not told["best"].endswith("checkpoint-3")  # the last
        assert told["before"] == told["noticed"] == told["by hand"]


@pytest.mark.parametrize("env", [{}, KEEP_GATHERED])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_callback_that_runs_the_model_does_not_disturb_fsdp2_training(
    ranks: Ranks, tmp_path: Path, mode: Any, env: dict[str, str]
) -> None:
    """One of its chances is between backward and optimizer step, when FSDP2 keeps what it gathers then."""
    flags = {"gradient_accumulation_steps": 2, "max_steps": 3}
    plain = ranks(run, str(tmp_path), True, flags, fsdp=True, env=env)
    asked = ranks(run_with, str(tmp_path), True, flags, {"ask": mode}, fsdp=True, env=env)
    for mine, reference in zip(asked, plain, strict=True):
        assert mine["micro"] == reference["micro"]
        for ours, theirs in zip(mine["after"], reference["after"], strict=True):
            assert all(torch.equal(ours[key], theirs[key]) for key in ours)


# --- checkpoints --------------------------------------------------------------------------------------------


class AtStart(TrainerCallback):
    """The FP8 state that training starts from."""

    def __init__(self, trainer: RecordedTrainer) -> None:
        self.trainer = trainer
        self.state: dict[str, Tensor] = {}

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.state = snapshot(self.trainer.fp8_plugin.scaling)


def resumed(folder: str, checkpoint: str, flags: Flags) -> dict[str, Any]:
    trainer = rank_trainer(folder, flags)
    start = AtStart(trainer)
    trainer.add_callback(start)
    trainer.train(resume_from_checkpoint=checkpoint)
    return {"start": start.state, "micro": trainer.micro_losses, "after": trainer.record.after}


@pytest.mark.parametrize("fsdp", [False, True])
@pytest.mark.parametrize("sync", [True, False])
def test_resume_on_the_same_ranks_is_bitwise_and_each_rank_gets_its_own_scales_back(
    ranks: Ranks, tmp_path: Path, fsdp: bool, sync: bool
) -> None:
    flags = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "fp8_amax_sync": sync}
    whole = ranks(run, str(tmp_path), fsdp, flags, fsdp=fsdp)
    checkpoint = str(tmp_path / "checkpoint-2")
    again = ranks(resumed, str(tmp_path), checkpoint, flags, fsdp=fsdp)
    assert torch.equal(whole[0]["after"][1]["scales"], whole[1]["after"][1]["scales"]) == sync
    for mine, reference in zip(again, whole, strict=True):
        saved = reference["after"][1]
        assert all(torch.equal(mine["start"][key], saved[key]) for key in saved)
        assert mine["micro"] == reference["micro"][2:]
        end, other_end = mine["after"][-1], reference["after"][-1]
        assert all(torch.equal(end[key], other_end[key]) for key in end)


@pytest.mark.parametrize("sync", [True, False])
def test_resume_of_two_ranks_on_one_takes_the_largest_amaxes(
    ranks: Ranks, tmp_path: Path, sync: bool
) -> None:
    flags = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "fp8_amax_sync": sync}
    whole = ranks(run, str(tmp_path), False, flags)
    assert (tmp_path / "checkpoint-2" / SCALING_FILE).exists()
    (alone,) = ranks(resumed, str(tmp_path), str(tmp_path / "checkpoint-2"), flags, world_size=1)
    saved = [told["after"][1] for told in whole]
    assert torch.equal(alone["start"]["history"], torch.maximum(saved[0]["history"], saved[1]["history"]))
    assert torch.equal(alone["start"]["scales"], torch.minimum(saved[0]["scales"], saved[1]["scales"]))
    assert alone["start"]["step"] == 2 and len(alone["after"]) == 2


def test_resume_of_one_rank_on_two_gives_both_its_scales(ranks: Ranks, tmp_path: Path) -> None:
    flags = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "fp8_amax_sync": False}
    (alone,) = ranks(resumed_from_nothing, str(tmp_path), flags, world_size=1)
    for mine in ranks(resumed, str(tmp_path), str(tmp_path / "checkpoint-2"), flags):
        assert all(torch.equal(mine["start"][key], alone[key]) for key in ("history", "scales", "step"))


def resumed_from_nothing(folder: str, flags: Flags) -> dict[str, Tensor]:
    trainer = rank_trainer(folder, flags)
    trainer.train()
    return trainer.record.after[1]


def accelerate_loop(folder: str, first: bool) -> dict[str, Any]:
    """Three steps that are saved and three more, or only the last three from what was saved."""
    plugin = FP8Plugin(delayed(amax_history_len=4, amax_sync=False))
    accelerator = Accelerator(**plugin.accelerator_kwargs())
    model = tiny_llama(seed=0 if first else 9)
    model, optimizer = plugin.prepare(accelerator, model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    assert isinstance(model, FSDPModule)
    assert plugin.scaling is not None
    losses = []
    if not first:
        accelerator.load_state(folder)
        loaded = snapshot(plugin.scaling)
    for step in range(0 if first else 3, 6):
        (batch,) = batches(100 + 10 * step + dist.get_rank())
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if first and step == 2:
            accelerator.save_state(folder)
            loaded = snapshot(plugin.scaling)
    return {"losses": losses[-3:], "state": loaded}


def test_an_fsdp2_accelerate_loop_resumes_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    whole = ranks(accelerate_loop, str(tmp_path), True, fsdp=True)
    again = ranks(accelerate_loop, str(tmp_path), False, fsdp=True)
    for mine, reference in zip(again, whole, strict=True):
        assert all(torch.equal(mine["state"][key], reference["state"][key]) for key in mine["state"])
        assert mine["losses"] == reference["losses"]
