"""FSDP2, for real, on gloo ranks: what is sharded, gathered, trained and loaded."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.trainer_utils import PredictionOutput

import models
from gloo import Ranks
from hf_fp8 import FP8Config, FP8Plugin, FP8Trainer
from hf_fp8.linear import FP8Module, fp8_modules

EFFICIENT = {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
KEEP = {"FSDP_RESHARD_AFTER_FORWARD": "false"}
HYBRID = {
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
}


@dataclass
class Facts:
    """What a rank has to say about a trained model."""

    losses: list[float]
    sharded: bool
    shards: set[tuple[str, str, bool]]
    """(type, dtype, trainable) of the local tensors."""
    in_optimizer_once: bool
    fp8: set[str]
    """Weights of converted modules."""
    unchanged: set[str]
    """Trainable parameters that training did not change."""
    frozen_changed: set[str]
    state_dict: set[str]
    """Types of the tensors in the state dict, and of the local tensors of DTensors."""
    notes: str
    rows: dict[str, str]
    """Module -> why it is not in FP8, empty if it is."""
    extra: dict[str, Any] = field(default_factory=dict)


def facts(trainer: FP8Trainer, before: dict[str, torch.Tensor]) -> Facts:
    model: nn.Module = trainer.model
    after = models.whole(model)
    changed = {name for name, value in after.items() if not torch.equal(value.float(), before[name].float())}
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    held = Counter(id(p) for group in trainer.optimizer.param_groups for p in group["params"])
    state = model.state_dict().values()
    return Facts(
        losses=models.losses(trainer),
        sharded=isinstance(model, FSDPModule) and all(isinstance(p, DTensor) for p in model.parameters()),
        shards={
            (type(local).__name__, str(local.dtype), p.requires_grad)
            for p in model.parameters()
            for local in [p._local_tensor]
        },
        in_optimizer_once=held == Counter(id(p) for p in model.parameters() if p.requires_grad),
        fp8={f"{name}.weight" for name in fp8_modules(model)},
        unchanged=trainable - changed,
        frozen_changed=changed - trainable,
        state_dict={type(t).__name__ for t in state}
        | {type(t._local_tensor).__name__ for t in state if isinstance(t, DTensor)},
        notes="\n".join(trainer.fp8_report.notes),
        rows={row.name: row.reason for row in trainer.fp8_report.rows},
    )


def train(folder: str, build: Callable[[], nn.Module], data: models.Data | None, flags: Any) -> Facts:
    model = build()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = models.trainer(folder, model, data, **flags)
    trainer.train()
    return facts(trainer, before)


def check_trained(each: Facts) -> None:
    """What holds for every model trained under FSDP2."""
    assert each.sharded
    assert {kind for kind, _, _ in each.shards} == {"Tensor"}
    assert {dtype for _, dtype, trainable in each.shards if trainable} == {"torch.float32"}
    assert each.in_optimizer_once
    assert each.fp8 and not each.unchanged and not each.frozen_changed
    assert each.state_dict <= {"Tensor", "DTensor"}
    assert all(torch.isfinite(torch.tensor(each.losses)))


# --- masters, optimizer, state dict ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        {"fp8_recipe": "tensorwise"},
        {"fp8_recipe": "tensorwise", "fp8_all_gather": "off"},
        {"fp8_recipe": "delayed"},
        {"fp8_recipe": "rowwise"},
        {"fp8_recipe": "rowwise_with_gw_hp"},
    ],
    ids=lambda flags: "-".join(flags.values()),
)
def test_every_weight_of_a_bf16_model_trains_as_a_plain_fp32_shard(
    ranks: Ranks, tmp_path: Path, flags: dict[str, str]
) -> None:
    """At a learning rate of 1e-5 a bf16 master would lose most of the updates."""
    results = ranks(
        train, str(tmp_path), models.bf16_llama, None, {**flags, "learning_rate": 1e-5}, fsdp=True
    )
    for each in results:
        check_trained(each)
        count = 15 if flags["fp8_recipe"] == "delayed" else 14  # with the head
        assert len(each.fp8) == count
        gathered = f"FP8 all-gather: all {count} converted weights" in each.notes
        assert gathered == (flags["fp8_recipe"] in ("tensorwise", "delayed") and len(flags) == 1)
    assert results[0].losses == results[1].losses


def first_losses(folder: str, build: Callable[[], nn.Module], recipe: str) -> list[float]:
    flags = {"fp8_recipe": recipe, "max_steps": 1}
    return [
        train(folder, build, None, {**flags, "fp8_all_gather": gather}).losses[0] for gather in ("on", "off")
    ]


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_fp8_gather_gives_the_same_first_loss(ranks: Ranks, tmp_path: Path, recipe: str) -> None:
    for on, off in ranks(first_losses, str(tmp_path), models.bf16_llama, recipe, fsdp=True):
        assert on == off
    for on, off in ranks(first_losses, str(tmp_path), models.llama, recipe, fsdp=True):
        assert on == pytest.approx(off, rel=5e-3)  # without the rounding to bf16 in between


def one_label() -> nn.Module:
    return models.bert(labels=1)


def test_empty_shards_train_and_are_in_the_optimizer(ranks: Ranks, tmp_path: Path) -> None:
    """The head of a regression has one row and a bias of one element: rank 1 holds nothing of either."""
    results = ranks(train, str(tmp_path), one_label, models.labelled_texts(24, labels=1), {}, fsdp=True)
    for each in results:
        check_trained(each)
        assert each.rows["classifier"] == "task head"


def lora(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    adapters = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(models.llama().to(dtype), adapters)


@pytest.mark.parametrize("env", [{}, EFFICIENT], ids=["each-rank-loads", "rank-0-loads"])
def test_frozen_base_stays_bf16_and_adapters_train_in_fp32(
    ranks: Ranks, tmp_path: Path, env: dict[str, str]
) -> None:
    for each in ranks(train, str(tmp_path), lora, None, {}, fsdp=True, env=env):
        check_trained(each)
        assert each.shards == {("Tensor", "torch.float32", True), ("Tensor", "torch.bfloat16", False)}
        assert len(each.fp8) == 14 and not any("lora" in name for name in each.fp8)
        assert "frozen parameters stay bfloat16" in each.notes


# --- architectures -----------------------------------------------------------------------------------------


def test_bert_trains(ranks: Ranks, tmp_path: Path) -> None:
    flags = {"max_steps": 12, "learning_rate": 3e-3}
    for each in ranks(train, str(tmp_path), models.bert, models.labelled_texts(8), flags, fsdp=True):
        check_trained(each)
        assert sum(each.losses[-3:]) < 0.7 * sum(each.losses[:3])


def test_vit_trains(ranks: Ranks, tmp_path: Path) -> None:
    flags = {"max_steps": 12, "learning_rate": 3e-3}
    for each in ranks(train, str(tmp_path), models.vit, models.labelled_images(8), flags, fsdp=True):
        check_trained(each)
        assert sum(each.losses[-3:]) < 0.7 * sum(each.losses[:3])


def train_tied(folder: str) -> Facts:
    model = models.tied_llama()
    trainer = models.trainer(folder, model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.train()
    result = facts(trainer, before)
    result.extra["tied"] = model.lm_head.weight is model.model.embed_tokens.weight
    result.extra["head"] = isinstance(model.lm_head, FP8Module)
    return result


@pytest.mark.parametrize("env", [{}, EFFICIENT], ids=["each-rank-loads", "rank-0-loads"])
def test_tied_embeddings_stay_tied_and_out_of_fp8(ranks: Ranks, tmp_path: Path, env: dict[str, str]) -> None:
    for each in ranks(train_tied, str(tmp_path), fsdp=True, env=env):
        check_trained(each)
        assert each.extra == {"tied": True, "head": False}
        assert each.rows["lm_head"] == "tied to an embedding"


# --- other meshes ------------------------------------------------------------------------------------------


def three_way_llama() -> nn.Module:
    return models.llama(
        intermediate_size=192
    )  # gate_proj and up_proj have 64 rows a rank, the others do not divide


def train_on_three(folder: str, gather: str) -> Facts:
    return train(folder, three_way_llama, models.texts(36), {"fp8_all_gather": gather})


@pytest.mark.parametrize("gather", ["auto", "on"])
def test_rows_that_do_not_divide_gather_in_bf16_and_the_report_says_so(
    ranks: Ranks, tmp_path: Path, gather: str
) -> None:
    results = ranks(train_on_three, str(tmp_path), gather, world_size=3, fsdp=True)
    for each in results:
        check_trained(each)
        assert "FP8 all-gather: 4 of 14 converted weights" in each.notes
        assert "rows do not divide by 3 ranks" in each.notes
    assert results[0].losses == results[2].losses


def refused_on_three(folder: str) -> None:
    models.trainer(folder, models.llama(), fp8_all_gather="on").train()


def test_gather_that_no_weight_can_honour_is_refused_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    for error in ranks.errors(refused_on_three, str(tmp_path), world_size=3, fsdp=True):
        assert error is not None and error[0] == "ValueError"
        assert "rows do not divide by 3 ranks" in error[1] and "fp8_all_gather=auto" in error[1]


def test_one_row_over_three_ranks_trains(ranks: Ranks, tmp_path: Path) -> None:
    data = models.labelled_texts(24, labels=1)
    for each in ranks(train, str(tmp_path), one_label, data, {}, world_size=3, fsdp=True):
        check_trained(each)


def train_on_four(folder: str, recipe: str) -> Facts:
    model = models.llama()
    trainer = models.trainer(folder, model, fp8_recipe=recipe, per_device_train_batch_size=2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.train()
    result = facts(trainer, before)
    weight: Any = model.model.layers[0].mlp.up_proj.weight
    result.extra = {
        "mesh": tuple(weight.device_mesh.shape),
        "rows": weight.to_local().shape[0],
        "weights": models.whole(model),
    }
    return result


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_hybrid_sharding_trains_as_full_sharding_does(ranks: Ranks, tmp_path: Path, recipe: str) -> None:
    hybrid = ranks(train_on_four, str(tmp_path), recipe, world_size=4, fsdp=True, env=HYBRID)
    full = ranks(train_on_four, str(tmp_path), recipe, world_size=4, fsdp=True)
    for each in hybrid:
        check_trained(each)
        assert (each.extra["mesh"], each.extra["rows"]) == ((2, 2), 64)
        assert f"FP8 all-gather: all {15 if recipe == 'delayed' else 14}" in each.notes
        assert each.losses == pytest.approx(full[0].losses, rel=1e-3)
        for name, weight in each.extra["weights"].items():
            assert torch.equal(weight, hybrid[0].extra["weights"][name]), name
    assert (full[0].extra["mesh"], full[0].extra["rows"]) == ((4,), 32)


def offloaded(offload: bool) -> tuple[str, list[float]]:
    """Losses of a few steps with clipping, and what is said about the gather."""
    fsdp = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_offload=CPUOffloadPolicy(pin_memory=False) if offload else False,
    )
    plugin = FP8Plugin(FP8Config(recipe="tensorwise", all_gather="auto" if offload else "off", emulate=True))
    accelerator = Accelerator(fsdp_plugin=fsdp, **plugin.accelerator_kwargs())
    model = models.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = plugin.prepare(accelerator, model, optimizer)
    assert isinstance(model, FSDPModule)
    ids = torch.stack([example["input_ids"] for example in models.texts(4)])
    losses = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert plugin.report is not None
    return "\n".join(plugin.report.notes), losses


def test_offloaded_shards_gather_in_bf16_and_the_report_says_so(ranks: Ranks) -> None:
    results = ranks(offloaded, True, fsdp=True, env=EFFICIENT)
    for (notes, losses), (_, expected) in zip(results, ranks(offloaded, False, fsdp=True), strict=True):
        assert "FP8 all-gather: 0 of 14 converted weights (others in bf16: parameters live on CPU)" in notes
        assert "parameters on CPU" in notes
        assert losses == expected and losses[-1] < losses[0]


# --- gradients ---------------------------------------------------------------------------------------------


@dataclass
class Gradients:
    norm: float
    """As `clip_grad_norm_` returned it."""
    clipped_norm: float
    gradients: dict[str, torch.Tensor]
    """After clipping to a norm of 1e-3."""


MAX_NORM = 1e-3
BATCH = 16  # of all ranks and micro-batches together


def gradients(recipe: str, accumulation: int, repeated: bool = False) -> Gradients:
    """The second step's gradients, through `FP8Plugin`, of the same 16 examples however they are divided.

    `repeated`: every quarter of a rank's batch is the same, so that dividing it changes no scale of that rank.
    """
    # The dither of a head depends on the place in the batch.
    plugin = FP8Plugin(FP8Config(recipe=recipe, emulate=True, amax_sync=not repeated, head="off"))
    accelerator = Accelerator(
        gradient_accumulation_steps=accumulation,
        cpu=not dist.is_initialized(),
        **plugin.accelerator_kwargs(),
    )
    model = models.llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = plugin.prepare(accelerator, model, optimizer)
    assert isinstance(model, FSDPModule) == dist.is_initialized()
    ids = torch.stack([example["input_ids"] for example in models.texts(BATCH)])
    mine = ids.chunk(accelerator.num_processes)[accelerator.process_index]
    if repeated:
        mine = mine[: len(mine) // 4].repeat(4, 1)
    norm = torch.zeros(())
    for _ in range(2):  # the first step of the delayed recipe calibrates
        optimizer.zero_grad()
        for micro in mine.chunk(accumulation):
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=micro, labels=micro).loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
    found = models.whole_gradients(model)
    total = torch.stack([g.double().norm() for g in found.values()]).norm()
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return Gradients(norm.item(), total.item(), found)


def exact_gradients() -> tuple[float, dict[str, torch.Tensor]]:
    """Norm and gradients in float64, without FP8 and without clipping."""
    model = models.llama().double()
    ids = torch.stack([example["input_ids"] for example in models.texts(BATCH)])
    logits = model(input_ids=ids).logits[:, :-1]
    nn.functional.cross_entropy(logits.reshape(-1, models.VOCABULARY), ids[:, 1:].reshape(-1)).backward()
    found = models.whole_gradients(model)
    return torch.stack([g.norm() for g in found.values()]).norm().item(), found


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Norm of the difference in the directions of all gradients together, relative."""
    assert found.keys() == expected.keys()
    a, b = (torch.cat([d[name].double().flatten() for name in expected]) for d in (found, expected))
    return (a / a.norm() - b / b.norm()).norm().item()


