"""FP8 checkpoints: real files, against float64, read by plain transformers and by the rules of vLLM."""

import json
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoConfig,
    AutoTokenizer,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FineGrainedFP8Config,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

import models
from gloo import Ranks
from hf_fp8 import ExportReport, FP8Config, FP8Plugin, export_fp8
from hf_fp8.export import _checked
from hf_fp8.layout import fp8_layout, quantize_weights, skeleton
from hf_fp8.linear import fp8_modules
from hf_fp8.sources import ModelSource

E4M3 = torch.float8_e4m3fn
# Two blocks in some dimensions, one in others.
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
MOE: dict[str, Any] = {
    **models.SIZES,
    **WIDE,
    "num_key_value_heads": 2,
    "vocab_size": models.VOCABULARY,
    "initializer_range": 0.1,
    "num_experts_per_tok": 2,
}


def llama(**changes: Any) -> PreTrainedModel:
    return models.llama(**{**WIDE, **changes})


def tied() -> PreTrainedModel:
    return llama(tie_word_embeddings=True)


def ragged() -> PreTrainedModel:
    """Feed-forward matrices of 200 rows or columns."""
    return llama(intermediate_size=208)


def narrow() -> PreTrainedModel:
    """One key head: k_proj and v_proj have 64 rows, less than a block."""
    return llama(num_key_value_heads=1)


def mixtral() -> PreTrainedModel:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(num_local_experts=4, **MOE)).to(torch.bfloat16)


def qwen3_moe() -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(num_experts=4, moe_intermediate_size=128, **MOE))


BUILDERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "tied": tied,
    "ragged": ragged,
    "narrow": narrow,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
}
# Parts of names that stay in high precision, of those that end in .weight and are matrices.
KEPT = {
    "llama": ("embed_tokens", "lm_head"),
    "tied": ("embed_tokens",),
    "ragged": ("embed_tokens", "lm_head", "mlp"),
    "narrow": ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj"),
    "mixtral": ("embed_tokens", "lm_head", "block_sparse_moe.gate"),
    "qwen3_moe": ("embed_tokens", "lm_head", "mlp.gate."),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, ExportReport]]:
    """Every builder's model, saved in high precision as `<name>-high` and exported as `<name>`."""
    root = tmp_path_factory.mktemp("exported")
    found = {}
    for name, build in BUILDERS.items():
        model = build()
        model.save_pretrained(root / f"{name}-high")
        found[name] = root / name, export_fp8(model, root / name)
    return found


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def dequantized(data: Tensor, scale_inv: Tensor) -> Tensor:
    """float64, block by block."""
    right = data.double()
    for i in range(scale_inv.shape[0]):
        for j in range(scale_inv.shape[1]):
            right[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] *= scale_inv[i, j].double()
    return right


def same_weights(a: Path, b: Path) -> bool:
    left, right = ({p.name: p.read_bytes() for p in folder.glob("*.safetensors*")} for folder in (a, b))
    return left == right


