"""FSDP1 on gloo ranks: training, evaluation between steps, checkpoints, and what is refused."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import GradientAccumulationPlugin
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, _init_utils
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import models
from gloo import Ranks, forget_accelerate
from hf_fp8 import FP8Config, FP8Plugin, iter_full_weights, revert, unroll_gradients
from hf_fp8.fsdp1 import full_fsdp1_state_dict

FSDP1 = {
    "FSDP_VERSION": "1",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE",
}
COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}


def token_ids(count: int = 8) -> torch.Tensor:
    return torch.stack([example["input_ids"] for example in models.texts(count)])


# --- the failure, and its cure ------------------------------------------------------------------------------


def bare_loop(compiled: bool, unroll: bool) -> dict[str, list[float] | str]:
    """Plain FSDP1 without this package, gradients cleared after the forward; its losses, or how it ended."""
    return {
        "evaluation after a step": bare_case(compiled, unroll, evaluate=True),
        "new length in training": bare_case(compiled, unroll, evaluate=False),
    }


def bare_case(compiled: bool, unroll: bool, evaluate: bool) -> list[float] | str:
    torch._dynamo.reset()
    model: Any = models.llama(num_hidden_layers=1)
    for block in model.model.layers if compiled else ():
        block.compile(backend="aot_eager")
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    try:
        for step in range(2):
            ids = token_ids()[:, : 16 if evaluate else 16 - 4 * step]
            if unroll:
                unroll_gradients(model)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if evaluate:
                if unroll:
                    unroll_gradients(model)
                with torch.no_grad():
                    losses.append(model(input_ids=ids, labels=ids, use_cache=False).loss.item())
    except Exception:
        return traceback.format_exc()
    return losses


def test_compiled_fsdp1_fails_on_stale_gradients_and_unrolling_cures_it(ranks: Ranks) -> None:
    """pytorch/pytorch#139110: if the first assertion fails, torch has fixed it and `grad_unroll.py` can go."""
    for failed in ranks(bare_loop, True, False):
        for how in failed.values():
            assert "attempting to assign a gradient of size" in how
    for cured, eager in zip(ranks(bare_loop, True, True), ranks(bare_loop, False, False), strict=True):
        for case, expected in eager.items():
            assert cured[case] == pytest.approx(expected, rel=1e-6)


def test_unrolling_leaves_a_model_without_fsdp1_alone() -> None:
    model = models.llama()
    ids = token_ids(2)
    model(input_ids=ids, labels=ids).loss.backward()
    unroll_gradients(model)
    assert all(parameter.grad is not None for parameter in model.parameters())


# --- training -----------------------------------------------------------------------------------------------


class EvaluatesBeforeGradientsAreCleared(TrainerCallback):
    trainer: Any = None

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.evaluate()


@dataclass
class Facts:
    losses: list[float]
    evaluations: list[float]
    wrapped: bool
    sharded2: bool
    unchanged: set[str]
    buffers: set[str]
    """Those that are not bit for bit what they were."""
    graphs: int
    notes: str
    weights: dict[str, torch.Tensor]


