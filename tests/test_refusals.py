"""Bad input: what cannot be honoured does not start, and the error says what to type instead. On every rank."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torchao.float8 import convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    TorchAoConfig,
    TrainingArguments,
)

from gloo import Ranks, environment
from hf_fp8 import FP8Config, FP8Plugin, FP8Trainer
from hf_fp8.selection import convert, select
from models import SIZES, arguments, llama, texts, tied_llama, trainer

LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "AO"}


EMULATED = FP8Config(emulate=True)


def refuses(error: type[Exception], *parts: str) -> Any:
    """The error's message holds every one of `parts`, in this order."""
    return pytest.raises(error, match="(?s)" + ".*".join(re.escape(part) for part in parts))


# --- options --------------------------------------------------------------------------------------------------

OPTIONS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown recipe": (
        {"recipe": "blockwise"},
        ("fp8_recipe='blockwise'", "Use one of: tensorwise, rowwise, rowwise_with_gw_hp, delayed"),
    ),
    "unknown switch": ({"head": "yes"}, ("fp8_head='yes'", "Use one of: auto, on, off")),
    "skip as a string": ({"skip": "*.down_proj"}, ("must be a list", '--fp8_skip "*.down_proj"')),
    "empty pattern": ({"skip": [""]}, ("must be a list of module-name patterns", "--fp8_skip")),
    "text for a boolean": ({"emulate": "true"}, ("fp8_emulate='true'", "must be true or false")),
    "no history": ({"amax_history_len": 0}, ("fp8_amax_history_len=0", "at least 1")),
    "fraction of a step": ({"amax_history_len": 2.5}, ("fp8_amax_history_len=2.5", "whole number")),
    "huge margin": ({"amax_margin": 9}, ("fp8_amax_margin=9", "from 0 to 8", "power of two")),
    "rowwise gather": (
        {"recipe": "rowwise", "all_gather": "on"},
        ("fp8_all_gather=on", "fp8_recipe=rowwise", "Use fp8_all_gather=auto", "tensorwise or delayed"),
    ),
    "rowwise gather, other gradient": (
        {"recipe": "rowwise_with_gw_hp", "all_gather": "on"},
        ("fp8_all_gather=on", "Use fp8_all_gather=auto"),
    ),
}


@pytest.mark.parametrize(("options", "parts"), OPTIONS.values(), ids=OPTIONS)
def test_option_is_refused_in_python_and_as_a_flag(
    options: dict[str, Any], parts: tuple[str, ...], tmp_path: Path
) -> None:
    with refuses(ValueError, *parts):
        FP8Config(**options)
    with refuses(ValueError, *parts):
        arguments(str(tmp_path), **{f"fp8_{name}": value for name, value in options.items()})


LAUNCHES: dict[str, tuple[dict[str, str], dict[str, Any], tuple[str, ...]]] = {
    "unknown recipe": (
        {"ACCELERATE_FP8_RECIPE": "blockwise"},
        {},
        ("fp8_recipe='blockwise'", "Use one of: tensorwise"),
    ),
    "unknown key": (
        {"ACCELERATE_FP8_RECIPES": "rowwise"},
        {},
        ("fp8_config.recipes in the launch config", "Known:", "recipe", "skip"),
    ),
    "another backend": (
        {"ACCELERATE_FP8_BACKEND": "TE"},
        {},
        ("fp8_config.backend is 'TE'", "Set `backend: AO`", "stock Trainer for Transformer Engine"),
    ),
    "gather of the file, recipe of a flag": (
        {"ACCELERATE_FP8_ALL_GATHER": "on"},
        {"fp8_recipe": "rowwise"},
        ("fp8_all_gather=on", "fp8_recipe=rowwise", "Use fp8_all_gather=auto"),
    ),
    "fp16 of the launch config": (
        {"ACCELERATE_MIXED_PRECISION": "fp16"},
        {},
        ("mixed_precision: fp16 in the launch config", "Drop it", "--fp8 false"),
    ),
    "fp16 flag": (
        {},
        {"fp16": True},
        ("--fp16 contradicts FP8", "Drop it (bf16 is set for you)", "--fp8 false"),
    ),
    "fp16 evaluation": ({}, {"fp16_full_eval": True}, ("--fp16_full_eval", "Drop the flag")),
}


