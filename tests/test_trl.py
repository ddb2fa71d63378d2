"""TRL's trainers on the mixin: configs, logits, reference models, value heads, FSDP2, weights for the rollout side."""

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM, LlamaForSequenceClassification
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

import hf_fp8
import models
from gloo import Ranks
from hf_fp8 import (
    FP8ArgumentsMixin,
    FP8Config,
    FP8TrainerMixin,
    export_fp8,
    iter_full_weights,
    quantize_weights,
    rollout_layout,
)
from hf_fp8.linear import FP8Module, fp8_modules
from hf_fp8.selection import convert, select

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from arithmetic import ANSWERS, PROMPTS, small_config
from text_data import byte_tokenizer

LORA = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)


class FP8SFTTrainer(FP8TrainerMixin, SFTTrainer): ...


class FP8SFTConfig(FP8ArgumentsMixin, SFTConfig): ...


class FP8DPOTrainer(FP8TrainerMixin, DPOTrainer): ...


class FP8DPOConfig(FP8ArgumentsMixin, DPOConfig): ...


class FP8RewardTrainer(FP8TrainerMixin, RewardTrainer): ...


class FP8RewardConfig(FP8ArgumentsMixin, RewardConfig): ...


class FP8GRPOTrainer(FP8TrainerMixin, GRPOTrainer): ...


class FP8GRPOConfig(FP8ArgumentsMixin, GRPOConfig): ...


TRAINERS: dict[str, tuple[Any, Any]] = {
    "sft": (FP8SFTTrainer, FP8SFTConfig),
    "dpo": (FP8DPOTrainer, FP8DPOConfig),
    "reward": (FP8RewardTrainer, FP8RewardConfig),
    "grpo": (FP8GRPOTrainer, FP8GRPOConfig),
}


def actor() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(small_config())


def critic() -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    return LlamaForSequenceClassification(small_config(num_labels=1))


def data(kind: str) -> Dataset:
    columns: dict[str, list[str]] = {"prompt": PROMPTS}
    if kind == "sft":
        columns["completion"] = ANSWERS
    elif kind != "grpo":
        columns |= {"chosen": ANSWERS, "rejected": [str(9 - int(answer)) + "!" for answer in ANSWERS]}
    return Dataset.from_dict(columns)