# Only rowwise scales do not depend on the rest of the batch.
@pytest.mark.parametrize(
    ("recipe", "repeated"), [("rowwise", False), ("tensorwise", True), ("delayed", True)]
)
def test_four_micro_batches_give_the_gradients_of_one_large_batch(
    ranks: Ranks, recipe: str, repeated: bool
) -> None:
    at_once = ranks(gradients, recipe, 1, repeated, fsdp=True)
    in_four = ranks(gradients, recipe, 4, repeated, fsdp=True)
    for one, four in zip(at_once, in_four, strict=True):
        assert distance(four.gradients, one.gradients) < 0.01
        assert four.norm == pytest.approx(one.norm, rel=2e-3)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_gradients_and_clipping_are_those_of_a_single_process(ranks: Ranks, recipe: str) -> None:
    (alone,) = ranks(gradients, recipe, 1, world_size=1)
    exact_norm, exact = exact_gradients()
    for accumulation in (1, 4):
        sharded = ranks(gradients, recipe, accumulation, fsdp=True)
        assert sharded[0].norm == sharded[1].norm
        for each in sharded:
            # FP8 rounds each run differently; a quarter of the batch left out would make it 0.5.
            assert distance(each.gradients, alone.gradients) < 0.25
            assert distance(each.gradients, exact) < 0.25
            assert each.norm == pytest.approx(alone.norm, rel=0.03)
            assert each.norm == pytest.approx(exact_norm, rel=0.03)
            assert each.clipped_norm == pytest.approx(MAX_NORM, rel=1e-3)