# --- what is in the files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILDERS)
def test_every_tensor_is_the_original_within_the_error_of_e4m3_or_of_bf16(
    exported: dict[str, tuple[Path, ExportReport]], name: str
) -> None:
    folder, report = exported[name]
    found, high = tensors_of(folder), tensors_of(folder.with_name(f"{name}-high"))
    scales = {key for key in found if key.endswith("_scale_inv")}
    assert found.keys() - scales == high.keys()
    for key, original in high.items():
        matrix = original.ndim == 2 and not any(part in key for part in KEPT[name])
        assert (f"{key}_scale_inv" in scales) == matrix, key
        if not matrix:
            assert found[key].dtype == torch.bfloat16 and torch.equal(found[key], original.bfloat16()), key
            continue
        scale_inv = found[f"{key}_scale_inv"]
        assert found[key].dtype == E4M3 and scale_inv.dtype == torch.float32
        assert scale_inv.shape == (original.shape[0] // 128, original.shape[1] // 128)
        spread = scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
        assert torch.equal(found[key].float(), (original.float() / spread).to(E4M3).float()), "rounded once"
        right = original.double()
        noise = (dequantized(found[key], scale_inv) - right).norm()
        assert 20 * torch.log10(right.norm() / noise) > 25, key
        assert found[key].float().abs().amax() == 448
    assert report.bytes_before == sum(t.nbytes for t in high.values())
    assert report.bytes_after == sum(t.nbytes for t in found.values())


def test_blocks_of_other_magnitudes_keep_their_own_scale(tmp_path: Path) -> None:
    """A zero block, and one that is 2**30 times smaller than its neighbour, are right too."""
    model = llama()
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight[:128] = 0
        model.model.layers[1].mlp.up_proj.weight[:128] *= 2.0**-30
    export_fp8(model, tmp_path / "out")
    found = tensors_of(tmp_path / "out")
    for layer in (0, 1):
        key = f"model.layers.{layer}.mlp.up_proj.weight"
        right = model.get_parameter(key).detach().double()
        back = dequantized(found[key], found[f"{key}_scale_inv"])
        assert (back[:128] - right[:128]).norm() <= 0.03 * right[:128].norm()
        assert (back[128:] - right[128:]).norm() <= 0.03 * right[128:].norm()


def ignores(prefix: str, ignored: list[str], shards: dict[str, list[str]]) -> bool:
    """vLLM's rule for a layer (`is_layer_skipped` in `quantization/utils/quant_utils.py`)."""
    parent, _, leaf = prefix.rpartition(".")
    if "experts" in prefix:
        return any(prefix in name for name in ignored if "experts" in name)
    answers = {f"{parent}.{shard}" in ignored for shard in shards.get(leaf, [leaf])}
    assert len(answers) == 1, f"vLLM refuses {prefix}: some but not all shards are quantized"
    return answers.pop()


@pytest.mark.parametrize("name", BUILDERS)
def test_vllm_finds_each_layer_as_config_and_shapes_announce_it(
    exported: dict[str, tuple[Path, ExportReport]], name: str
) -> None:
    """The rules of vLLM's `Fp8Config`: what is not ignored has a scale, merged shards agree and fill whole blocks."""
    folder, _ = exported[name]
    config = json.loads((folder / "config.json").read_text())
    said = config["quantization_config"]
    assert said["quant_method"] == "fp8" and said["activation_scheme"] == "dynamic"
    assert said["weight_block_size"] == [128, 128]
    assert config["dtype"] == "bfloat16" and len(config["architectures"]) == 1
    found = tensors_of(folder)
    shards = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    merged = {leaf: fused for fused, leaves in shards.items() for leaf in leaves}
    checked = 0
    for key, tensor in found.items():
        prefix, _, kind = key.rpartition(".")
        if kind != "weight" or tensor.ndim != 2 or "embed" in key or prefix == "lm_head":
            continue
        expert, _, rest = prefix.partition(".experts.")
        parent, _, leaf = prefix.rpartition(".")
        layer = f"{expert}.experts" if rest else f"{parent}.{merged.get(leaf, leaf)}"
        ignored = ignores(layer, said["modules_to_not_convert"], shards)
        assert ignored == (f"{key}_scale_inv" not in found), key
        assert ignored or all(size % 128 == 0 for size in tensor.shape), key
        checked += 1
    assert checked >= 14


@pytest.mark.parametrize("name", BUILDERS)
def test_the_fp8_modules_of_transformers_have_the_parameters_of_the_file(
    exported: dict[str, tuple[Path, ExportReport]], name: str
) -> None:
    """On a GPU transformers loads into `FP8Linear` and `FP8Experts`, where the others are not replaced."""
    folder, report = exported[name]
    config = AutoConfig.from_pretrained(folder)
    said = FineGrainedFP8Config(**config.quantization_config)
    native = skeleton(type(BUILDERS[name]()), config)
    replace_with_fp8_linear(native, said.modules_to_not_convert, said, pre_quantized=True)
    parameters = dict(native.named_parameters(remove_duplicate=False))
    for row in report.rows:
        key = row.name if row.name in parameters else f"{row.name}.weight"
        scaled = f"{key}_scale_inv" in parameters
        assert scaled == row.converted and (parameters[key].dtype == E4M3) == row.converted, row.name
        assert tuple(parameters[key].shape) == row.shape
        if row.converted:
            blocks = [size // 128 for size in row.shape[-2:]]
            assert list(parameters[f"{key}_scale_inv"].shape[-2:]) == blocks


def test_every_export_opens_without_this_package_and_computes_with_the_weights_of_the_file(
    exported: dict[str, tuple[Path, ExportReport]], tmp_path: Path
) -> None:
    script = Path(__file__).parent / "opens_plainly.py"
    folders = [str(folder) for folder, _ in exported.values()]
    subprocess.run([sys.executable, str(script), str(tmp_path / "opened.pt"), *folders], check=True)
    opened = torch.load(tmp_path / "opened.pt", weights_only=False)
    for name, (folder, _) in exported.items():
        high = folder.with_name(f"{name}-high")
        shutil.copytree(high, tmp_path / name)
        found = tensors_of(folder)
        back = {
            key: dequantized(t, found[f"{key}_scale_inv"]).float() if t.dtype == E4M3 else t
            for key, t in found.items()
            if not key.endswith("_scale_inv")
        }
        save_file(back, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        ids = torch.arange(16)[None]
        with torch.no_grad():
            cls = type(BUILDERS[name]())
            right = cls.from_pretrained(tmp_path / name, dtype=torch.bfloat16)(ids).logits
            original = cls.from_pretrained(high, dtype=torch.float32)(ids).logits
        assert opened[str(folder)]["dtype"] == torch.bfloat16
        assert torch.equal(opened[str(folder)]["logits"], right), name
        assert (right.float() - original).norm() < 0.4 * original.norm()


# --- the report ---------------------------------------------------------------------------------------------


def test_the_report_says_what_became_of_each_layer_and_the_error_of_logits_and_weights(
    exported: dict[str, tuple[Path, ExportReport]],
) -> None:
    reasons = {
        name: {row.name.replace("model.layers.0.", ""): row.reason for row in report.kept}
        for name, (_, report) in exported.items()
    }
    assert reasons["llama"] == {"lm_head": "output head"}
    assert reasons["tied"] == {"lm_head": "tied to an embedding"}
    assert reasons["ragged"]["mlp.up_proj"] == "dimensions are not multiples of 128"
    assert reasons["narrow"]["self_attn.k_proj"] == "dimensions are not multiples of 128"
    assert reasons["narrow"]["self_attn.q_proj"] == "loaded together with k_proj"
    assert reasons["mixtral"]["mlp.gate"] == "router"
    for name, (folder, report) in exported.items():
        assert report.path == folder and report.note == ""
        assert 0.02 < (report.weight_error or 0) < 0.03
        assert 0.01 < (report.logit_error or 0) < 0.4, name
    text = str(exported["narrow"][1])
    assert "8 of 15 layers in FP8" in text and "MB became" in text and "relative logit error" in text
    assert any(
        line.split()[:4] == ["model.layers.0-1.self_attn.k_proj", "64x128", "2", "bfloat16"]
        for line in text.splitlines()
    )


def test_the_logit_error_is_that_of_the_quantized_weights(
    exported: dict[str, tuple[Path, ExportReport]],
) -> None:
    folder, report = exported["llama"]
    ids = torch.randint(0, models.VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(0))
    model = llama()
    with torch.no_grad():
        right = model(ids).logits.double()
        found = type(model).from_pretrained(folder, dtype=torch.float32)(ids).logits.double()
    assert report.logit_error == pytest.approx(((found - right).norm() / right.norm()).item(), rel=1e-6)


def test_what_a_reader_makes_of_the_file_is_compared_with_the_source(tmp_path: Path) -> None:
    model = llama()
    report = export_fp8(model, tmp_path / "out", check=False)
    assert report.logit_error is None and "not checked" in str(report)
    file = tmp_path / "out" / "model.safetensors"
    source, whole = ModelSource(model, None), load_file(file)
    key = "model.layers.1.mlp.up_proj.weight_scale_inv"
    for tensors, message in (
        ({**whole, key: whole[key] * 1.1}, "'model.layers.1.mlp.up_proj.weight' .* is off by 10"),
        ({**whole, key: whole[key] * float("nan")}, "'model.layers.1.mlp.up_proj.weight' .* is off by nan"),
        (
            {k: t for k, t in whole.items() if "layers.0.mlp.up_proj" not in k},
            "missing keys .*layers.0.mlp.up_proj",
        ),
        ({**whole, "stray": torch.ones(1)}, "unexpected keys .*stray"),
    ):
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(RuntimeError, match=message) as error:
            _checked(report, source, source.state())
        assert str(file) in str(error.value)
    save_file(whole, file, metadata={"format": "pt"})
    assert _checked(report, source, source.state()).logit_error is not None


# --- sources ------------------------------------------------------------------------------------------------


def test_a_folder_gives_the_same_files_as_its_model_and_its_companions_come_along(
    exported: dict[str, tuple[Path, ExportReport]], tmp_path: Path
) -> None:
    for name in ("llama", "tied", "mixtral"):
        folder, report = exported[name]
        high = tmp_path / f"{name}-high"
        BUILDERS[name]().save_pretrained(high, max_shard_size="300KB")
        assert len(list(high.glob("*.safetensors"))) > 1
        for companion in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (high / companion).write_text("{}")
        (high / "training_args.bin").write_text("")
        again = export_fp8(high, tmp_path / name)
        assert same_weights(tmp_path / name, folder)
        assert (tmp_path / name / "config.json").read_text() == (folder / "config.json").read_text()
        assert again.rows == report.rows and again.logit_error == report.logit_error
        assert (again.bytes_before, again.bytes_after) == (report.bytes_before, report.bytes_after)
        assert {path.name for path in (tmp_path / name).iterdir()} == {
            *("config.json", "generation_config.json", "model.safetensors"),
            *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
        }


def test_shards_are_written_as_they_fill_and_hold_no_more_than_one_weight_beside(tmp_path: Path) -> None:
    model = llama()
    export_fp8(model, tmp_path / "one")
    export_fp8(model, tmp_path / "many", max_shard_size="40KB")
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 5 and max(path.stat().st_size for path in files) < 45_000
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())["weight_map"]
    assert all(name in load_file(tmp_path / "many" / file) for name, file in index.items())
    one, many = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "many")
    assert one.keys() == many.keys() == index.keys()
    assert all(torch.equal(one[key].view(torch.uint8), many[key].view(torch.uint8)) for key in one)

    layout = fp8_layout(ModelSource(model, None).skeleton)
    alive: list[weakref.ref[Tensor]] = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, shape in layout.shapes.items():
            tensor = torch.ones(shape)
            alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    for _ in quantize_weights(weights(), layout):
        assert sum(ref() is not None for ref in alive) <= 2
    assert len(alive) == len(layout.shapes)


def test_a_model_trained_in_fp8_exports_its_masters(tmp_path: Path) -> None:
    """Not the FP8 copies that the delayed recipe keeps: the files are those of a plain model with these weights."""
    flags = {"fp8_recipe": "delayed", "fp8_weight_cache": "on"}
    trainer = models.trainer(str(tmp_path / "run"), llama(), max_steps=2, **flags)
    trainer.train()
    trained = trainer.model
    assert all(module.fp8_weight is not None for module in fp8_modules(trained).values())
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    report = export_fp8(trained, tmp_path / "trained", processing_class=words)
    plain = llama()
    before = tensors_of_model(plain)
    plain.load_state_dict(models.whole(trained))
    assert not torch.equal(before, tensors_of_model(plain))
    assert export_fp8(plain, tmp_path / "plain").rows == report.rows
    assert same_weights(tmp_path / "trained", tmp_path / "plain")
    assert AutoTokenizer.from_pretrained(tmp_path / "trained")("a")["input_ids"] == [0]
    assert (tmp_path / "trained" / "generation_config.json").is_file()


def tensors_of_model(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def sharded(model: nn.Module) -> nn.Module:
    plugin = FP8Plugin(FP8Config(emulate=True))
    accelerator = Accelerator(**plugin.accelerator_kwargs())
    model = plugin.prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1))[0]
    assert isinstance(model, FSDPModule) and fp8_modules(model)
    return model


