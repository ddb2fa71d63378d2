"""`FP8Trainer` in one process and under DDP: the Trainer that users know, in FP8."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments, default_data_collator

import models
from gloo import Ranks
from hf_fp8 import FP8Config, FP8Plugin, FP8Trainer, FP8TrainerMixin
from hf_fp8.linear import fp8_modules

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"]


# --- Trainer and loop --------------------------------------------------------------------------------------


def trainer_run(folder: str, recipe: str) -> list[float]:
    trainer = models.trainer(folder, models.llama(), fp8_recipe=recipe, gradient_accumulation_steps=2)
    trainer.train()
    return models.losses(trainer)


def loop_run(recipe: str) -> list[float]:
    """What `trainer_run` does, in a loop of one's own: AdamW, clipping to 1.0, two micro-batches a step."""
    plugin = FP8Plugin(FP8Config(recipe=recipe, emulate=True))
    accelerator = Accelerator(
        gradient_accumulation_steps=2, cpu=not uses_fsdp(), **plugin.accelerator_kwargs()
    )
    model = models.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    loader = DataLoader(models.texts(48), batch_size=4, collate_fn=default_data_collator)
    model, optimizer, loader = plugin.prepare(accelerator, model, optimizer, loader)
    model.train()
    losses: list[float] = []
    window = torch.zeros(())
    for batch in loader:
        with accelerator.accumulate(model):
            # Trainer divides the sum of the losses by all tokens of the step, here as many in each micro-batch.
            targets = 2 * accelerator.num_processes * batch["labels"][:, 1:].numel()
            loss = model(**batch, num_items_in_batch=torch.tensor(targets)).loss
            loss = loss * accelerator.num_processes * 2
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        window += loss.detach() / 2
        if accelerator.sync_gradients:
            losses.append(accelerator.gather(window).mean().item())
            window = torch.zeros(())
        if len(losses) == 3:
            break
    return losses


def uses_fsdp() -> bool:
    return os.environ.get("ACCELERATE_USE_FSDP") == "true"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "world",
    [{"world_size": 1}, {"world_size": 2}, {"world_size": 2, "fsdp": True}],
    ids=["one", "ddp", "fsdp2"],
)
def test_trainer_and_accelerate_loop_give_the_same_losses(
    ranks: Ranks, tmp_path: Path, recipe: str, world: dict[str, Any]
) -> None:
    trainer = ranks(trainer_run, str(tmp_path), recipe, **world)
    loop = ranks(loop_run, recipe, **world)
    assert len(trainer[0]) == 3 and trainer == loop


# --- FP8 and bf16 ------------------------------------------------------------------------------------------


def test_fp8_losses_are_close_to_bf16_losses(tmp_path: Path) -> None:
    stock = Trainer(
        model=models.llama(),
        args=TrainingArguments(**stock_arguments(str(tmp_path), max_steps=8)),
        train_dataset=models.texts(48),
    )
    stock.train()
    bf16 = [entry["loss"] for entry in stock.state.log_history if "loss" in entry]
    for recipe in RECIPES:
        trainer = models.trainer(str(tmp_path), models.llama(), fp8_recipe=recipe, max_steps=8)
        trainer.train()
        fp8 = models.losses(trainer)
        assert fp8 == pytest.approx(bf16, rel=0.02) and fp8 != bf16


def stock_arguments(folder: str, **changes: Any) -> dict[str, Any]:
    """Arguments of the stock Trainer for the run that `models.arguments` describes."""
    theirs = models.arguments(folder, **changes).to_dict()
    known = TrainingArguments(folder, use_cpu=True).to_dict()
    return {k: v for k, v in theirs.items() if k in known and not k.startswith(("fp8", "torch_compile"))} | {
        "bf16": True
    }


