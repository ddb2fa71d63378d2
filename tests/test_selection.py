"""Which modules run in FP8, found by role in every kind of model, and the report that tells it."""

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForTokenClassification,
    CLIPVisionConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.pytorch_utils import Conv1D

from hf_fp8 import ConversionReport, FP8Config
from hf_fp8.linear import FP8Conv1D, FP8Linear, fp8_modules
from hf_fp8.selection import convert, is_slower, select
from models import SIZES, llama, tied_llama, vit

# Every layer that FP8 can compute, whatever its speed.
EMULATED = FP8Config(recipe="tensorwise", emulate=True)
DECODER = {**SIZES, "num_key_value_heads": 2, "vocab_size": 128}
LLAMA_LAYER = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
# Multiplications a token: of one layer's attention, one layer's MLP, and the head of `llama()`.
ATTENTION, MLP, HEAD = 2 * 64 * 64 + 2 * 32 * 64, 3 * 128 * 64, 128 * 64


def converted_by(model: nn.Module, config: FP8Config = EMULATED, tokens: int | None = None) -> set[str]:
    """Convert, and see in the model, not in the report, what became FP8."""
    report = select(model, config, tokens)
    before = {name: type(module) for name, module in model.named_modules()}
    convert(model, report, config)
    changed = {name for name, kind in before.items() if type(model.get_submodule(name)) is not kind}
    assert changed == {row.name.rpartition(".")[0] if row.expert else row.name for row in report.converted}
    assert len(fp8_modules(model)) == len(report.converted)
    return changed


def reasons(model: nn.Module, config: FP8Config = EMULATED, tokens: int | None = None) -> dict[str, str]:
    """Name -> why not, of what stays in high precision."""
    return {row.name: row.reason for row in select(model, config, tokens).rows if not row.converted}


