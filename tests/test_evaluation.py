"""Evaluation around training: the results of the same weights in a fresh model, and no storm of graphs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
)

import models
from gloo import Ranks
from hf_fp8 import FP8ArgumentsMixin, FP8Trainer, FP8TrainerMixin

RECIPES = ["tensorwise", "rowwise", "delayed"]
NEW_TOKENS = 6


@dataclass
class Arguments(FP8ArgumentsMixin, Seq2SeqTrainingArguments):
    pass


class FP8Seq2SeqTrainer(FP8TrainerMixin, Seq2SeqTrainer):
    pass


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=models.VOCABULARY,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def llama() -> PreTrainedModel:
    return models.llama(pad_token_id=0, eos_token_id=None)


BUILDS = {"t5": t5, "llama": llama}


# --- loss --------------------------------------------------------------------------------------------------


class Evaluations(TrainerCallback):
    """The weights at each evaluation."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, model: Any = None, **kwargs: Any
    ) -> None:
        self.losses.append(metrics["eval_loss"])
        self.weights.append(models.whole(model))


def evaluated_training(folder: str, recipe: str, compiled: bool) -> tuple[Evaluations, bool]:
    """Evaluates before, at the start of, between and after the steps of training."""
    seen = Evaluations()
    flags = {"torch_compile": True, "torch_compile_backend": "aot_eager"} if compiled else {}
    trainer = models.trainer(
        folder,
        models.llama(),
        fp8_recipe=recipe,
        callbacks=[seen],
        eval_on_start=True,
        eval_strategy="steps",
        eval_steps=2,
        max_steps=4,
        **flags,
    )
    before = trainer.evaluate()["eval_loss"]
    assert trainer.predict(trainer.eval_dataset).metrics["test_loss"] == before
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert trainer.predict(trainer.eval_dataset).metrics["test_loss"] == after
    assert seen.losses[0] == before and seen.losses[-1] == after
    return seen, isinstance(trainer.model, FSDPModule)


def fresh_loss(folder: str, weights: dict[str, torch.Tensor], recipe: str) -> float:
    model = models.llama()
    model.load_state_dict(weights)
    return models.trainer(folder, model, fp8_recipe=recipe).evaluate()["eval_loss"]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_evaluation_gives_the_loss_of_the_same_weights_in_a_fresh_model(
    tmp_path: Path, recipe: str, compiled: bool
) -> None:
    seen, _ = evaluated_training(str(tmp_path), recipe, compiled)
    assert len(seen.losses) == 5  # before, at the start, after steps 2 and 4, at the end
    assert seen.losses[0] == seen.losses[1] > seen.losses[2] > seen.losses[3] == seen.losses[4]
    for loss, weights in zip(seen.losses, seen.weights, strict=True):
        fresh = fresh_loss(str(tmp_path), weights, recipe)
        assert loss == (pytest.approx(fresh, rel=1e-3) if compiled else fresh)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_sharded_evaluation_gives_the_loss_of_the_same_weights_in_a_fresh_model(
    ranks: Ranks, tmp_path: Path, recipe: str
) -> None:
    for seen, sharded in ranks(evaluated_training, str(tmp_path), recipe, False, fsdp=True):
        assert sharded and len(seen.losses) == 5
        assert seen.losses[0] == seen.losses[1] > seen.losses[2] > seen.losses[3] == seen.losses[4]
        for loss, weights in zip(seen.losses, seen.weights, strict=True):
            assert loss == pytest.approx(fresh_loss(str(tmp_path), weights, recipe), rel=5e-3)


def test_delayed_evaluation_leaves_the_scales_alone_and_is_near_exact_scales(tmp_path: Path) -> None:
    trainer = models.trainer(str(tmp_path), models.llama(), fp8_recipe="delayed", max_steps=4)
    trainer.train()
    scaling = trainer.fp8_plugin.scaling
    assert scaling is not None
    scales, history = scaling.scales(), scaling.history.clone()
    loss = trainer.evaluate()["eval_loss"]
    assert torch.equal(scaling.scales(), scales) and torch.equal(scaling.history, history)
    fresh = fresh_loss(str(tmp_path), models.whole(trainer.model), "delayed")
    assert loss == pytest.approx(fresh, rel=5e-3)


class Accuracy:
    """Metric that is fed batch by batch."""

    def __init__(self) -> None:
        self.right = self.total = self.batches = 0

    def __call__(self, batch: EvalPrediction, compute_result: bool) -> dict[str, float]:
        right = torch.as_tensor(batch.predictions).argmax(-1) == torch.as_tensor(batch.label_ids)
        self.right, self.total = self.right + int(right.sum()), self.total + right.numel()
        self.batches += 1
        return {"accuracy": self.right / self.total, "batches": self.batches} if compute_result else {}


def test_metrics_of_batches_are_those_of_the_whole(tmp_path: Path) -> None:
    data = models.labelled_texts(12)
    trainer = FP8Trainer(
        model=models.bert(),
        args=models.arguments(str(tmp_path), batch_eval_metrics=True),
        train_dataset=data,
        eval_dataset=data,
        compute_metrics=Accuracy(),
    )
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_batches"] == 3
    whole = models.trainer(str(tmp_path), models.bert(), data)
    whole.model.load_state_dict(trainer.model.state_dict())
    output = whole.predict(data)
    assert metrics["eval_accuracy"] == (output.predictions.argmax(-1) == output.label_ids).mean()


# --- generation --------------------------------------------------------------------------------------------