@pytest.mark.parametrize(("env", "flags", "parts"), LAUNCHES.values(), ids=LAUNCHES)
def test_launch_config_and_flags_that_contradict_fp8_are_refused(
    env: dict[str, str], flags: dict[str, Any], parts: tuple[str, ...], tmp_path: Path
) -> None:
    with environment(**{**LAUNCHED, **env}), refuses(ValueError, *parts):
        arguments(str(tmp_path), **{"fp8_recipe": None, **flags})


def test_launch_fp16_is_refused_by_the_plugin_of_a_plain_loop() -> None:
    with environment(ACCELERATE_MIXED_PRECISION="fp16"):
        with refuses(
            ValueError, "mixed_precision: fp16", "Set mixed_precision: fp8", "FP8Config(enabled=False)"
        ):
            FP8Plugin(EMULATED)
        assert FP8Plugin(FP8Config(enabled=False)).config.enabled is False


def test_fp8_false_takes_fp16_as_it_is(tmp_path: Path) -> None:
    assert arguments(str(tmp_path), fp8=False, fp8_emulate=False, fp16_full_eval=True).fp8 is False


def test_training_arguments_of_transformers_are_refused(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    with refuses(TypeError, "needs FP8TrainingArguments", "class MyFP8Config(FP8ArgumentsMixin, MyConfig)"):
        FP8Trainer(model=llama(), args=args)


# --- models ---------------------------------------------------------------------------------------------------


def already_torchao() -> nn.Module:
    return convert_to_float8_training(llama(), module_filter_fn=lambda _, name: name.endswith("up_proj"))


def already_ours() -> nn.Module:
    model, config = llama(), EMULATED
    convert(model, select(model, config), config)
    return model


def mixtral(**changes: Any) -> nn.Module:
    sizes = {**SIZES, "num_key_value_heads": 2, "vocab_size": 128, **changes}
    return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4))


def quantized(folder: Path) -> PreTrainedModel:
    """By transformers itself, with the one quantization library that is here."""
    llama().save_pretrained(folder)
    how = TorchAoConfig(Int8WeightOnlyConfig())
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=how)


def int8_llama() -> nn.Module:
    """By torchao: plain `nn.Linear` modules with quantized tensors for weights, and no mark on the model."""
    model = llama()
    quantize_(model, Int8WeightOnlyConfig())
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], tuple[str, ...]]] = {
    "pattern without a match": (
        llama,
        {"fp8_skip": ["*.up_proj", "*.fc1"]},
        ("fp8_skip pattern '*.fc1' matches no layer", "model.layers.0.self_attn.q_proj"),
    ),
    "pattern of a module without a product": (
        llama,
        {"fp8_skip": ["model.norm"]},
        ("fp8_skip pattern 'model.norm' matches no layer", "model.layers.0.self_attn.q_proj"),
    ),
    "everything skipped": (
        llama,
        {"fp8_skip": ["*"]},
        ("no layer of LlamaForCausalLM", "15 x fp8_skip", "Relax fp8_skip", "--fp8 false"),
    ),
    "odd dimensions": (
        lambda: llama(hidden_size=24, intermediate_size=40, num_attention_heads=2),
        {},
        ("no layer of LlamaForCausalLM", "14 x dimensions are not multiples of 16", "--fp8 false"),
    ),
    "no linear layer": (
        lambda: nn.Sequential(nn.Embedding(8, 8), nn.LayerNorm(8)),
        {},
        ("no layer of Sequential", "no linear layer at all", "--fp8 false"),
    ),
    "experts of a dense model": (
        llama,
        {"fp8_experts": "on"},
        ("fp8_experts=on", "no expert weights", "Use fp8_experts=auto"),
    ),
    "tied head": (
        tied_llama,
        {"fp8_head": "on"},
        ("fp8_head=on", "tied to the input embedding", "Use fp8_head=auto"),
    ),
    "no head": (
        lambda: nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))),
        {"fp8_head": "on"},
        ("fp8_head=on", "no output head", "Use fp8_head=auto"),
    ),
    "converted by torchao": (
        already_torchao,
        {},
        ("'model.layers.0.mlp.up_proj' was already converted by torchao", "as from_pretrained returned it"),
    ),
    "converted by hf_fp8": (
        already_ours,
        {},
        ("already converted by hf_fp8", "Use a freshly loaded model"),
    ),
    "weights quantized by torchao": (int8_llama, {}, ("quantized", "--fp8 false")),
}