def export_sharded(folder: str) -> list[ExportReport]:
    return [
        export_fp8(sharded(BUILDERS[name]()), f"{folder}/{name}") for name in ("llama", "tied", "mixtral")
    ]


def test_a_sharded_model_exports_the_same_files(
    ranks: Ranks, exported: dict[str, tuple[Path, ExportReport]], tmp_path: Path
) -> None:
    per_rank = ranks(export_sharded, str(tmp_path), fsdp=True)
    assert per_rank[0] == per_rank[1]
    for name, report in zip(("llama", "tied", "mixtral"), per_rank[0], strict=True):
        folder, single = exported[name]
        assert same_weights(tmp_path / name, folder)
        assert report.rows == single.rows
        # Masters are fp32, so mixtral, loaded in bf16, computes its reference in another precision.
        assert report.logit_error == (
            single.logit_error if name != "mixtral" else pytest.approx(single.logit_error, rel=0.3)
        )


def export_badly(folder: str, fault: str) -> None:
    model = llama()
    if fault == "nan":
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[3, 3] = float("nan")
    export_fp8(sharded(model), f"{folder}/out")


def test_errors_of_the_rank_that_writes_reach_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    errors = ranks.errors(export_badly, str(tmp_path), "nan", fsdp=True)
    assert errors[0] == errors[1] is not None
    assert "'model.layers.0.mlp.up_proj.weight' holds NaN" in errors[0][1]
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").write_text("")
    errors = ranks.errors(export_badly, str(tmp_path), "used", fsdp=True)
    assert errors[0] == errors[1] is not None and "out holds kept" in errors[0][1]