class LossesOfNaN(Trainer):
    """The loss of every third micro-batch is NaN, its gradient is not."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.batches = getattr(self, "batches", 0) + 1
        loss = super().compute_loss(*args, **kwargs)
        return loss + float("nan") if self.batches % 3 == 0 else loss


class FP8LossesOfNaN(FP8TrainerMixin, LossesOfNaN):
    pass


@pytest.mark.parametrize("filtered", [True, False])
def test_losses_of_nan_are_logged_as_trainer_logs_them(tmp_path: Path, filtered: bool) -> None:
    flags = {"logging_steps": 2, "gradient_accumulation_steps": 2, "logging_nan_inf_filter": filtered}
    flags |= {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    found = []
    for kind, args in (
        (LossesOfNaN, TrainingArguments(**stock_arguments(str(tmp_path / "a"), **flags))),
        (FP8LossesOfNaN, models.arguments(str(tmp_path / "b"), **flags, fp8=False, bf16=True)),
    ):
        trainer = kind(model=models.llama(), args=args, train_dataset=models.texts(48))
        trainer.train()
        assert trainer.args.logging_nan_inf_filter is filtered
        found.append([str(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry])
    assert found[0] == found[1] and len(found[0]) == 3
    saved = torch.load(tmp_path / "b/checkpoint-3/training_args.bin", weights_only=False)
    assert saved.logging_nan_inf_filter is filtered


def test_switched_off_it_is_the_stock_trainer(tmp_path: Path) -> None:
    stock = Trainer(
        model=models.llama(),
        args=TrainingArguments(**stock_arguments(str(tmp_path))),
        train_dataset=models.texts(48),
    )
    stock.train()
    model = models.llama()
    off = models.trainer(str(tmp_path), model, fp8=False, bf16=True)
    off.train()
    assert not fp8_modules(model) and not off.fp8_report.converted
    assert "FP8 is off" in str(off.fp8_report)
    assert models.losses(off) == [entry["loss"] for entry in stock.state.log_history if "loss" in entry]


def test_parameters_stay_the_same_objects_and_in_the_optimizer(tmp_path: Path) -> None:
    model = models.llama()
    before = dict(model.named_parameters())
    names = list(model.state_dict())
    trainer = models.trainer(str(tmp_path), model, fp8_recipe="delayed")
    trainer.train()
    assert list(model.state_dict()) == names
    held = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    assert len(held) == len(before) and {id(p) for p in held} == {id(p) for p in before.values()}
    assert all(p is before[name] for name, p in model.named_parameters())


# --- activation checkpointing ------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_loss(tmp_path: Path, recipe: str, reentrant: bool) -> None:
    def run(**flags: Any) -> tuple[list[float], int]:
        model = models.llama()
        calls: list[None] = []
        model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(None))
        trainer = models.trainer(str(tmp_path), model, fp8_recipe=recipe, **flags)
        trainer.train()
        return models.losses(trainer), len(calls)

    plain, once = run()
    kwargs = {"use_reentrant": reentrant}
    recomputed, twice = run(gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs)
    assert recomputed == plain
    assert (once, twice) == (3, 6)


# --- evaluation and repetition -----------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_evaluation_before_training_and_training_twice(tmp_path: Path, recipe: str) -> None:
    plain = models.trainer(str(tmp_path), models.llama(), fp8_recipe=recipe)
    plain.train()
    trainer = models.trainer(str(tmp_path), models.llama(), fp8_recipe=recipe)
    first = trainer.evaluate()["eval_loss"]
    assert trainer.predict(trainer.eval_dataset).metrics["test_loss"] == first
    trainer.train()
    assert models.losses(trainer) == models.losses(plain)
    report, converted = trainer.fp8_report, list(fp8_modules(trainer.model).values())
    second = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.fp8_report is report
    assert list(fp8_modules(trainer.model).values()) == converted
    assert first > second > trainer.evaluate()["eval_loss"]


# --- DDP ---------------------------------------------------------------------------------------------------


def ddp_run(folder: str, recipe: str, evaluate: bool, batch: int) -> dict[str, Any]:
    model = models.llama()
    trainer = models.trainer(folder, model, fp8_recipe=recipe, per_device_train_batch_size=batch, max_steps=4)
    if evaluate:
        trainer.evaluate()
    trainer.train()
    return {
        "ddp": isinstance(trainer.model_wrapped, DistributedDataParallel),
        "losses": models.losses(trainer),
        "weights": models.whole(model),
        "scales": {name: buffer.item() for name, buffer in model.named_buffers() if name.endswith("_scale")},
    }


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("evaluate", [False, True], ids=["train", "evaluate-first"])
def test_ddp_trains_as_one_process_with_the_whole_batch(
    ranks: Ranks, tmp_path: Path, recipe: str, evaluate: bool
) -> None:
    (alone,) = ranks(ddp_run, str(tmp_path), recipe, evaluate, 8, world_size=1)
    both = ranks(ddp_run, str(tmp_path), recipe, evaluate, 4)
    for each in both:
        assert each["ddp"]
        assert each["losses"] == both[0]["losses"]
        assert each["losses"] == pytest.approx(alone["losses"], rel=5e-3)
        for name, weight in each["weights"].items():
            assert torch.equal(weight, both[0]["weights"][name]), name
        assert each["scales"] == both[0]["scales"]
        assert bool(each["scales"]) == (recipe == "delayed")


# --- what it tells -----------------------------------------------------------------------------------------


class Reports(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "of the matrix FLOPs\n" in message:
            self.seen.append(message)


def logged_reports(folder: str) -> tuple[list[str], str, int]:
    handler = Reports()
    logger = logging.getLogger("hf_fp8")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        trainer = models.trainer(folder, models.llama())
        trainer.evaluate()
        trainer.train()
        trainer.train()
    finally:
        logger.removeHandler(handler)
    return handler.seen, str(trainer.fp8_report), len(trainer.fp8_report.converted)


@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
def test_report_is_kept_on_every_rank_and_logged_once_on_rank_0(
    ranks: Ranks, tmp_path: Path, fsdp: bool
) -> None:
    (first, report, converted), (other, same, _) = ranks(logged_reports, str(tmp_path), fsdp=fsdp)
    assert first == [report] and other == []
    assert report == same and converted == 14
    assert "model.layers.0-1.mlp.up_proj" in report and ("FSDP2: " in report) == fsdp


def test_tokens_per_second_is_in_the_log(tmp_path: Path) -> None:
    trainer = models.trainer(str(tmp_path), models.llama())
    trainer.train()
    # The first step, which may compile, is not measured.
    logged = [entry.get("tokens_per_second") for entry in trainer.state.log_history if "loss" in entry]
    assert logged[0] is None and all(rate > 0 for rate in logged[1:])


def test_loss_is_logged_in_full_precision(tmp_path: Path) -> None:
    trainer = models.trainer(str(tmp_path), models.bf16_llama())
    trainer.train()
    assert all(loss != torch.tensor(loss).bfloat16().item() for loss in models.losses(trainer))


def test_other_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="needs FP8TrainingArguments"):
        FP8Trainer(model=models.llama(), args=TrainingArguments(str(tmp_path), use_cpu=True))


def test_model_of_another_trainer_is_refused(tmp_path: Path) -> None:
    model = models.llama()
    models.trainer(str(tmp_path), model)
    with pytest.raises(ValueError, match="already converted by hf_fp8"):
        models.trainer(str(tmp_path), model)