@pytest.mark.parametrize(("make", "flags", "parts"), MODELS.values(), ids=MODELS)
def test_model_is_refused_when_the_trainer_is_built(
    make: Callable[[], nn.Module], flags: dict[str, Any], parts: tuple[str, ...], tmp_path: Path
) -> None:
    with refuses(ValueError, *parts):
        trainer(str(tmp_path), make(), **flags)


@pytest.mark.parametrize(("make", "flags", "parts"), MODELS.values(), ids=MODELS)
def test_model_is_refused_by_the_plugin_and_left_as_it_was(
    make: Callable[[], nn.Module], flags: dict[str, Any], parts: tuple[str, ...]
) -> None:
    options = {name.removeprefix("fp8_"): value for name, value in flags.items()}
    plugin, model = FP8Plugin(FP8Config(**{"recipe": "tensorwise", "emulate": True, **options})), make()
    kinds = [type(module) for module in model.modules()]
    with refuses(ValueError, *parts):
        plugin.prepare(Accelerator(**plugin.accelerator_kwargs(), cpu=True), model)
    assert [type(module) for module in model.modules()] == kinds


def test_experts_that_cannot_run_in_fp8_are_refused() -> None:
    narrow = mixtral(intermediate_size=72)
    with refuses(ValueError, "fp8_experts=on", "dimensions are not multiples of 16", "Use fp8_experts=auto"):
        select(narrow, FP8Config(emulate=True, experts="on"))
    assert select(mixtral(), FP8Config(emulate=True, experts="on")).expert_share > 0


def test_quantized_model_is_refused(tmp_path: Path) -> None:
    model = quantized(tmp_path)
    assert model.is_quantized
    remedy = ("LlamaForCausalLM is quantized", "Load it without quantization_config", "--fp8 false")
    with refuses(ValueError, *remedy):
        select(model, EMULATED)
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj"]))  # as QLoRA: Trainer allows it
    with refuses(ValueError, *remedy):
        trainer(str(tmp_path), adapted)


# --- hardware -------------------------------------------------------------------------------------------------


def test_cpu_without_emulation_is_refused(tmp_path: Path) -> None:
    remedy = ("compute capability 8.9", "'cpu'", "--fp8_emulate true", "--fp8 false")
    with refuses(RuntimeError, *remedy):
        trainer(str(tmp_path), llama(), fp8_emulate=False)
    plugin = FP8Plugin(FP8Config())
    with refuses(RuntimeError, *remedy):
        plugin.prepare(Accelerator(**plugin.accelerator_kwargs(), cpu=True), llama())