# --- loading -----------------------------------------------------------------------------------------------


def load(
    folder: str, build: Callable[[], Any], data: models.Data, recipe: str, from_rank0: bool
) -> dict[str, Any]:
    """How the sharded model compares with what rank 0 had; the other ranks held NaN if rank 0 loads."""
    model = build()
    before = {n: p.detach().float().clone() for n, p in model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    if from_rank0 and dist.get_rank():
        models.with_nan(model)
    trainer = models.trainer(folder, model, data, fp8_recipe=recipe, learning_rate=0.0, max_steps=1)
    trainer.train()
    assert isinstance(trainer.model, FSDPModule)
    own = {n: b for n, b in model.named_buffers() if "fp8_" in n}
    return {
        "parameters": {n: torch.equal(p.float(), before[n]) for n, p in models.whole(model).items()},
        "buffers": {n: torch.equal(b, buffers[n]) for n, b in model.named_buffers() if n not in own},
        "scales": {n: b.item() for n, b in own.items() if n.endswith("_scale")},
        "losses": models.losses(trainer),
        "notes": "\n".join(trainer.fp8_report.notes),
    }


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("build", [models.bf16_llama, models.tied_llama, models.bert])
def test_ranks_without_weights_get_those_of_rank_0(
    ranks: Ranks, tmp_path: Path, build: Callable[[], nn.Module], recipe: str
) -> None:
    """Placeholders of the other ranks hold NaN: whoever reads one spreads it."""
    data = models.labelled_texts(8) if build is models.bert else models.texts(8)
    loaded = ranks(load, str(tmp_path), build, data, recipe, True, fsdp=True, env=EFFICIENT)
    everywhere = ranks(load, str(tmp_path), build, data, recipe, False, fsdp=True)
    for each in (*loaded, *everywhere):
        assert all(each["parameters"].values()) and all(each["buffers"].values())
        assert each["buffers"] and each["scales"]
        assert each["scales"] == loaded[0]["scales"]
        assert each["losses"] == everywhere[0]["losses"]
    assert "weights from rank 0" in loaded[0]["notes"]
    assert "weights from rank 0" not in everywhere[0]["notes"]


def train_from_pretrained(folder: str) -> tuple[list[float], bool]:
    path = f"{folder}/model"
    if dist.get_rank() == 0:
        models.bf16_llama().save_pretrained(path)
    dist.barrier()
    args = models.arguments(folder)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    data = models.texts(24)
    trainer = FP8Trainer(model=model, args=args, train_dataset=data)
    trainer.train()
    assert isinstance(trainer.model, FSDPModule)
    return models.losses(trainer), all(torch.isfinite(p).all() for p in models.whole(model).values())


def test_only_rank_0_reads_the_checkpoint_with_the_same_losses(ranks: Ranks, tmp_path: Path) -> None:
    loaded = ranks(train_from_pretrained, str(tmp_path / "a"), fsdp=True, env=EFFICIENT)
    everywhere = ranks(train_from_pretrained, str(tmp_path / "b"), fsdp=True)
    assert loaded == everywhere and loaded[0][1]


# --- around train() ----------------------------------------------------------------------------------------


def train_plainly(folder: str, recipe: str) -> list[float]:
    trainer = models.trainer(folder, models.llama(), fp8_recipe=recipe)
    trainer.train()
    assert isinstance(trainer.model, FSDPModule)
    return models.losses(trainer)


def evaluate_first(folder: str, recipe: str) -> tuple[Facts, list[float]]:
    model = models.llama()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = models.trainer(folder, model, fp8_recipe=recipe)
    first = trainer.evaluate()["eval_loss"]
    assert isinstance(trainer.model, FSDPModule)
    predicted: PredictionOutput = trainer.predict(trainer.eval_dataset)
    trainer.train()
    last = trainer.evaluate()["eval_loss"]
    assert predicted.metrics is not None
    return facts(trainer, before), [first, predicted.metrics["test_loss"], last]


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_evaluation_before_training_leaves_training_as_it_is(
    ranks: Ranks, tmp_path: Path, recipe: str
) -> None:
    expected = ranks(train_plainly, str(tmp_path), recipe, fsdp=True)
    results = ranks(evaluate_first, str(tmp_path), recipe, fsdp=True)
    for (each, (first, predicted, last)), plain in zip(results, expected, strict=True):
        check_trained(each)
        assert each.losses == plain
        assert first == predicted and first > last


def evaluate_in_batches(folder: str, recipe: str, head: str) -> tuple[float, float, list[float]]:
    """Four batches on every rank, whose weights may stay gathered from one to the next."""
    model = models.llama()
    flags = {"fp8_head": head, "per_device_eval_batch_size": 1, "gradient_accumulation_steps": 2}
    trainer = models.trainer(folder, model, fp8_recipe=recipe, max_steps=2, **flags)
    first = trainer.evaluate()["eval_loss"]
    trainer.train()
    last = trainer.evaluate()["eval_loss"]
    assert isinstance(trainer.model, FSDPModule)
    return first, last, models.losses(trainer)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("head", ["auto", "on"])
def test_weights_kept_after_forward_change_no_loss(
    ranks: Ranks, tmp_path: Path, recipe: str, head: str
) -> None:
    """Those of the head are kept in any case."""
    freed = ranks(evaluate_in_batches, str(tmp_path), recipe, head, fsdp=True)
    kept = ranks(evaluate_in_batches, str(tmp_path), recipe, head, fsdp=True, env=KEEP)
    assert freed == kept
    first, last, _ = kept[0]
    assert last < first


class UnderInferenceMode(TrainerCallback):
    """A user's callback that looks at the model's output before and during training."""

    def __init__(self) -> None:
        self.outputs: list[float] = []

    def look(self, model: nn.Module) -> None:
        ids = torch.stack([example["input_ids"] for example in models.texts(4)])
        with torch.inference_mode():
            self.outputs.append(model(input_ids=ids, labels=ids).loss.item())

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.look(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.look(model)


def train_watched(folder: str, recipe: str) -> tuple[Facts, list[float]]:
    model, callback = models.llama(), UnderInferenceMode()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = models.trainer(folder, model, fp8_recipe=recipe, callbacks=[callback])
    trainer.train()
    return facts(trainer, before), callback.outputs


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_inference_mode_in_a_callback_leaves_training_as_it_is(
    ranks: Ranks, tmp_path: Path, recipe: str
) -> None:
    expected = ranks(train_plainly, str(tmp_path), recipe, fsdp=True)
    results = ranks(train_watched, str(tmp_path), recipe, fsdp=True)
    for (each, outputs), plain in zip(results, expected, strict=True):
        check_trained(each)
        assert each.losses == plain
        assert len(outputs) == 4 and outputs[-1] < outputs[0]


def train_twice(folder: str, recipe: str) -> tuple[Facts, list[float], bool]:
    model = models.llama()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = models.trainer(folder, model, fp8_recipe=recipe)
    trainer.train()
    first = models.losses(trainer)
    once = trainer.fp8_report, str(trainer.fp8_report), list(fp8_modules(model).values())
    trainer.train()
    twice = trainer.fp8_report, str(trainer.fp8_report), list(fp8_modules(model).values())
    return facts(trainer, before), first, once == twice


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_second_train_goes_on_without_converting_again(ranks: Ranks, tmp_path: Path, recipe: str) -> None:
    for each, first, same in ranks(train_twice, str(tmp_path), recipe, fsdp=True):
        check_trained(each)
        assert same and len(first) == len(each.losses) == 3
        assert each.losses[0] < first[0]  # the same examples again


def precision_of_the_loss(folder: str) -> tuple[str, list[float]]:
    trainer = models.trainer(folder, models.llama())
    trainer.train()
    ids = torch.stack([example["input_ids"] for example in models.texts(4)])
    assert isinstance(trainer.model, FSDPModule)
    return str(trainer.model(input_ids=ids, labels=ids).loss.dtype), models.losses(trainer)


def test_loss_is_not_rounded_to_bf16(ranks: Ranks, tmp_path: Path) -> None:
    for dtype, losses in ranks(precision_of_the_loss, str(tmp_path), fsdp=True):
        assert dtype == "torch.float32"
        assert all(loss != torch.tensor(loss).bfloat16().item() for loss in losses)


def prepare_with_own_groups() -> tuple[list[list[str]], bool]:
    """An optimizer with two groups, built on the whole model: the names in each afterwards."""
    plugin = FP8Plugin(FP8Config(emulate=True))
    accelerator = Accelerator(**plugin.accelerator_kwargs())
    model = models.llama()
    flat = [p for p in model.parameters() if p.ndim < 2]
    matrices = [p for p in model.parameters() if p.ndim == 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model, optimizer = plugin.prepare(accelerator, model, optimizer)
    assert isinstance(model, FSDPModule)
    ids = torch.stack([example["input_ids"] for example in models.texts(4)])
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    names = {p: name for name, p in model.named_parameters()}
    changed = all(not torch.equal(value, before[name]) for name, value in models.whole(model).items())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    return [[names[p] for p in group["params"]] for group in optimizer.param_groups], changed


@pytest.mark.parametrize("env", [{}, EFFICIENT], ids=["each-rank-loads", "rank-0-loads"])
def test_optimizer_built_on_the_whole_model_is_pointed_at_the_shards(
    ranks: Ranks, env: dict[str, str]
) -> None:
    names = {name: p.ndim for name, p in models.llama().named_parameters()}
    for (matrices, flat), changed in ranks(prepare_with_own_groups, fsdp=True, env=env):
        assert changed
        assert matrices == [name for name, ndim in names.items() if ndim == 2]
        assert flat == [name for name, ndim in names.items() if ndim == 1]


def stranger_in_the_optimizer() -> None:
    plugin = FP8Plugin(FP8Config(emulate=True))
    accelerator = Accelerator(**plugin.accelerator_kwargs())
    optimizer = torch.optim.AdamW(models.llama().parameters(), lr=1e-3)
    plugin.prepare(accelerator, models.llama(), optimizer)


def test_optimizer_of_another_model_is_refused_on_every_rank(ranks: Ranks) -> None:
    for error in ranks.errors(stranger_in_the_optimizer, fsdp=True):
        assert error is not None and error[0] == "ValueError" and "model.parameters()" in error[1]


# --- what moves between ranks ------------------------------------------------------------------------------


@dataclass
class Traffic:
    """What FSDP2 did since the last `clear`."""

    gathered: Counter[str] = field(default_factory=Counter)
    """Parameter -> how often it became whole."""
    resharded: Counter[str] = field(default_factory=Counter)
    sent: list[tuple[torch.dtype, int]] = field(default_factory=list)
    """Of each all-gather: dtype and bytes of this rank's part."""

    def clear(self) -> None:
        self.gathered.clear()
        self.resharded.clear()
        self.sent.clear()

    def of_blocks(self, names: set[str]) -> tuple[set[int], set[int]]:
        return {self.gathered[name] for name in names}, {self.resharded[name] for name in names}


@contextmanager
def traffic() -> Iterator[Traffic]:
    seen = Traffic()
    to_unsharded, to_sharded, gather = (
        FSDPParam.to_unsharded,
        FSDPParam.to_sharded,
        DefaultAllGather.__call__,
    )

    def count_gather(self: FSDPParam) -> None:
        seen.gathered[str(self._param_fqn)] += 1
        to_unsharded(self)

    def count_reshard(self: FSDPParam) -> None:
        seen.resharded[str(self._param_fqn)] += 1
        to_sharded(self)

    def measure(self: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **kwargs: Any) -> Any:
        seen.sent.append((input_tensor.dtype, input_tensor.nbytes))
        return gather(self, output_tensor, input_tensor, **kwargs)

    FSDPParam.to_unsharded, FSDPParam.to_sharded = count_gather, count_reshard
    DefaultAllGather.__call__ = measure
    try:
        yield seen
    finally:
        FSDPParam.to_unsharded, FSDPParam.to_sharded = to_unsharded, to_sharded
        DefaultAllGather.__call__ = gather


def moved(recipe: str, gather: str, backend: str, accumulation: int, checkpointed: bool) -> dict[str, Any]:
    """What one evaluation and one optimizer step move, after a step that settles everything."""
    plugin = FP8Plugin(FP8Config(recipe=recipe, all_gather=gather, emulate=True))
    accelerator = Accelerator(
        gradient_accumulation_steps=accumulation, dynamo_backend=backend, **plugin.accelerator_kwargs()
    )
    model = models.llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if checkpointed:
        model.gradient_checkpointing_enable()
    model, optimizer = plugin.prepare(accelerator, model, optimizer)
    assert isinstance(model, FSDPModule)
    blocks = {n for n, _ in model.named_parameters() if n.startswith("model.layers.")}
    ids = torch.stack([example["input_ids"] for example in models.texts(4)])
    compiled = sum(block._compiled_call_impl is not None for block in model.model.layers)

    def step() -> None:
        for _ in range(accumulation):
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=ids, labels=ids).loss)
                optimizer.step()
                optimizer.zero_grad()

    step()
    step()
    with traffic() as seen:
        with torch.no_grad():
            model(input_ids=ids, labels=ids)
        model.reshard()
        evaluation = seen.of_blocks(blocks)
        sent = list(seen.sent)
        for block in model.model.layers:
            block.reshard()
        seen.clear()
        step()
        return {
            "evaluation": evaluation,
            "step": seen.of_blocks(blocks),
            "sent": sent,
            "compiled": compiled,
        }


BLOCK = 64 * 64 * 2 + 2 * 32 * 64 + 3 * 64 * 128  # elements of one block's linear weights
NORMS = 2 * 64


@pytest.mark.parametrize("backend", ["no", "aot_eager"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_every_block_is_gathered_and_freed_once_a_pass_as_fp8(
    ranks: Ranks, recipe: str, backend: str
) -> None:
    """Compiled blocks too: a compiled wrapper would be called past the hooks that gather and free."""
    for each in ranks(moved, recipe, "on", backend, 1, False, fsdp=True):
        assert each["compiled"] == (2 if backend != "no" else 0)
        assert each["evaluation"] == ({1}, {1})
        assert each["step"] == ({2}, {2})  # once in forward, once in backward
        fp8_block = (torch.uint8, (BLOCK + 2 * NORMS) // 2)  # a byte a weight; norms are bf16
        assert each["sent"].count(fp8_block) == 2
    for each in ranks(moved, recipe, "off", backend, 1, False, fsdp=True):
        assert each["step"] == ({2}, {2})
        assert each["sent"].count((torch.bfloat16, BLOCK + NORMS)) == 2


@pytest.mark.parametrize("backend", ["no", "aot_eager"])
def test_checkpointed_blocks_are_gathered_and_freed_once_a_pass(ranks: Ranks, backend: str) -> None:
    for each in ranks(moved, "tensorwise", "on", backend, 1, True, fsdp=True):
        assert each["step"] == ({2}, {2})


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_weights_kept_after_forward_are_gathered_once_for_all_micro_batches(
    ranks: Ranks, recipe: str
) -> None:
    for each in ranks(moved, recipe, "on", "no", 4, False, fsdp=True, env=KEEP):
        assert each["step"] == ({1}, {1})


# --- activation checkpointing ------------------------------------------------------------------------------


def train_counting_forwards(folder: str, flags: dict[str, Any]) -> tuple[Facts, int]:
    calls: list[None] = []
    model = models.llama()
    attention = model.model.layers[0].self_attn
    attention.register_forward_hook(lambda *_: calls.append(None))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = models.trainer(folder, model, **flags)
    trainer.train()
    return facts(trainer, before), len(calls)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_recomputed_blocks_give_the_same_losses(ranks: Ranks, tmp_path: Path, recipe: str) -> None:
    flags = {"fp8_recipe": recipe}
    plain = ranks(train_counting_forwards, str(tmp_path), flags, fsdp=True)
    by_launch_config = ranks(
        train_counting_forwards,
        str(tmp_path),
        flags,
        fsdp=True,
        env={"FSDP_ACTIVATION_CHECKPOINTING": "true"},
    )
    by_trainer = ranks(
        train_counting_forwards, str(tmp_path), {**flags, "gradient_checkpointing": True}, fsdp=True
    )
    assert [calls for _, calls in plain] == [3, 3]
    for recomputed in (by_launch_config, by_trainer):
        for (each, calls), (expected, _) in zip(recomputed, plain, strict=True):
            check_trained(each)
            assert calls == 6
            assert each.losses == expected.losses