# --- other models -------------------------------------------------------------------------------------------


def test_encoder_decoders_and_models_without_tokens(tmp_path: Path) -> None:
    """T5 keeps `wo` as transformers demands; of a ViT only the weights are compared."""
    torch.manual_seed(0)
    t5 = T5ForConditionalGeneration(
        T5Config(
            d_model=128,
            d_ff=256,
            d_kv=32,
            num_heads=4,
            num_layers=1,
            vocab_size=128,
            decoder_start_token_id=0,
        )
    )
    report = export_fp8(t5, tmp_path / "t5")
    reasons = {row.name.rpartition(".")[2]: row.reason for row in report.rows}
    assert reasons["wo"] == "transformers keeps it in high precision" and reasons["wi"] == ""
    assert 0 < (report.logit_error or 0) < 0.1
    vit = ViTForImageClassification(
        ViTConfig(
            hidden_size=128,
            intermediate_size=256,
            num_attention_heads=4,
            num_hidden_layers=1,
            image_size=16,
            patch_size=4,
        )
    )
    report = export_fp8(vit, tmp_path / "vit")
    assert report.logit_error is None and "takes pixel_values" in report.note and report.quantized
    assert (report.weight_error or 0) > 0.02


def test_experts_without_a_matrix_each_stay_in_high_precision(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(num_local_experts=4, **MOE))
    report = export_fp8(model, tmp_path / "out")
    reasons = {row.name: row.reason for row in report.rows}
    assert reasons["model.layers.0.mlp.experts.gate_up_proj"] == "its file holds all experts in one tensor"
    assert reasons["model.layers.0.self_attn.q_proj"] == ""
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.experts" in said["modules_to_not_convert"]