def test_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    gpu = torch.device("cuda")
    with refuses(RuntimeError, "8.9 or newer, but NVIDIA A100 has 8.0", "--fp8 false", "--fp8_emulate true"):
        FP8Config().check_hardware(gpu)
    EMULATED.check_hardware(gpu)
    FP8Config(enabled=False).check_hardware(gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    FP8Config().check_hardware(gpu)


# --- the run --------------------------------------------------------------------------------------------------


def test_gather_without_shards_is_refused_before_the_first_step(tmp_path: Path) -> None:
    refused = trainer(str(tmp_path), llama(), fp8_all_gather="on")
    with refuses(ValueError, "fp8_all_gather=on", "not FSDP2", "accelerate_configs/fsdp2.yaml", "=auto"):
        refused.train()
    assert refused.state.global_step == 0


@pytest.mark.parametrize("kind", [DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM])
def test_other_sharders_are_refused(kind: DistributedType) -> None:
    plugin = FP8Plugin(EMULATED)
    accelerator = Accelerator(**plugin.accelerator_kwargs(), cpu=True)
    accelerator.state.distributed_type = kind  # neither is installed: only what Accelerate says of them
    with refuses(ValueError, f"does not run under {kind.value}", "Use accelerate_configs/fsdp2.yaml"):
        plugin.prepare_model(accelerator, llama())


def test_fsdp_that_accelerate_did_not_honour_is_refused(tmp_path: Path) -> None:
    with environment(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2"):
        with refuses(
            ValueError, "asks for FSDP", "runs this as NO", "Use accelerate_configs/ddp.yaml or cpu.yaml"
        ):
            trainer(str(tmp_path), llama())


@pytest.mark.parametrize("precision", ["fp8", "fp16"])
def test_accelerator_with_a_precision_of_its_own_is_refused(precision: str) -> None:
    """Built without `plugin.accelerator_kwargs()`: it would convert with torchao what the plugin has converted."""
    with environment(**LAUNCHED if precision == "fp8" else {"ACCELERATE_MIXED_PRECISION": "no"}):
        plugin, model = FP8Plugin(EMULATED), llama()
        accelerator = Accelerator(mixed_precision=precision, cpu=True)
        with refuses(ValueError, precision, "Accelerator(**plugin.accelerator_kwargs()"):
            plugin.prepare(accelerator, model)
    assert not any(isinstance(module, Float8Linear) for module in model.modules())


def test_compile_by_block_without_blocks_is_refused(tmp_path: Path) -> None:
    class OneLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(32, 32) for _ in range(3))

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.c(self.b(self.a(input_ids.float()))).mean()}

    refused = trainer(
        str(tmp_path), OneLayer(), texts(8, 32), torch_compile=True, torch_compile_backend="aot_eager"
    )
    with refuses(ValueError, "OneLayer has no repeated blocks", "--torch_compile_regional false"):
        refused.train()


def test_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(llama().parameters(), lr=0.1)
    refused = trainer(str(tmp_path), llama(), optimizers=(optimizer, None))
    with refuses(RuntimeError, "21 of which are not parameters of the prepared model", "model.parameters()"):
        refused.train()
    plugin = FP8Plugin(EMULATED)
    accelerator = Accelerator(**plugin.accelerator_kwargs(), cpu=True)
    with refuses(RuntimeError, "not parameters of the prepared model", "Build it from model.parameters()"):
        plugin.prepare(accelerator, llama(), torch.optim.SGD(llama().parameters(), lr=0.1))


# --- on every rank --------------------------------------------------------------------------------------------


def build(folder: str, make: Callable[[], nn.Module], flags: dict[str, Any]) -> None:
    trainer(folder, make(), **flags)


def train(folder: str, make: Callable[[], nn.Module], flags: dict[str, Any]) -> None:
    trainer(folder, make(), **flags).train()


def prepare(
    make: Callable[[], nn.Module],
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer],
    config: FP8Config = EMULATED,
    **kwargs: Any,
) -> None:
    plugin, model = FP8Plugin(config), make()
    accelerator = Accelerator(**plugin.accelerator_kwargs(), **kwargs)
    assert accelerator.is_fsdp2
    model, _ = plugin.prepare(accelerator, model, optimizer_of(model))
    assert isinstance(model, FSDPModule)


def no_blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))


def strangers(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(llama().parameters(), lr=0.1)


def all_but_the_head(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.model.parameters(), lr=0.1)


def already_stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.zeros(1, 4, dtype=torch.long)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    return optimizer


def all_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def prepare_context_parallel() -> None:
    prepare(llama, all_of, parallelism_config=ParallelismConfig(cp_size=2))


def prepare_offloaded_with_gather() -> None:
    offload = CPUOffloadPolicy(pin_memory=False)  # pinning needs a GPU
    sharding = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=offload)
    prepare(llama, all_of, FP8Config(emulate=True, all_gather="on"), fsdp_plugin=sharding)


def check_refused(outcomes: list[tuple[str, str] | None], error: str, *parts: str) -> None:
    """Every rank raised, and the message names the remedy."""
    pattern = re.compile("(?s).*" + ".*".join(re.escape(part) for part in parts))
    for outcome in outcomes:
        assert outcome is not None and outcome[0] == error and pattern.match(outcome[1]), outcome