def generating(folder: str, model: nn.Module, **changes: Any) -> FP8Seq2SeqTrainer:
    known = models.arguments(folder).to_dict()
    settings = {name: known[name] for name in KEPT}
    args = Arguments(
        folder,
        use_cpu=True,
        fp8_emulate=True,
        fp8_recipe="tensorwise",  # a fresh model has no scales of the past
        report_to="none",
        predict_with_generate=True,
        generation_max_length=16 + NEW_TOKENS,
        **{**settings, **changes},
    )
    data = models.texts(16)
    return FP8Seq2SeqTrainer(model=model, args=args, train_dataset=data, eval_dataset=data[:8])


KEPT = [
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "max_steps",
    "learning_rate",
    "lr_scheduler_type",
    "train_sampling_strategy",
    "save_strategy",
    "disable_tqdm",
]


def generated(folder: str, name: str, weights: dict[str, torch.Tensor] | None = None, **changes: Any) -> Any:
    model: PreTrainedModel = BUILDS[name]()
    if weights is not None:
        model.load_state_dict(weights, strict=False)  # which lacks second names of tied weights
        return generating(folder, model).predict(models.texts(16)[:8]).predictions
    counters.clear()
    trainer = generating(
        folder, model, eval_strategy="steps", eval_steps=1, eval_on_start=True, max_steps=2, **changes
    )
    trainer.train()
    prediction = trainer.predict(trainer.eval_dataset)
    first = counters["stats"]["unique_graphs"]
    assert (trainer.predict(trainer.eval_dataset).predictions == prediction.predictions).all()
    assert counters["stats"]["unique_graphs"] == first
    sharded = isinstance(model, FSDPModule)
    return prediction.predictions, prediction.metrics["test_loss"], models.whole(model), first, sharded


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", BUILDS)
def test_generation_gives_the_tokens_of_the_same_weights_in_a_fresh_model(
    tmp_path: Path, name: str, compiled: bool
) -> None:
    """A cache in compiled blocks would make a graph for each layer, and again for each token."""
    torch._dynamo.reset()
    flags = {"torch_compile": True, "torch_compile_backend": "eager"} if compiled else {}
    tokens, loss, weights, graphs, _ = generated(str(tmp_path), name, **flags)
    assert tokens.shape == (8, 16 + NEW_TOKENS) and loss > 0
    assert (tokens == generated(str(tmp_path), name, weights)).all()
    # Training, evaluation in it and after it, of a block and the head, or of T5's four kinds of blocks and its encoder.
    assert graphs <= (14 if name == "t5" else 6)
    assert (graphs > 0) == compiled


def generated_when_sharded(folder: str, name: str, compiled: bool) -> Any:
    flags = {"torch_compile": True, "torch_compile_backend": "aot_eager"} if compiled else {}
    return generated(folder, name, **flags)


@pytest.mark.parametrize(("name", "compiled"), [("t5", False), ("llama", False), ("llama", True)], ids=str)
def test_sharded_generation_gives_the_same_tokens(
    ranks: Ranks, tmp_path: Path, name: str, compiled: bool
) -> None:
    results = ranks(generated_when_sharded, str(tmp_path), name, compiled, fsdp=True)
    for tokens, loss, weights, graphs, sharded in results:
        assert sharded and loss > 0
        # Training, evaluation in it and after it, of a block and of the head.
        assert graphs <= 6 and (graphs > 0) == compiled
        fresh = generated(str(tmp_path), name, weights)
        assert tokens.shape == fresh.shape
        # Sharded, activations are bf16 throughout: a token may differ where two are about as likely.
        assert (tokens == fresh).mean() > 0.8
    assert (results[0][0] == results[1][0]).all()


def test_generation_under_adapters_in_compiled_blocks_makes_no_graph(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = get_peft_model(models.llama(), LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    flags = {"torch_compile": True, "torch_compile_backend": "eager"}
    trainer = models.trainer(str(tmp_path), model, **flags)
    trainer.train()
    counters.clear()
    ids = torch.stack([row["input_ids"] for row in models.texts(2)])
    for cached in (True, False):
        output = model.generate(input_ids=ids, max_new_tokens=NEW_TOKENS, use_cache=cached, do_sample=False)
        assert output.shape == (2, 16 + NEW_TOKENS)
        # Without a cache the compiled blocks serve all lengths: by one graph for the first and one for the others.
        assert counters["stats"]["unique_graphs"] <= (0 if cached else 3)


# --- activation checkpointing ------------------------------------------------------------------------------


class Gradients(TrainerCallback):
    def __init__(self) -> None:
        self.all: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kw: Any
    ) -> None:
        self.all.append(models.whole_gradients(model))


def two_lengths(steps: int) -> models.Data:
    """Batches of 4 whose lengths alternate."""
    return [
        row for step in range(steps) for row in models.texts(4 * steps, 16 + 8 * (step % 2))[4 * step :][:4]
    ]


def gradients(folder: Path, recipe: str, steps: int, **flags: Any) -> list[dict[str, torch.Tensor]]:
    torch._dynamo.reset()
    seen = Gradients()
    model = models.llama(num_hidden_layers=3)
    models.trainer(
        str(folder), model, two_lengths(steps), fp8_recipe=recipe, callbacks=[seen], max_steps=steps, **flags
    ).train()
    return seen.all


def test_checkpointing_with_compile_leaves_the_gradients_for_two_lengths(tmp_path: Path) -> None:
    """Ten steps, lengths in alternation: no CheckpointError, and the gradients of the run without."""
    flags = {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_grad_norm": 0.0}
    expected = gradients(tmp_path, "delayed", 10, **flags)
    assert len(expected) == 10
    for reentrant in (False, True):
        found = gradients(
            tmp_path,
            "delayed",
            10,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
            **flags,
        )
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert ours.keys() == theirs.keys()
            for name, gradient in ours.items():
                error = (gradient - theirs[name]).norm() / theirs[name].norm()
                assert error < 1e-3, (step, name)