def test_a_model_is_exported_under_the_names_it_was_loaded_from(tmp_path: Path) -> None:
    """Here a file in the layout of the live model, with all experts in one tensor."""
    mixtral().save_pretrained(tmp_path / "high", save_original_format=False)
    report = export_fp8(MixtralForCausalLM.from_pretrained(tmp_path / "high"), tmp_path / "out")
    found = tensors_of(tmp_path / "out")
    assert {key for key in found if not key.endswith("_scale_inv")} == tensors_of(tmp_path / "high").keys()
    assert {row.reason for row in report.kept if "experts" in row.name} == {
        "its file holds all experts in one tensor"
    }
    with pytest.raises(ValueError, match="pass the model instead of the folder"):
        export_fp8(tmp_path / "high", tmp_path / "out2")


def test_deepseek_keeps_its_routing_in_fp32_and_what_vllm_fuses_in_one_precision(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128}
    dims = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
    routing = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    layers = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "initializer_range": 0.1}
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **heads, **dims, **routing, **layers))
    report = export_fp8(model, tmp_path / "out")
    found = tensors_of(tmp_path / "out")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert found[bias].dtype == torch.float32 and found["model.norm.weight"].dtype == torch.bfloat16
    reasons = {row.name: row.reason for row in report.rows}
    assert reasons["model.layers.0.self_attn.kv_a_proj_with_mqa"] == "dimensions are not multiples of 128"
    assert reasons["model.layers.0.self_attn.q_a_proj"] == "loaded together with kv_a_proj_with_mqa"
    assert (
        reasons["model.layers.0.self_attn.q_b_proj"] == reasons["model.layers.1.mlp.experts.down_proj"] == ""
    )