def digits(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward that random completions differ in."""
    return [sum(map(ord, text)) % 7 / 7 for text in completions]


def trl_trainer(kind: str, folder: str, model: nn.Module | None = None, **changes: Any) -> Any:
    """Not yet trained. `ref_model` and `peft_config` in `changes` go to the trainer, the rest to its config."""
    trainer_class, config_class = TRAINERS[kind]
    given = {name: changes.pop(name) for name in ("ref_model", "peft_config") if name in changes}
    settings: dict[str, Any] = {
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "fp8_emulate": True,
        "fp8_recipe": "tensorwise",
    }
    if kind == "grpo":
        settings |= {"num_generations": 4, "max_completion_length": 6}
        given["reward_funcs"] = digits
    if kind == "dpo":
        given.setdefault("ref_model", actor())
    return trainer_class(
        model=model or (critic() if kind == "reward" else actor()),
        args=config_class(folder, **settings | changes),
        train_dataset=data(kind),
        processing_class=byte_tokenizer(),
        **given,
    )


def logged(trainer: Any, key: str = "loss") -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


# --- configs -----------------------------------------------------------------------------------------------


def test_a_config_needs_the_decorator_only_for_fields_of_its_own(tmp_path: Path) -> None:
    config = FP8SFTConfig(str(tmp_path), packing=True, fp8_recipe="rowwise", use_cpu=True)
    assert config.packing and config.fp8_config.recipe == "rowwise" and config.output_dir == str(tmp_path)
    assert {f.name for f in fields(FP8SFTConfig)} > {f.name for f in fields(SFTConfig)}

    @dataclass
    class Own(FP8ArgumentsMixin, SFTConfig):
        words: list[str] = field(default_factory=lambda: ["a"], metadata={"help": "Words."})

    own = Own(str(tmp_path), fp8_emulate=True, use_cpu=True)
    assert own.words == ["a"] and own.fp8_config.emulate
    assert next(f for f in fields(Own) if f.name == "words").metadata == {"help": "Words."}


# --- one process -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TRAINERS)
def test_every_trainer_learns_in_fp8_as_it_does_in_bf16(tmp_path: Path, kind: str) -> None:
    ours = trl_trainer(kind, str(tmp_path))
    before = models.whole(ours.model)
    ours.train()
    stock = trl_trainer(kind, str(tmp_path), fp8=False)
    stock.train()
    assert len(fp8_modules(ours.model)) == 14 and not fp8_modules(stock.model)
    assert len(ours.fp8_report.rows) == 15  # all but lm_head or score
    assert not isinstance(ours.model.score if kind == "reward" else ours.model.lm_head, FP8Module)
    assert all(not torch.equal(p, before[name]) for name, p in ours.model.named_parameters())
    if kind == "grpo":  # samples differ: only what was asked of both is the same
        assert logged(ours, "grad_norm")[0] > 0 and len(logged(ours, "reward")) == 2
        assert logged(ours, "entropy")[0] == pytest.approx(logged(stock, "entropy")[0], rel=0.01)
    else:
        assert logged(ours) == pytest.approx(logged(stock), rel=0.05, abs=0.03)
        assert logged(ours) != logged(stock)


def test_logits_for_metrics_are_there_also_where_head_and_loss_are_one_region(tmp_path: Path) -> None:
    """TRL's loss reads more than the loss of the model: entropy and accuracy, against float64."""
    trainer = trl_trainer(
        "sft",
        str(tmp_path),
        torch_compile=True,
        torch_compile_backend="aot_eager",
        gradient_checkpointing=False,
        completion_only_loss=True,
    )
    plain = actor().double()
    trainer.train()
    assert "head and loss compiled as one region" in trainer.fp8_report.notes
    tokenizer = byte_tokenizer()
    texts = [f"{p}{a}<eos>" for p, a in zip(PROMPTS[:8], ANSWERS[:8], strict=True)]
    ids = tokenizer(texts, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        log_p = plain(ids).logits[:, 3:-1].log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1).mean().item()
    loss = -log_p.gather(-1, ids[:, 4:, None]).mean().item()
    assert logged(trainer, "entropy")[0] == pytest.approx(entropy, rel=0.01)
    assert logged(trainer)[0] == pytest.approx(loss, rel=0.02)
    assert 0 <= logged(trainer, "mean_token_accuracy")[0] <= 1


def test_packed_sequences_train_adapters_on_a_converted_base(tmp_path: Path) -> None:
    """`fp8_skip` means the names of the model as the user gave it, without those of PEFT."""
    trainer = trl_trainer(
        "sft",
        str(tmp_path),
        packing=True,
        max_length=32,
        peft_config=LORA,
        fp8_skip=["model.layers.0.mlp.*"],
    )
    assert isinstance(trainer.model, PeftModel)
    frozen = {n: p for n, p in models.whole(trainer.model).items() if "lora_" not in n}
    trainer.train()
    converted = {row.name for row in trainer.fp8_report.converted}
    assert len(converted) == 11 and all(name.endswith(".base_layer") for name in converted)
    after = models.whole(trainer.model)
    assert all(torch.equal(p, after[name]) for name, p in frozen.items())
    assert logged(trainer, "num_tokens")[0] > 8 * 16  # rows are full


class ValueHead(nn.Module):
    """An actor with a critic's head on it, as PPO implementations wrap it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.pretrained_model = model
        self.v_head = nn.Linear(128, 16)


@pytest.mark.parametrize("peft", [False, True])
def test_names_and_roles_are_right_under_a_value_head(peft: bool) -> None:
    model = ValueHead(get_peft_model(actor(), LORA) if peft else actor())
    report = select(
        model, FP8Config(recipe="tensorwise", emulate=True, skip=("model.layers.1.self_attn.?_proj",))
    )
    prefix = "pretrained_model." + ("base_model.model." if peft else "")
    reasons = {row.name: row.reason for row in report.rows}
    assert len(report.converted) == 10
    assert all(row.name.startswith(f"{prefix}model.layers.") for row in report.converted)
    assert reasons["v_head"] == "task head" and reasons[f"{prefix}lm_head"].startswith("output head")
    skipped = [name for name, reason in reasons.items() if "fp8_skip" in reason]
    assert len(skipped) == 4 and all("layers.1.self_attn" in name for name in skipped)


def test_a_head_that_is_never_called_is_not_converted(tmp_path: Path) -> None:
    """TRL's forward multiplies by its weight: the default recipe leaves it, and `on` cannot be honoured."""
    trainer = trl_trainer("sft", str(tmp_path), fp8_recipe="delayed")
    rows = {row.name: row.reason for row in trainer.fp8_report.rows}
    assert rows["lm_head"] == "output head of a forward that was replaced"
    with pytest.raises(ValueError, match="fp8_head=on, but the forward of the model was replaced"):
        trl_trainer("sft", str(tmp_path), fp8_head="on")


def judge_pairs(folder: str) -> dict[str, Any]:
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = trl_trainer(
        "reward", folder, per_device_train_batch_size=8 // ranks, max_steps=4, fp8_recipe="delayed"
    )
    trainer.train()
    trainer.save_model(f"{folder}/critic")
    return {
        "sharded": isinstance(trainer.model, FSDPModule),
        "score": isinstance(trainer.model.score, FP8Module),
        "converted": len(fp8_modules(trainer.model)),
        "losses": logged(trainer),
        "weights": models.whole(trainer.model),
    }


def test_a_sharded_critic_learns_as_one_that_is_not(ranks: Ranks, tmp_path: Path) -> None:
    alone = judge_pairs(str(tmp_path / "alone"))
    results = ranks(judge_pairs, str(tmp_path), fsdp=True)
    for each in results:
        assert each["sharded"] and not each["score"] and each["converted"] == 14
        assert each["losses"] == pytest.approx(alone["losses"], rel=0.05, abs=0.06)  # of bf16 logits
    opened = LlamaForSequenceClassification.from_pretrained(tmp_path / "critic").state_dict()
    assert all(torch.equal(opened[name], weight) for name, weight in results[0]["weights"].items())


@pytest.mark.parametrize(("fp8", "fp8_ref"), [(True, False), (True, True), (False, True)])
def test_actor_and_reference_choose_fp8_for_themselves(tmp_path: Path, fp8: bool, fp8_ref: bool) -> None:
    trainer = trl_trainer(
        "dpo", str(tmp_path), ref_model=actor(), fp8=fp8, fp8_ref_model=fp8_ref, fp8_recipe="delayed"
    )
    trainer.train()
    assert len(fp8_modules(trainer.model)) == 14 * fp8
    assert len(fp8_modules(trainer.ref_model)) == 14 * fp8_ref  # a reference needs no history: tensorwise
    assert all(torch.equal(p, q) for p, q in zip(trainer.ref_model.parameters(), actor().parameters()))
    note = "reference model in FP8 (tensorwise): 14 of 15 layers" if fp8_ref else "in high precision"
    assert any(note in line for line in trainer.fp8_report.notes)


# --- FSDP2 -------------------------------------------------------------------------------------------------


def prefer(folder: str, spoil: bool) -> dict[str, Any]:
    """DPO with a reference model that follows at the end; on other ranks than 0, both start from garbage."""
    model, reference = actor(), actor()
    if spoil and torch.distributed.get_rank():
        models.with_nan(model), models.with_nan(reference)
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    trainer = trl_trainer(
        "dpo",
        folder,
        model,
        ref_model=reference,
        per_device_train_batch_size=8 // ranks,
        max_steps=4,
        sync_ref_model=True,
        ref_model_sync_steps=4,
        ref_model_mixup_alpha=0.5,
    )
    trainer.train()
    blocks = trainer.ref_model.model.layers
    return {
        "losses": logged(trainer),
        "margins": logged(trainer, "rewards/margins"),
        "sharded": [isinstance(m, FSDPModule) for m in (trainer.model, trainer.ref_model, *blocks)],
        "freed": all(isinstance(p, DTensor) for p in trainer.ref_model.parameters()),
        "own group": [isinstance(m.lm_head, FSDPModule) for m in (trainer.model, trainer.ref_model)],
        "converted": (len(fp8_modules(trainer.model)), len(fp8_modules(trainer.ref_model))),
        "weights": models.whole(trainer.model),
        "reference": models.whole(trainer.ref_model),
    }


def precompute(folder: str) -> None:
    trl_trainer("dpo", folder, ref_model=actor(), precompute_ref_log_probs=True)


RANK_0 = {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}


def test_a_reference_model_is_sharded_by_block_and_filled_from_rank_0(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks(prefer, str(tmp_path), True, fsdp=True, env=RANK_0)
    expected = prefer(str(tmp_path), False)
    start = dict(actor().named_parameters())
    for each in results:
        assert each["sharded"] == [True] * 4 and each["freed"] and each["converted"] == (14, 0)
        assert each["own group"] == [False, False]  # TRL's forward reads the head's weight and never calls it
        assert each["losses"] == results[0]["losses"]
        assert each["losses"] == pytest.approx(expected["losses"], rel=0.05)
        assert each["margins"][-1] > 0.02
        for name, weight in each["weights"].items():
            moved, right = weight - start[name], expected["weights"][name] - start[name]
            assert torch.nn.functional.cosine_similarity(moved.flatten(), right.flatten(), dim=0) > 0.8, name
            torch.testing.assert_close(each["reference"][name], (weight + start[name]) / 2)
    for error in ranks.errors(precompute, str(tmp_path), fsdp=True, env=RANK_0):
        assert error is not None and error[0] == "ValueError"
        assert "precompute_ref_log_probs needs" in error[1] and "cpu_ram_efficient_loading" in error[1]


def act(folder: str, peft: bool) -> dict[str, Any]:
    """GRPO whose completions end early, on one rank earlier than on the other; then what the actor says, greedily."""
    trainer = trl_trainer(
        "grpo",
        folder,
        per_device_train_batch_size=4,
        max_steps=3,
        fp8_all_gather="auto" if peft else "off",
        **({"peft_config": LORA} if peft else {}),
    )
    rank = torch.distributed.get_rank()
    ends = list(range(272)) if rank == 0 else [271]  # after one token, or nearly never
    trainer.generation_config.eos_token_id = trainer.eos_token_ids = ends
    trainer.train()
    weights = {name: tensor.clone() for name, tensor in iter_full_weights(trainer.model)}
    prompts = byte_tokenizer()(PROMPTS[:8], return_tensors="pt")
    own = {k: v[4 * rank :][:4] for k, v in prompts.items()}
    said = trainer.model.generate(**own, max_new_tokens=8, do_sample=False, eos_token_id=[])
    return {
        "sharded": isinstance(trainer.model, FSDPModule),
        "rewards": logged(trainer, "reward"),
        "lengths": logged(trainer, "completions/mean_length"),
        "weights": weights,
        "said": said,
    }


@pytest.mark.parametrize("peft", [False, True])
def test_a_sharded_actor_generates_and_the_rollout_side_says_the_same(
    ranks: Ranks, tmp_path: Path, peft: bool
) -> None:
    results = ranks(act, str(tmp_path), peft, fsdp=True)
    for each in results:
        assert each["sharded"] and len(each["rewards"]) == 3 and max(each["lengths"]) <= 3.5
        assert each["rewards"] == results[0]["rewards"]
        assert all(torch.equal(t, results[0]["weights"][n]) for n, t in each["weights"].items())
    rollout = actor()
    before = {name: p.clone() for name, p in rollout.named_parameters()}
    assert rollout.load_state_dict(results[0]["weights"]).missing_keys == []
    assert all(not torch.equal(p, before[n]) for n, p in rollout.named_parameters() if "proj" in n)
    if peft:
        return  # merged in fp32, so tokens may differ: test_streaming.py compares the weights
    for parameter in rollout.eval().parameters():  # not the rotary buffers
        parameter.data = parameter.data.bfloat16()
    config = FP8Config(recipe="tensorwise", emulate=True)
    convert(rollout, select(rollout, config), config)
    for rank, each in enumerate(results):  # an input's scale is that of its batch
        inputs = byte_tokenizer()(PROMPTS[4 * rank :][:4], return_tensors="pt")
        with torch.autocast("cpu", torch.bfloat16):
            said = rollout.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=[])
        assert torch.equal(said, each["said"])


# --- the rollout side --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = trl_trainer("grpo", str(tmp_path_factory.mktemp("grpo")), max_steps=3, fp8_recipe="delayed")
    trainer.train()
    return trainer


class Engine:
    """The boundary of vLLM and SGLang: `load_weights` takes (name, whole tensor) pairs of its own names and shapes."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        self.parameters = {name: torch.empty_like(p) for name, p in parameters.items()}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            assert type(tensor) is Tensor and tensor.shape == self.parameters[name].shape
            assert tensor.dtype == self.parameters[name].dtype
            self.parameters[name].copy_(tensor)
            loaded.add(name)
        return loaded


def readme_block(marker: str) -> str:
    text = (Path(__file__).parent.parent / "README.md").read_text()
    found = re.search(rf"<!-- tested: {marker} -->\n```python\n(.+?)```", text, re.DOTALL)
    assert found is not None
    return found[1]


def test_readme_lines_make_a_trainer(tmp_path: Path) -> None:
    names: dict[str, Any] = {
        "model": actor(),
        "tokenizer": byte_tokenizer(),
        "dataset": data("grpo"),
        "reward": digits,
        "folder": str(tmp_path),
        "flags": {
            "use_cpu": True,
            "fp8_emulate": True,
            "report_to": "none",
            "save_strategy": "no",
            "max_steps": 1,
            "max_completion_length": 4,
        },
    }
    exec(readme_block("trl trainer").replace('output_dir="out"', "output_dir=folder, **flags"), names)
    assert len(fp8_modules(names["trainer"].model)) == 14
    names["trainer"].train()
    assert names["trainer"].state.global_step == 1


def test_readme_lines_feed_an_engine_with_what_is_exported(trained: Any, tmp_path: Path) -> None:
    model = trained.model
    plain = {name: p.detach().bfloat16() for name, p in model.state_dict().items()}
    export_fp8(model, tmp_path / "fp8", check=False)
    exported = load_file(tmp_path / "fp8" / "model.safetensors")
    names: dict[str, Any] = {"trainer": trained, "engine": Engine(plain), "fp8_engine": Engine(exported)}
    exec(readme_block("trl rollout"), names)
    for name, tensor in names["engine"].parameters.items():
        assert torch.equal(tensor, plain[name]), name
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert rollout_layout(model).quantization_config == config
    quantized = names["fp8_engine"].parameters
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in quantized.values()) == 14
    for name, tensor in quantized.items():
        assert torch.equal(tensor.float(), exported[name].float()), name


def test_synced_weights_generate_as_the_trained_model(trained: Any) -> None:
    """With FP8 taken out of the trained model; its weights are the same bits."""
    rollout = actor().eval()
    rollout.load_state_dict(dict(iter_full_weights(trained.model)))
    inputs = byte_tokenizer()(PROMPTS, return_tensors="pt")
    greedy: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": []}
    untrained = actor().eval().generate(**inputs, **greedy)
    plain = hf_fp8.revert(trained.accelerator.unwrap_model(trained.model, keep_fp32_wrapper=False)).eval()
    said = rollout.generate(**inputs, **greedy)
    assert torch.equal(said, plain.generate(**inputs, **greedy))
    assert not torch.equal(said, untrained)


def test_fp8_rollout_weights_of_adapters_are_those_of_the_merged_base() -> None:
    model = get_peft_model(actor(), LORA)
    found = dict(quantize_weights(iter_full_weights(model), rollout_layout(model)))
    merged = get_peft_model(actor(), LORA).merge_and_unload()
    merged.load_state_dict(dict(iter_full_weights(model)))
    expected = dict(quantize_weights(iter_full_weights(merged), rollout_layout(merged)))
    assert found.keys() == expected.keys() and len(found) == 21 + 14
    assert all(torch.equal(found[name].float(), tensor.float()) for name, tensor in expected.items())
    with pytest.raises(ValueError, match="got ValueHead"):
        rollout_layout(ValueHead(model))