BUILT = {
    "hardware": (llama, {"fp8_emulate": False}, "RuntimeError", ("'cpu'", "--fp8_emulate true")),
    "pattern": (llama, {"fp8_skip": ["*.fc1"]}, "ValueError", ("'*.fc1' matches no layer",)),
    "nothing to convert": (llama, {"fp8_skip": ["*"]}, "ValueError", ("no layer of", "Relax fp8_skip")),
    "quantized": (int8_llama, {}, "ValueError", ("quantized", "--fp8 false")),
    "recipe": (llama, {"fp8_recipe": "mx"}, "ValueError", ("fp8_recipe='mx'", "Use one of: tensorwise")),
    "fp16": (llama, {"fp16": True}, "ValueError", ("--fp16 contradicts", "--fp8 false")),
}


@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize(("make", "flags", "error", "parts"), BUILT.values(), ids=BUILT)
def test_every_rank_refuses_when_the_trainer_is_built(
    make: Any,
    flags: dict[str, Any],
    error: str,
    parts: tuple[str, ...],
    fsdp: bool,
    ranks: Ranks,
    tmp_path: Path,
) -> None:
    check_refused(ranks.errors(build, str(tmp_path), make, flags, fsdp=fsdp), error, *parts)


def test_every_rank_refuses_fsdp_that_became_ddp(ranks: Ranks, tmp_path: Path) -> None:
    env = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    check_refused(
        ranks.errors(build, str(tmp_path), llama, {}, env=env),
        "ValueError",
        "asks for FSDP",
        "runs this as MULTI_CPU",
        "Use accelerate_configs/ddp.yaml or cpu.yaml",
    )


def test_every_rank_refuses_fp8_gather_under_ddp(ranks: Ranks, tmp_path: Path) -> None:
    outcomes = ranks.errors(train, str(tmp_path), llama, {"fp8_all_gather": "on"})
    check_refused(outcomes, "ValueError", "not FSDP2", "accelerate_configs/fsdp2.yaml", "fp8_all_gather=auto")


def test_every_rank_refuses_fp8_gather_of_offloaded_weights(ranks: Ranks) -> None:
    outcomes = ranks.errors(prepare_offloaded_with_gather, fsdp=True)
    check_refused(outcomes, "ValueError", "parameters live on CPU", "Use fp8_all_gather=auto")


def test_every_rank_refuses_to_wrap_a_class_that_the_model_lacks(ranks: Ranks, tmp_path: Path) -> None:
    env = {"FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer,MistralDecoderLayer"}
    outcomes = ranks.errors(train, str(tmp_path), llama, {}, fsdp=True, env=env)
    check_refused(
        outcomes,
        "ValueError",
        "fsdp_transformer_layer_cls_to_wrap names ['MistralDecoderLayer']",
        "LlamaForCausalLM does not have",
        "leave the key out",
    )


def test_every_rank_refuses_to_checkpoint_a_model_without_blocks(ranks: Ranks) -> None:
    env = {"FSDP_AUTO_WRAP_POLICY": "NO_WRAP", "FSDP_ACTIVATION_CHECKPOINTING": "true"}
    outcomes = ranks.errors(prepare, no_blocks, all_of, fsdp=True, env=env)
    check_refused(
        outcomes, "ValueError", "no repeated blocks to checkpoint", "fsdp_activation_checkpointing: false"
    )


def test_every_rank_refuses_other_kinds_of_parallelism(ranks: Ranks) -> None:
    outcomes = ranks.errors(prepare_context_parallel, fsdp=True)
    check_refused(outcomes, "ValueError", "data-parallel ranks only", "_cp_size", "to 1")


@pytest.mark.parametrize(
    ("optimizer_of", "error", "parts"),
    [
        (strangers, "ValueError", ("21 tensors that are no parameters", "from model.parameters()")),
        (already_stepped, "ValueError", ("already has state", "Prepare the model before the first step")),
        (all_but_the_head, "RuntimeError", ("1 trainable parameters", "'lm_head.weight'", "or freeze it")),
    ],
)
def test_every_rank_refuses_an_optimizer_that_does_not_fit(
    optimizer_of: Any, error: str, parts: tuple[str, ...], ranks: Ranks
) -> None:
    check_refused(ranks.errors(prepare, llama, optimizer_of, fsdp=True), error, *parts)


def test_what_is_refused_above_is_accepted_when_it_is_right(ranks: Ranks) -> None:
    assert ranks.errors(prepare, llama, all_of, fsdp=True) == [None, None]
