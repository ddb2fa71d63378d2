"""LM head and loss as one compiled region: the same numbers, no logits where nobody reads them."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import models
from gloo import Ranks
from hf_fp8 import FP8Trainer
from hf_fp8.linear import fp8_modules

COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
SHAPES = {**models.SIZES, "vocab_size": models.VOCABULARY, "initializer_range": 0.1, "pad_token_id": 0}
GROUPED = {**SHAPES, "num_key_value_heads": 2, "head_dim": 16}
KINDS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "gemma2": {**GROUPED, "final_logit_softcapping": 5.0},
    "granite": {**GROUPED, "logits_scaling": 3.0},
    "qwen3_moe": {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def causal_lm(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **KINDS[kind]))


def texts_with_ignored_labels() -> models.Data:
    """A different number of counted labels in every example."""
    rows = models.texts(48)
    for index, row in enumerate(rows):
        row["labels"] = row["labels"].clone()
        row["labels"][: index % 7] = -100
    return rows


def numbers(trainer: FP8Trainer) -> tuple[list[float], float, torch.Tensor]:
    """Losses of the training, of an evaluation after it, and its logits."""
    trainer.train()
    predicted = trainer.predict(trainer.eval_dataset, ignore_keys=["router_logits"])
    return models.losses(trainer), predicted.metrics["test_loss"], torch.from_numpy(predicted.predictions)


@pytest.mark.parametrize("kind", KINDS)
def test_head_and_loss_in_one_graph_give_the_numbers_of_eager(tmp_path: Path, kind: str) -> None:
    """With softcapping, scaling of logits, ignored labels, and `num_items_in_batch` over two micro-batches."""
    data, flags = texts_with_ignored_labels(), {"gradient_accumulation_steps": 2}
    eager = numbers(models.trainer(str(tmp_path), causal_lm(kind), data, **flags))
    torch._dynamo.reset()
    counters.clear()
    trainer = models.trainer(str(tmp_path), causal_lm(kind), data, **flags, **COMPILED)
    compiled = numbers(trainer)
    assert compiled[:2] == eager[:2] and torch.equal(compiled[2], eager[2])
    assert trainer.fp8_plugin.head is not None
    # Blocks and head, each for training and for evaluation.
    assert counters["stats"]["unique_graphs"] == 4 and not counters["graph_break"]


def returned(trainer: FP8Trainer) -> dict[str, list[bool]]:
    """Whether each forward returned logits, in training and in evaluation."""
    seen: dict[str, list[bool]] = {"training": [], "evaluation": []}

    def look(module: PreTrainedModel, args: Any, output: Any) -> None:
        seen["training" if module.training else "evaluation"].append("logits" in output)

    handle = trainer.model.register_forward_hook(look)
    trainer.train()
    trainer.evaluate()
    handle.remove()
    return seen


class ReadsLogits(FP8Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + 0 * outputs.logits.float().mean()
        return (loss, outputs) if return_outputs else loss


def test_training_returns_no_logits_unless_somebody_may_read_them(tmp_path: Path) -> None:
    args = models.arguments(str(tmp_path), **COMPILED)
    data = models.texts(12)
    given = {"args": args, "train_dataset": data, "eval_dataset": data}
    assert returned(FP8Trainer(model=models.llama(), **given)) == {
        "training": [False] * 3,
        "evaluation": [True] * 3,
    }
    reading = ReadsLogits(model=models.llama(), **given)
    assert returned(reading) == {"training": [True] * 3, "evaluation": [True] * 3}
    # Outside a training step the caller gets them, too.
    ids = torch.stack([row["input_ids"] for row in data[:2]])
    assert reading.model(input_ids=ids, labels=ids).logits.shape == (2, 16, models.VOCABULARY)


@pytest.mark.parametrize("own_loss", [False, True], ids=["label smoothing", "compute_loss_func"])
def test_losses_outside_the_model_still_get_logits(tmp_path: Path, own_loss: bool) -> None:
    def own(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs.logits.float().flatten(0, 1), labels.flatten())

    found = []
    for flags in ({}, COMPILED):
        args = models.arguments(str(tmp_path), label_smoothing_factor=0.0 if own_loss else 0.1, **flags)
        trainer = FP8Trainer(
            model=models.llama(),
            args=args,
            train_dataset=models.texts(12),
            compute_loss_func=own if own_loss else None,
        )
        trainer.train()
        found.append(models.losses(trainer))
    assert found[0] == found[1]


def test_a_calibrating_fp8_head_costs_no_graph(tmp_path: Path) -> None:
    flags = {"fp8_head": "on", "fp8_recipe": "delayed"}
    eager = numbers(models.trainer(str(tmp_path), models.llama(), **flags))
    torch._dynamo.reset()
    counters.clear()
    trainer = models.trainer(str(tmp_path), models.llama(), **flags, **COMPILED)
    compiled = numbers(trainer)
    assert "lm_head" in fp8_modules(trainer.model)
    assert compiled[:2] == eager[:2] and torch.equal(compiled[2], eager[2])
    assert counters["stats"]["unique_graphs"] == 4


def sharded_losses(folder: str, tied: bool) -> tuple[list[float], list[float], bool]:
    """Of an eager and of a compiled run."""
    runs = []
    for flags in ({}, COMPILED):
        torch._dynamo.reset()
        counters.clear()
        model = models.tied_llama() if tied else models.llama()
        trainer = models.trainer(folder, model, gradient_accumulation_steps=2, **flags)
        trainer.train()
        runs.append([*models.losses(trainer), trainer.evaluate()["eval_loss"]])
    assert isinstance(trainer.model, FSDPModule)
    assert counters["stats"]["unique_graphs"] == 4 and not counters["graph_break"]
    return runs[0], runs[1], trainer.fp8_plugin.head is not None


@pytest.mark.parametrize("tied", [False, True], ids=["own weight", "tied"])
def test_head_is_one_graph_under_fsdp2_too(ranks: Ranks, tmp_path: Path, tied: bool) -> None:
    for eager, compiled, head in ranks(sharded_losses, str(tmp_path), tied, fsdp=True):
        assert head and compiled == eager and len(eager) == 4


def test_a_copy_of_the_model_runs_on_its_own_weights(tmp_path: Path) -> None:
    trainer = models.trainer(str(tmp_path), models.llama(), **COMPILED)
    trainer.train()
    copied = copy.deepcopy(trainer.accelerator.unwrap_model(trainer.model))
    with torch.no_grad():
        copied.lm_head.weight.zero_()
    ids = torch.stack([row["input_ids"] for row in models.texts(2)])
    assert not copied(input_ids=ids, labels=ids).logits.any()
    assert trainer.model(input_ids=ids, labels=ids).logits.any()
    trainer.model.lm_head = copied.lm_head  # and on a new head, if it gets one
    assert not trainer.model(input_ids=ids, labels=ids).logits.any()


def test_a_model_with_a_compiled_head_generates(tmp_path: Path) -> None:
    prompts = torch.stack([row["input_ids"][:6] for row in models.texts(2)])
    tokens = []
    for flags in ({}, COMPILED):
        trainer = models.trainer(str(tmp_path), models.llama(), **flags)
        trainer.train()
        trainer.model.eval()
        tokens.append(trainer.model.generate(prompts, max_new_tokens=6, do_sample=False, use_cache=True))
    assert torch.equal(tokens[0], tokens[1])