def train(
    folder: str, build: Callable[[], nn.Module], flags: Any, between: bool = False, first: bool = False
) -> Facts:
    """Evaluates `first`, and `between` the steps: with stale gradients still there, and again without them."""
    counters.clear()
    model = build()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    callback = EvaluatesBeforeGradientsAreCleared()
    if between:
        flags = {**flags, "eval_strategy": "steps", "eval_steps": 1}
    trainer = models.trainer(folder, model, callbacks=[callback] if between else None, **flags)
    callback.trainer = trainer
    if first:
        trainer.evaluate()
    trainer.train()
    now = {name.replace("_fsdp_wrapped_module.", ""): b for name, b in trainer.model.named_buffers()}
    wrapped = isinstance(trainer.model, FullyShardedDataParallel)
    state = full_fsdp1_state_dict(trainer.model, {}) if wrapped else models.whole(model)
    return Facts(
        losses=models.losses(trainer),
        evaluations=[entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
        wrapped=wrapped and any(isinstance(m, FullyShardedDataParallel) for m in model.modules()),
        sharded2=isinstance(trainer.model, FSDPModule),
        unchanged={n for n, w in state.items() if n in before and torch.equal(w.float(), before[n].float())},
        buffers={name for name, buffer in buffers.items() if not torch.equal(now[name], buffer)},
        graphs=counters["stats"]["unique_graphs"],
        notes="\n".join(trainer.fp8_report.notes),
        weights=state,
    )


def train_many(
    folder: str, build: Callable[[], nn.Module], cases: list[tuple[dict[str, Any], bool]]
) -> list[Facts]:
    found = []
    for flags, between in cases:
        forget_accelerate()
        torch._dynamo.reset()
        found.append(train(folder, build, flags, between))
    return found


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_fsdp1_trains_as_fsdp2_does_and_evaluation_changes_nothing(
    ranks: Ranks, tmp_path: Path, recipe: str
) -> None:
    flags = {"fp8_recipe": recipe}
    cases = [(flags, False), ({**flags, **COMPILED}, True)]
    results = ranks(train_many, str(tmp_path), models.bf16_llama, cases, fsdp=True, env=FSDP1)
    fsdp2 = ranks(train, str(tmp_path), models.bf16_llama, {**flags, "fp8_all_gather": "off"}, fsdp=True)[0]
    ddp = ranks(train, str(tmp_path), models.llama, flags)[0]
    assert fsdp2.sharded2
    for eager, evaluated in results:
        for each in (eager, evaluated):
            assert each.wrapped and not each.unchanged and not each.buffers
        assert eager.losses == pytest.approx(ddp.losses, rel=5e-3)
        # A delayed weight scale of FSDP2 is that of the fp32 master, here that of the gathered bf16 weight.
        assert eager.losses == pytest.approx(fsdp2.losses, rel=5e-3 if recipe == "delayed" else 1e-6)
        assert evaluated.losses == pytest.approx(eager.losses, rel=1e-6)
        # After each step with the gradients still there and again without them: same weights, same loss.
        assert evaluated.evaluations[0::2] == evaluated.evaluations[1::2]
        assert evaluated.evaluations[::2] == sorted(evaluated.evaluations[::2], reverse=True)
        assert len(evaluated.evaluations) == 6
        assert evaluated.graphs == 2  # training and evaluation; all blocks share them


def test_tied_and_adapted_models_all_strategies_and_rowwise_train(ranks: Ranks, tmp_path: Path) -> None:
    delayed = {"fp8_recipe": "delayed"}
    for strategy, build, flags in (
        ("SHARD_GRAD_OP", models.llama, delayed),
        ("NO_SHARD", models.llama, {"fp8_recipe": "rowwise"}),
        ("FULL_SHARD", models.tied_llama, delayed),
        ("FULL_SHARD", lora, {**COMPILED, "max_steps": 2}),
    ):
        env = {**FSDP1, "FSDP_SHARDING_STRATEGY": strategy, "FSDP_ACTIVATION_CHECKPOINTING": "true"}
        for each in ranks(train, str(tmp_path), build, flags, True, True, fsdp=True, env=env):
            assert each.wrapped and not each.buffers
            frozen = {name for name in each.weights if build is lora and "lora_" not in name}
            assert each.unchanged == frozen
            assert "activation checkpointing on every block" in each.notes


def lora() -> nn.Module:
    adapters = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(models.bf16_llama(), adapters)


# --- accumulation -------------------------------------------------------------------------------------------


def gradients(recipe: str, accumulation: int, wrap: bool) -> dict[str, torch.Tensor]:
    """The second step's gradients of the same 16 examples, however divided; evaluated and unrolled between the steps.

    Every quarter of a rank's batch is the same, so that dividing it changes no scale of that rank.
    """
    torch._dynamo.reset()
    # Without a margin micro-batches have the very scales of the calibration, and round alike. (The dither of a head
    # depends on the place in the batch.)
    plugin = FP8Plugin(FP8Config(recipe=recipe, emulate=True, amax_sync=False, amax_margin=0, head="off"))
    accelerator = Accelerator(
        gradient_accumulation_steps=accumulation,
        dynamo_backend="eager" if wrap and recipe == "tensorwise" else "no",
        **plugin.accelerator_kwargs(),
    )
    model: Any = models.llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = plugin.prepare(accelerator, model, optimizer)
    assert isinstance(model, FullyShardedDataParallel) == wrap
    mine = token_ids(16).chunk(2)[accelerator.process_index][:2].repeat(4, 1)
    for step in range(2):
        unroll_gradients(model)
        optimizer.zero_grad()
        for micro in mine.chunk(accumulation):
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=micro, labels=micro).loss)
                optimizer.step()
        if step == 0:
            plugin.begin_evaluation()
            with torch.no_grad():
                model(input_ids=mine, labels=mine)
    if not wrap:
        return models.whole_gradients(model.module)
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
        named = [(name.replace("_fsdp_wrapped_module.", ""), p.grad) for name, p in model.named_parameters()]
        return {name: gradient.clone() for name, gradient in named}


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_four_micro_batches_equal_one_big_batch(ranks: Ranks, recipe: str) -> None:
    whole = ranks(gradients, recipe, 1, True, fsdp=True, env=FSDP1)[0]
    split = ranks(gradients, recipe, 4, True, fsdp=True, env=FSDP1)[0]
    ddp = ranks(gradients, recipe, 4, False)[0]
    assert whole.keys() == split.keys() == ddp.keys()
    for name, gradient in whole.items():
        assert gradient.norm() > 0
        assert (split[name] - gradient).norm() < 0.02 * gradient.norm(), name
        assert (ddp[name] - gradient).norm() < 0.2 * gradient.norm(), name  # DDP rounds less to bf16