def test_skipped_layers_take_along_what_is_loaded_with_them(tmp_path: Path) -> None:
    model = mixtral()
    report = export_fp8(
        model, tmp_path / "out", skip=["*.experts.down_proj", "model.layers.1.self_attn.v_proj"]
    )
    kept = {row.name: row.reason for row in report.kept}
    assert (
        kept["model.layers.0.mlp.experts.down_proj"] == kept["model.layers.1.self_attn.v_proj"] == "fp8_skip"
    )
    assert kept["model.layers.0.mlp.experts.gate_up_proj"] == "loaded together with down_proj"
    assert kept["model.layers.1.self_attn.q_proj"] == "loaded together with v_proj"
    assert {row.name for row in report.quantized} == {
        *(f"model.layers.0.self_attn.{x}_proj" for x in "qkvo"),
        "model.layers.1.self_attn.o_proj",
    }
    found = tensors_of(tmp_path / "out")
    original = model.state_dict()["model.layers.0.mlp.experts.down_proj"]
    assert torch.equal(found["model.layers.0.block_sparse_moe.experts.2.w2.weight"], original[2])


def test_high_precision_is_of_the_dtype_asked_for(tmp_path: Path) -> None:
    export_fp8(llama(), tmp_path / "out", dtype=torch.float32)
    found = tensors_of(tmp_path / "out")
    assert torch.equal(found["lm_head.weight"], llama().lm_head.weight)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


# --- refusals -----------------------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_embd=128, n_head=4, n_layer=1, vocab_size=128))


def with_adapters() -> nn.Module:
    return get_peft_model(llama(), LoraConfig(target_modules=["q_proj"]))


def grown() -> nn.Module:
    model = llama()
    model.model.layers[0].mlp.up_proj = nn.Linear(128, 384, bias=False)
    return model


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (with_adapters, {}, "merge_and_unload"),
        (gpt2, {}, "Conv1D stores its weight transposed"),
        (lambda: nn.Linear(128, 128), {}, "takes a transformers model or a folder, got Linear"),
        (models.llama, {}, "dimensions are not multiples of 128"),
        (llama, {"skip": ["*.wrong"]}, r"'\*.wrong' matches no layer"),
        (lambda: llama().to(E4M3), {}, "quantized already"),
        (
            grown,
            {},
            "up_proj.weight' has shape .384, 128., and a model of this configuration expects .256, 128.",
        ),
    ],
)
def test_what_cannot_be_exported_is_refused_and_leaves_nothing(
    tmp_path: Path, build: Callable[[], nn.Module], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        export_fp8(build(), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_folders_that_cannot_be_exported_are_refused(
    exported: dict[str, tuple[Path, ExportReport]], tmp_path: Path
) -> None:
    folder, _ = exported["tied"]
    high = folder.with_name("tied-high")
    whole = load_file(high / "model.safetensors")
    embedding = whole["model.embed_tokens.weight"]

    def refused(message: str, changes: dict[str, Tensor | None] | None = None, **options: Any) -> None:
        source = options.pop("source", None)
        if source is None:
            source = shutil.copytree(high, tmp_path / "source", dirs_exist_ok=True)
            tensors = {k: t for k, t in {**whole, **(changes or {})}.items() if t is not None}
            save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            export_fp8(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()

    refused("quantized already", source=folder)
    refused("lacks 'model.norm.weight'", {"model.norm.weight": None})
    refused("has 'stray' besides", {"stray": torch.ones(1)})
    refused("has another 'lm_head.weight' than", {"lm_head.weight": embedding + 1})
    refused("holds NaN or infinity", {"model.norm.weight": whole["model.norm.weight"] / 0})
    with_adapters().save_pretrained(tmp_path / "adapters")
    refused("holds PEFT adapters", source=tmp_path / "adapters")
    (tmp_path / "empty").mkdir()
    refused("holds neither model.safetensors nor", source=tmp_path / "empty")
    with pytest.raises(ValueError, match="holds config"):
        export_fp8(high, folder)
    # A second, equal copy of a tied weight is what older files hold.
    (tmp_path / "source").rename(tmp_path / "twice")
    save_file({**whole, "lm_head.weight": embedding.clone()}, tmp_path / "twice" / "model.safetensors")
    export_fp8(tmp_path / "twice", tmp_path / "out", check=False)
    assert same_weights(tmp_path / "out", folder)