def layers(prefix: str, names: Any, count: int = 2) -> set[str]:
    return {f"{prefix}.{index}.{name}" for index in range(count) for name in names}


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What the package has warned of: its logger does not propagate to the root."""
    logging.getLogger("hf_fp8").addHandler(caplog.handler)
    yield lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    logging.getLogger("hf_fp8").removeHandler(caplog.handler)


# --- roles ----------------------------------------------------------------------------------------------------


def test_decoder_converts_every_block_and_not_the_head() -> None:
    assert converted_by(llama()) == layers("model.layers", LLAMA_LAYER)
    assert reasons(llama()) == {"lm_head": "output head (fp8_head=auto)"}
    assert reasons(llama(), FP8Config(emulate=True, head="off")) == {"lm_head": "output head (fp8_head=off)"}


def test_head_converts_when_asked_and_with_the_delayed_recipe() -> None:
    for on in (FP8Config(emulate=True, head="on"), FP8Config(emulate=True, recipe="delayed")):
        assert converted_by(llama(), on) == layers("model.layers", LLAMA_LAYER) | {"lm_head"}
        assert select(llama(), on).flop_coverage == 1.0


def test_layer_whose_forward_was_replaced_stays() -> None:
    """Its class would change and what it computes would not."""
    model = llama()
    for layer in (model.lm_head, model.model.layers[0].mlp.up_proj):
        layer.forward = layer.forward  # as hooks of Accelerate and TRL's fp32 head do
    stays = {"lm_head", "model.layers.0.mlp.up_proj"}
    assert reasons(model, FP8Config(emulate=True)) == dict.fromkeys(stays, "its forward was replaced")


def test_tied_head_stays_tied_and_in_high_precision() -> None:
    model = tied_llama()
    assert reasons(model) == {"lm_head": "tied to an embedding"}
    assert converted_by(model) == layers("model.layers", LLAMA_LAYER)
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_head_is_found_by_identity_under_any_name() -> None:
    class Renamed(type(llama())):  # type: ignore[misc]
        def get_output_embeddings(self) -> nn.Module:
            return self.model.layers[1].mlp.up_proj

    model = llama()
    model.__class__ = Renamed
    assert reasons(model) == {
        "model.layers.1.mlp.up_proj": "output head (fp8_head=auto)",
        "lm_head": "task head",
    }


def test_sequence_classification_head_stays() -> None:
    model = LlamaForSequenceClassification(LlamaConfig(**DECODER, num_labels=16, pad_token_id=0))
    assert reasons(model) == {"score": "task head"}
    assert converted_by(model) == layers("model.layers", LLAMA_LAYER)


BERT_LAYER = (
    *(f"attention.self.{name}" for name in ("query", "key", "value")),
    *("attention.output.dense", "intermediate.dense", "output.dense"),
)


def test_encoder_heads_stay() -> None:
    settings = {**SIZES, "vocab_size": 128}
    tokens = BertForTokenClassification(BertConfig(**settings, num_labels=16))
    assert reasons(tokens) == {"classifier": "task head"}
    assert converted_by(tokens) == layers("bert.encoder.layer", BERT_LAYER)
    masked = BertForMaskedLM(BertConfig(**settings))
    assert reasons(masked) == {
        "cls.predictions.transform.dense": "task head",
        "cls.predictions.decoder": "tied to an embedding",
    }
    assert converted_by(masked) == layers("bert.encoder.layer", BERT_LAYER)


def test_encoder_decoder_converts_both_stacks_and_keeps_its_ties() -> None:
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    )
    assert reasons(model) == {"lm_head": "tied to an embedding"}
    attention, cross = "layer.0.SelfAttention.", "layer.1.EncDecAttention."
    encoder = [*(attention + n for n in "qkvo"), "layer.1.DenseReluDense.wi", "layer.1.DenseReluDense.wo"]
    decoder = [*(attention + n for n in "qkvo"), *(cross + n for n in "qkvo")]
    decoder += ["layer.2.DenseReluDense.wi", "layer.2.DenseReluDense.wo"]
    assert converted_by(model) == layers("encoder.block", encoder) | layers("decoder.block", decoder)
    shared = model.shared.weight
    assert shared is model.lm_head.weight is model.encoder.embed_tokens.weight


def test_vision_model_converts_its_blocks_and_not_the_patch_convolution() -> None:
    model = vit()
    assert reasons(model) == {
        "vit.embeddings.patch_embeddings.projection": "not convertible: Conv2d",
        "classifier": "task head",
    }
    block = [*(f"attention.{name}_proj" for name in "qkvo"), "mlp.fc1", "mlp.fc2"]
    assert converted_by(model) == layers("vit.layers", block)


def test_vision_language_model_converts_both_towers_and_the_projector() -> None:
    vision = CLIPVisionConfig(**SIZES, image_size=32, patch_size=16, projection_dim=64)
    config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(**DECODER), image_token_id=5)
    model = LlavaForConditionalGeneration(config)
    assert reasons(model) == {
        "model.vision_tower.embeddings.patch_embedding": "not convertible: Conv2d",
        "lm_head": "output head (fp8_head=auto)",
    }
    tower = [*(f"self_attn.{name}_proj" for name in "qkv"), "self_attn.out_proj", "mlp.fc1", "mlp.fc2"]
    assert converted_by(model) == (
        layers("model.vision_tower.encoder.layers", tower)
        | layers("model.language_model.layers", LLAMA_LAYER)
        | {f"model.multi_modal_projector.linear_{i}" for i in (1, 2)}
    )


def test_gpt2_converts_its_conv1d_layers() -> None:
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    )
    block = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert reasons(model) == {"lm_head": "tied to an embedding"}
    rows = {row.name: row.shape for row in select(model, EMULATED).rows}
    assert rows["transformer.h.0.attn.c_attn"] == (192, 64)  # (out, in), as a Linear's
    assert converted_by(model) == layers("transformer.h", block)
    assert {type(m) for m in fp8_modules(model).values()} == {FP8Conv1D}
    ids = torch.randint(0, 128, (2, 8))
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_first_and_last_linear_of_a_model_without_roles_stay() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    why = "first or last layer of a model that declares no roles"
    assert reasons(model) == {"0": why, "3": why}
    assert converted_by(model) == {"1", "2"}
    assert [type(layer) for layer in model] == [nn.Linear, FP8Linear, FP8Linear, nn.Linear]


def test_selecting_changes_nothing() -> None:
    model = llama()
    before = [(name, type(module)) for name, module in model.named_modules()]
    parameters = list(model.parameters())
    select(model, EMULATED)
    assert [(name, type(module)) for name, module in model.named_modules()] == before
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))


# --- mixture of experts ---------------------------------------------------------------------------------------


def mixtral() -> MixtralForCausalLM:
    return MixtralForCausalLM(MixtralConfig(**DECODER, num_local_experts=8, num_experts_per_tok=2))


def qwen3_moe() -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **DECODER, head_dim=16, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=32
        )
    )


# (model, experts, experts a token, width of an expert)
MIXTURES = {"mixtral": (mixtral, 8, 2, 128), "qwen3_moe": (qwen3_moe, 16, 4, 32)}


@pytest.mark.parametrize(("make", "experts", "active", "width"), MIXTURES.values(), ids=MIXTURES)
def test_routers_stay_and_experts_convert(
    make: Callable[[], nn.Module], experts: int, active: int, width: int
) -> None:
    model = make()
    expected = {f"model.layers.{i}.mlp.gate": "router" for i in range(2)}
    assert reasons(model) == {**expected, "lm_head": "output head (fp8_head=auto)"}
    shapes = {row.name: row.shape for row in select(model, EMULATED).rows}
    assert shapes["model.layers.1.mlp.experts.gate_up_proj"] == (experts, 2 * width, 64)
    assert shapes["model.layers.1.mlp.experts.down_proj"] == (experts, 64, width)
    assert converted_by(model) == layers(
        "model.layers", ["mlp.experts", *(f"self_attn.{name}_proj" for name in "qkvo")]
    )


@pytest.mark.parametrize(("make", "experts", "active", "width"), MIXTURES.values(), ids=MIXTURES)
def test_experts_count_by_what_a_token_uses_and_low_coverage_is_warned_of(
    make: Callable[[], nn.Module],
    experts: int,
    active: int,
    width: int,
    warnings: Callable[[], list[str]],
) -> None:
    model = make()
    used = active * 3 * width * 64
    total = 2 * (ATTENTION + used + experts * 64) + HEAD
    report = select(model, EMULATED)
    assert report.flop_coverage == pytest.approx(2 * (ATTENTION + used) / total)
    assert f"experts: {2 * used / total:.1%} of the matrix FLOPs; all in FP8" in str(report)
    off = FP8Config(recipe="tensorwise", emulate=True, experts="off")
    report, share = select(model, off), 2 * ATTENTION / total
    assert share < 0.5
    assert report.flop_coverage == pytest.approx(share)
    assert f"{share:.1%} of the matrix FLOPs" in str(report)
    assert f"experts: {2 * used / total:.1%} of the matrix FLOPs; 4 of 4 in bf16: fp8_experts=off" in str(
        report
    )
    convert(model, report, off)
    assert [message.split(" of ")[0] for message in warnings()] == [f"Only {share:.1%}"]


def test_coverage_above_half_is_not_warned_of(warnings: Callable[[], list[str]]) -> None:
    converted_by(llama())
    assert not warnings()


# --- adapters -------------------------------------------------------------------------------------------------


def lora(rank: int, **options: Any) -> nn.Module:
    settings = {"target_modules": "all-linear", "task_type": TaskType.CAUSAL_LM, **options}
    return get_peft_model(llama(), LoraConfig(r=rank, lora_alpha=16, **settings))


@pytest.mark.parametrize(
    "options", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["", "rslora", "dora"]
)
@pytest.mark.parametrize("rank", [8, 16])
def test_lora_base_converts_and_adapters_do_not_at_any_rank(rank: int, options: dict[str, Any]) -> None:
    model = lora(rank, **options)
    bases = layers("base_model.model.model.layers", [f"{name}.base_layer" for name in LLAMA_LAYER])
    stays = reasons(model)
    assert stays.pop("base_model.model.lm_head") == "output head (fp8_head=auto)"
    assert len(stays) == 2 * len(bases) and set(stays.values()) == {"adapter"}
    assert all(re.search(r"\.lora_[AB]\.default$", name) for name in stays)
    assert converted_by(model) == bases


def test_lora_costs_no_weight_gradients_in_the_report() -> None:
    report = select(lora(8), EMULATED)
    by_name = {row.name: row for row in report.rows}
    base = by_name["base_model.model.model.layers.0.self_attn.q_proj.base_layer"]
    adapter = by_name["base_model.model.model.layers.0.self_attn.q_proj.lora_A.default"]
    assert base.flops == base.fp8_flops == 2 * 2 * 64 * 64  # forward and grad_input
    assert (adapter.flops, adapter.fp8_flops) == (2 * 3 * 8 * 64, 0)


def test_modules_to_save_stay_whole() -> None:
    model = lora(16, modules_to_save=["lm_head"])
    stays = {name: reason for name, reason in reasons(model).items() if "lora" not in name}
    copies = ("original_module", "modules_to_save.default")
    assert stays == {f"base_model.model.lm_head.{copy}": "adapter" for copy in copies}
    assert not any("lm_head" in name for name in converted_by(model))


def test_merged_lora_gives_plain_names_back_with_what_was_trained() -> None:
    model = lora(16, init_lora_weights=False)
    converted_by(model)
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    expected = layer.base_layer.weight + layer.get_delta_weight("default")
    merged = model.merge_and_unload()
    torch.testing.assert_close(merged.model.layers[0].mlp.up_proj.weight, expected)
    assert list(merged.state_dict()) == list(llama().state_dict())


# --- user patterns --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "stays"),
    [
        ("*.down_proj", layers("model.layers", ["mlp.down_proj"])),
        ("model.layers.0.*", layers("model.layers", LLAMA_LAYER, 1)),
        ("model.layers.1.mlp.up_proj", {"model.layers.1.mlp.up_proj"}),
        ("*.[qk]_proj", layers("model.layers", ["self_attn.q_proj", "self_attn.k_proj"])),
    ],
)
def test_fp8_skip_keeps_what_it_matches_and_nothing_else(pattern: str, stays: set[str]) -> None:
    config = replace(EMULATED, skip=(pattern,))
    assert converted_by(llama(), config) == layers("model.layers", LLAMA_LAYER) - stays
    skipped = {name for name, reason in reasons(llama(), config).items() if reason == "fp8_skip"}
    assert skipped == stays


@pytest.mark.parametrize(
    "pattern",
    [
        "model.layers.0.mlp.up_proj",
        "*.0.mlp.up_proj",
        "base_model.model.model.layers.0.mlp.up_proj.base_layer",
        "base_model.*.0.mlp.up_proj.base_layer",
    ],
)
def test_fp8_skip_takes_names_with_and_without_what_peft_adds(pattern: str) -> None:
    skipped = {n for n, r in reasons(lora(8), replace(EMULATED, skip=(pattern,))).items() if r == "fp8_skip"}
    assert skipped == {"base_model.model.model.layers.0.mlp.up_proj.base_layer"}


def test_several_patterns_add_up() -> None:
    config = replace(EMULATED, skip=("*.q_proj", "*.0.mlp.*"))
    stays = layers("model.layers", ["self_attn.q_proj"]) | layers("model.layers", LLAMA_LAYER[4:], 1)
    assert converted_by(llama(), config) == layers("model.layers", LLAMA_LAYER) - stays


# --- shapes and speed -----------------------------------------------------------------------------------------


def test_dimensions_that_are_no_multiples_of_16_stay() -> None:
    model = llama(intermediate_size=136)
    stays = reasons(model, replace(EMULATED, convert_small=True))
    assert stays.pop("lm_head")
    assert set(stays) == layers("model.layers", LLAMA_LAYER[4:])
    assert set(stays.values()) == {"dimensions are not multiples of 16"}


def large_llama() -> nn.Module:
    with torch.device("meta"):
        return llama(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)


def test_speed_rule_depends_on_the_tokens_of_a_batch() -> None:
    up = "model.layers.0.mlp.up_proj"
    many = select(large_llama(), FP8Config(), tokens=16384)
    assert up in {row.name for row in many.converted}
    assert many.flop_coverage > 0.9
    with pytest.raises(ValueError, match=r"FP8 would be slower.*--fp8_convert_small true"):
        select(large_llama(), FP8Config(), tokens=16)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"])
def test_speed_rule_knows_small_layers_and_small_batches_for_every_recipe(recipe: str) -> None:
    assert not is_slower(14336, 4096, 16384, recipe)
    assert is_slower(14336, 4096, 16, recipe)
    assert is_slower(64, 64, 16384, recipe)
    assert [is_slower(14336, 4096, tokens, recipe) for tokens in (16, 65536)] == [True, False]


@pytest.mark.parametrize("options", [{"convert_small": True}, {"emulate": True}])
def test_speed_rule_can_be_switched_off(options: dict[str, bool]) -> None:
    config = FP8Config(recipe="tensorwise", **options)  # type: ignore[arg-type]
    assert set(reasons(llama(), config, tokens=16)) == {"lm_head"}
    assert converted_by(llama(), config, tokens=16) == layers("model.layers", LLAMA_LAYER)


# --- the report -----------------------------------------------------------------------------------------------


def test_share_of_flops_is_counted_right() -> None:
    report = select(llama(), EMULATED)
    converted, total = 2 * (ATTENTION + MLP), 2 * (ATTENTION + MLP) + HEAD
    assert report.flop_coverage == pytest.approx(converted / total)
    assert sum(row.flops for row in report.rows) == 2 * 3 * total  # three GEMMs, two FLOPs a multiplication
    assert f"14 of 15 layers, {converted / total:.1%} of the matrix FLOPs" in str(report)


def test_share_of_flops_leaves_out_the_gradients_that_stay_in_high_precision() -> None:
    config = FP8Config(emulate=True, recipe="rowwise_with_gw_hp")
    converted, total = 2 * (ATTENTION + MLP), 2 * (ATTENTION + MLP) + HEAD
    assert select(llama(), config).flop_coverage == pytest.approx(2 / 3 * converted / total)
    frozen = llama()
    frozen.model.requires_grad_(False)  # no weight gradients there, so all that is left is FP8
    assert select(frozen, config).flop_coverage == pytest.approx(2 * converted / (2 * converted + 3 * HEAD))


def test_repeated_blocks_are_folded_into_one_line() -> None:
    config = FP8Config(emulate=True, skip=("model.layers.1.mlp.up_proj", "model.layers.4.mlp.up_proj"))
    lines = [line.split() for line in str(select(llama(num_hidden_layers=5), config)).splitlines()[2:]]
    assert ["model.layers.0,2-3.mlp.up_proj", "128x64", "3", "FP8"] in lines
    assert ["model.layers.1,4.mlp.up_proj", "128x64", "2", "bf16", "fp8_skip"] in lines
    assert ["model.layers.0-4.mlp.down_proj", "64x128", "5", "FP8"] in lines
    assert len(lines) == 7 + 1 + 1  # the kinds of a layer, the skipped ones, the head


@pytest.mark.parametrize(
    "make", [llama, mixtral, vit, lambda: lora(8)], ids=["llama", "mixtral", "vit", "lora"]
)
def test_report_is_an_aligned_table_of_every_layer(make: Callable[[], nn.Module]) -> None:
    report = select(make(), EMULATED)
    report.notes.append("a note")
    lines = str(report).splitlines()
    summary, header, *rows = [line for line in lines if not line.startswith("- ")]
    assert summary.startswith(f"FP8 (tensorwise): {len(report.converted)} of {len(report.rows)} layers")
    assert lines[-1] == "- a note"
    assert any(line.startswith("- experts: ") for line in lines) == any(row.expert for row in report.rows)
    titles = ("module", "shape", "count", "runs in", "reason")
    starts = [header.index(title) for title in titles]
    counts = []
    for row in rows:
        for start in starts[1:]:
            assert row[start - 2 : start].strip() == ""
        cells = [row[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
        assert cells[3] in ("FP8", "bf16") and bool(cells[4]) == (cells[3] == "bf16")
        assert row == row.rstrip()
        counts.append(int(cells[2]))
    assert sum(counts) == len(report.rows)


def test_empty_report_covers_nothing() -> None:
    assert ConversionReport([], "off").flop_coverage == 0.0


def test_conv1d_subclasses_and_other_gemm_modules_are_reported_with_a_reason() -> None:
    class Custom(nn.Linear):
        pass

    class CustomConv(Conv1D):
        pass

    linear = partial(nn.Linear, 64, 64)
    model = nn.Sequential(
        linear(), Custom(64, 64), CustomConv(64, 64), nn.Conv1d(64, 64, 1), linear(), linear()
    )
    why = "first or last layer of a model that declares no roles"
    assert reasons(model) == {
        "0": why,
        "1": "not convertible: Custom",
        "2": "not convertible: CustomConv",
        "3": "not convertible: Conv1d",
        "5": why,
    }