def stale_root(evaluate: bool) -> list[float]:
    """Losses of a loop that looks at the model between backward and step."""
    plugin = FP8Plugin(FP8Config(emulate=True))
    accelerator = Accelerator(**plugin.accelerator_kwargs())
    model: Any = models.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = plugin.prepare(accelerator, model, optimizer)
    ids, losses = token_ids(), []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        if evaluate:
            with torch.no_grad():
                model(input_ids=ids, labels=ids)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_forward_between_backward_and_step_leaves_no_old_weights_behind(ranks: Ranks) -> None:
    """FSDP1 keeps the root gathered after it, and would run the next forward on the weights before the step."""
    looked = ranks(stale_root, True, fsdp=True, env=FSDP1)
    assert looked == ranks(stale_root, False, fsdp=True, env=FSDP1)


# --- loading and checkpoints --------------------------------------------------------------------------------


def loaded_from_rank_0(meta: bool) -> set[str]:
    """Names of parameters and buffers that are not rank 0's after prepare and a forward."""
    fsdp = FullyShardedDataParallelPlugin(
        fsdp_version=1, auto_wrap_policy="transformer_based_wrap", use_orig_params=True
    )
    fsdp.sync_module_states = True  # Accelerate's constructor asks for a GPU
    fsdp.param_init_fn = lambda module: module.to_empty(device="cpu", recurse=False)
    plugin = FP8Plugin(FP8Config(recipe="delayed", emulate=True))
    accelerator = Accelerator(fsdp_plugin=fsdp, **plugin.accelerator_kwargs())
    model: Any = models.tied_llama()
    expected = {n: t.clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
    if dist.get_rank():
        if meta:
            with torch.device("meta"):
                model = models.tied_llama()
        else:
            models.with_nan(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.MonkeyPatch.context() as patch:
        # Broadcasts over gloo work; only this check does not know it.
        patch.setattr(_init_utils, "_check_module_states_for_sync_module_states", lambda states: None)
        model, optimizer = plugin.prepare(accelerator, model, optimizer)
    ids = token_ids()
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    with FullyShardedDataParallel.summon_full_params(model):
        found = {
            name.replace("_fsdp_wrapped_module.", ""): t.clone()
            for name, t in (*model.named_parameters(), *model.named_buffers())
        }
        assert model.module.lm_head.weight is model.module.model.embed_tokens.weight
    return {name for name, tensor in expected.items() if not torch.equal(found[name], tensor)}


@pytest.mark.parametrize("meta", [False, True], ids=["garbage", "meta"])
def test_weights_and_buffers_come_from_rank_0(ranks: Ranks, meta: bool) -> None:
    assert ranks(loaded_from_rank_0, meta, fsdp=True, env=FSDP1) == [set(), set()]


def resumed(folder: str, recipe: str, resume: bool) -> tuple[list[float], bool]:
    flags = {"fp8_recipe": recipe, "fp8_all_gather": "off", "save_strategy": "steps", "save_steps": 2}
    trainer = models.trainer(folder, models.bf16_llama(), max_steps=4, **flags)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
    if not resume:
        trainer.save_model(folder)
    return models.losses(trainer), isinstance(trainer.model, FullyShardedDataParallel)


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_checkpoints_resume_exactly_under_fsdp1_and_fsdp2(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    env = {"FSDP_STATE_DICT_TYPE": kind}
    recipe = "delayed" if kind == "FULL_STATE_DICT" else "tensorwise"
    whole = ranks(resumed, str(tmp_path), recipe, False, fsdp=True, env={**FSDP1, **env})
    assert ranks(resumed, str(tmp_path), recipe, True, fsdp=True, env={**FSDP1, **env}) == whole
    assert whole[0][1]
    for losses, wrapped in ranks(resumed, str(tmp_path), recipe, True, fsdp=True, env=env):
        assert not wrapped
        assert losses == pytest.approx(whole[0][0], rel=5e-3 if recipe == "delayed" else 1e-6)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not torch.equal(model.lm_head.weight, models.bf16_llama().lm_head.weight)


# --- refusals -----------------------------------------------------------------------------------------------


class Evaluates(TrainerCallback):
    trainer: Any = None

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.evaluate()


def evaluates_inside_a_window(folder: str) -> None:
    callback = Evaluates()
    flags = {"gradient_accumulation_steps": 2}
    callback.trainer = models.trainer(folder, models.llama(), callbacks=[callback], **flags)
    callback.trainer.train()


def syncs_each_batch() -> None:
    plugin = FP8Plugin(FP8Config(emulate=True))
    accelerator = Accelerator(
        dynamo_backend="aot_eager",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_each_batch=True),
        **plugin.accelerator_kwargs(),
    )
    model = models.llama()
    plugin.prepare(accelerator, model, torch.optim.SGD(model.parameters()))


def resumes_adapters(folder: str) -> None:
    models.trainer(folder, lora(), max_steps=1, save_strategy="steps", save_steps=1).train()
    forget_accelerate()
    models.trainer(folder, lora(), max_steps=2).train(resume_from_checkpoint=f"{folder}/checkpoint-1")


def builds(folder: str) -> None:
    models.trainer(folder, models.llama(), fp8_all_gather="auto")


def gathers_fp8(folder: str) -> None:
    models.trainer(folder, models.llama(), fp8_all_gather="on").train()


def trained(folder: str) -> nn.Module:
    trainer = models.trainer(folder, models.llama(), max_steps=1)
    trainer.train()
    return trainer.model


def saves_by_hand(folder: str) -> None:
    model: Any = trained(folder)
    model.save_pretrained(folder)


def streams_weights(folder: str) -> None:
    list(iter_full_weights(trained(folder)))


def reverts(folder: str) -> None:
    revert(trained(folder))


@pytest.mark.parametrize(
    ("fn", "env", "kind", "words"),
    [
        (evaluates_inside_a_window, {}, "RuntimeError", ["fsdp2.yaml", "accelerate to-fsdp2"]),
        (syncs_each_batch, {}, "ValueError", ["sync_each_batch", "fsdp2.yaml", "accelerate to-fsdp2"]),
        (resumes_adapters, {}, "ValueError", ["PEFT", "fsdp2.yaml", "accelerate to-fsdp2"]),
        (
            builds,
            {"FSDP_USE_ORIG_PARAMS": "false"},
            "ValueError",
            ["fsdp_use_orig_params: true", "fsdp2.yaml"],
        ),
        (builds, {"FSDP_OFFLOAD_PARAMS": "true"}, "ValueError", ["fsdp2_cpu_offload.yaml", "to-fsdp2"]),
        (gathers_fp8, {}, "ValueError", ["fp8_all_gather=auto", "fsdp2.yaml"]),
        (saves_by_hand, {}, "RuntimeError", ["trainer.save_model"]),
        (streams_weights, {}, "ValueError", ["fsdp2.yaml", "accelerate to-fsdp2"]),
        (reverts, {}, "ValueError", ["Save it and load the checkpoint"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_fsdp1_cannot_do_is_refused_on_every_rank(
    ranks: Ranks, tmp_path: Path, fn: Callable[..., None], env: dict[str, str], kind: str, words: list[str]
) -> None:
    args = () if fn is syncs_each_batch else (str(tmp_path),)
    for error in ranks.errors(fn, *args, fsdp=True, env={**FSDP1, **env}):
        assert error is not None and error[0] == kind, error
        assert all(word in error[1] for word in words), error[1]
