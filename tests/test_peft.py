"""PEFT adapters over an FP8 base: what trains, in which precision, what is saved, what a merge leaves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

import hf_fp8
import models
from gloo import Ranks, forget_accelerate
from hf_fp8 import FP8Config
from hf_fp8.linear import FP8Module, fp8_modules
from hf_fp8.selection import convert, select

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
}
RECIPES = ["tensorwise", "rowwise", "delayed"]


def adapted(kind: str, dtype: torch.dtype = torch.float32) -> PeftModel:
    """With a base of `dtype` whose adapters already do something."""
    config = LoraConfig(
        r=16, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False, **KINDS[kind]
    )
    model = models.llama().to(dtype)
    torch.manual_seed(0)
    return get_peft_model(model, config)


def is_adapter(name: str) -> bool:
    return "lora_" in name or "modules_to_save" in name


# --- what trains -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_only_adapters_train_and_only_the_base_is_fp8(tmp_path: Path, kind: str, recipe: str) -> None:
    model = adapted(kind, torch.bfloat16)
    before = models.whole(model)
    trainer = models.trainer(str(tmp_path), model, fp8_recipe=recipe)
    trainer.train()
    after = models.whole(model)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {name for name in after if is_adapter(name)}
    converted = fp8_modules(model)
    assert len(converted) == 14 + (
        recipe == "delayed" and kind != "modules_to_save"
    )  # with the head, unless it is one
    assert all(name.endswith((".base_layer", "lm_head")) for name in converted)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == is_adapter(name)
        assert parameter.dtype == (torch.float32 if "lora_" in name else torch.bfloat16), name
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters() if p.requires_grad}


class Products(TorchDispatchMode):
    """Counts the matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", [*RECIPES, "rowwise_with_gw_hp"])
@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_layer_has_no_weight_gradient_gemm(recipe: str, frozen: bool) -> None:
    config = FP8Config(recipe=recipe, emulate=True)  # type: ignore[arg-type]
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(32, 48), nn.Linear(16, 16))
    convert(model, select(model, config), config)
    layer: Any = model[1]
    if recipe == "delayed":
        for role in ("weight", "input", "grad"):
            setattr(layer, f"fp8_{role}_scale", torch.ones(()))
        layer.fp8_input_amax, layer.fp8_grad_amax = torch.zeros(()), torch.zeros(())
    layer.requires_grad_(not frozen)
    x = torch.randn(32, 32, requires_grad=True)
    with Products() as products:
        layer(x).sum().backward()
    assert isinstance(layer, FP8Module)
    assert products.count == (2 if frozen else 3)
    assert x.grad is not None and (layer.weight.grad is None) == frozen


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_delayed_recipe_keeps_the_fp8_copy_of_a_frozen_base(tmp_path: Path, kind: str) -> None:
    model = adapted(kind, torch.bfloat16)
    trainer = models.trainer(str(tmp_path), model, fp8_recipe="delayed")
    trainer.evaluate()
    copies = {name: module.fp8_weight for name, module in fp8_modules(model).items()}
    assert all(copy is not None and copy.dtype == torch.float8_e4m3fn for copy in copies.values())
    versions = {name: copy._version for name, copy in copies.items()}
    trainer.train()
    for name, module in fp8_modules(model).items():
        assert module.fp8_weight is copies[name] and copies[name]._version == versions[name]
        value = copies[name].double() / module.fp8_weight_scale.double()
        weight = module.weight.detach().double()
        assert (value - weight).norm() < 0.04 * weight.norm()


# --- merging -----------------------------------------------------------------------------------------------


def logits(model: nn.Module) -> torch.Tensor:
    ids = torch.stack([row["input_ids"] for row in models.texts(4)])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return model.eval()(input_ids=ids).logits.float()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_merge_and_unload_gives_plain_linears(tmp_path: Path, kind: str, recipe: str) -> None:
    model = adapted(kind)
    trainer = models.trainer(str(tmp_path), model, fp8_recipe=recipe)
    trainer.train()
    trainer.save_model(str(tmp_path))
    merged = model.merge_and_unload()
    assert type(merged) is LlamaForCausalLM and not fp8_modules(merged)
    linears = [m for m in merged.modules() if isinstance(m, nn.Linear)]
    assert len(linears) == 15 and {type(m) for m in linears} == {nn.Linear}
    assert repr(merged) == repr(models.llama())
    # The same as the saved adapter on a fresh base, merged without hf_fp8.
    fresh = PeftModel.from_pretrained(models.llama(), tmp_path).merge_and_unload()
    assert merged.state_dict().keys() == fresh.state_dict().keys()
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(value, fresh.state_dict()[name], rtol=1e-5, atol=1e-6)
    assert distance(logits(merged), logits(fresh)) < 1e-4


def test_unload_gives_the_base_as_it_was(tmp_path: Path) -> None:
    model = adapted("lora")
    models.trainer(str(tmp_path), model).train()
    base = model.unload()
    assert not fp8_modules(base)
    assert torch.equal(logits(base), logits(models.llama()))


@pytest.mark.parametrize("recipe", RECIPES)
def test_merging_in_place_is_seen_by_the_fp8_base(tmp_path: Path, recipe: str) -> None:
    """The delayed recipe keeps FP8 copies, and PEFT writes merged weights in a way that leaves no trace."""
    model = adapted("lora")
    models.trainer(str(tmp_path), model, fp8_recipe=recipe).train()
    apart = logits(model)
    model.merge_adapter()
    merged = logits(model)
    model.unmerge_adapter()
    again = logits(model)
    base = logits(model.unload())
    assert distance(merged, apart) < 0.15 < distance(merged, base)
    assert distance(again, apart) < 0.05


@pytest.mark.parametrize("recipe", RECIPES)
def test_revert_gives_back_the_plain_model(tmp_path: Path, recipe: str) -> None:
    model = models.llama()
    models.trainer(str(tmp_path), model, fp8_recipe=recipe).train()
    parameters = dict(model.named_parameters())
    assert hf_fp8.revert(model) is model
    assert not fp8_modules(model) and repr(model) == repr(models.llama())
    assert all(p is parameters[name] for name, p in model.named_parameters())
    plain = models.llama()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(logits(model), logits(plain))
    linear = model.model.layers[0].mlp.up_proj
    assert (
        vars(linear).keys() == vars(nn.Linear(1, 1)).keys() | vars(plain.model.layers[0].mlp.up_proj).keys()
    )


def test_revert_gives_back_conv1d() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Conv1D(32, 16), nn.Linear(32, 16))
    config = FP8Config(recipe="tensorwise", emulate=True)
    convert(model, select(model, config), config)
    assert isinstance(model[1], FP8Module)
    hf_fp8.revert(model)
    assert type(model[1]) is Conv1D


# --- saving ------------------------------------------------------------------------------------------------


def train_and_resume(folder: str, kind: str, recipe: str) -> dict[str, Any]:
    flags = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "fp8_recipe": recipe}
    model = adapted(kind, torch.bfloat16)
    trainer = models.trainer(folder, model, **flags)
    trainer.train()
    trainer.save_model(f"{folder}/final")
    trained = models.whole(model)
    sharded = isinstance(model, FSDPModule) and all(isinstance(p, DTensor) for p in model.parameters())
    evaluation = trainer.evaluate()["eval_loss"]
    forget_accelerate()
    other = adapted(kind, torch.bfloat16)
    for name, parameter in other.named_parameters():
        if is_adapter(name):
            nn.init.zeros_(parameter)  # so that what is there afterwards was loaded
    resumed = models.trainer(folder, other, **flags)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return {
        "losses": models.losses(trainer),
        "resumed": models.losses(resumed),
        "evaluation": evaluation,
        "trained": trained,
        "trained again": models.whole(other),
        "sharded": sharded,
        "base": {str(p.dtype) for n, p in model.named_parameters() if not is_adapter(n)},
        "adapters": {str(p.dtype) for n, p in model.named_parameters() if "lora_" in n},
        "fp8": len(fp8_modules(model)),
    }


WORLDS: dict[str, dict[str, Any]] = {
    "one": {"world_size": 1},
    "ddp": {},
    "fsdp2-full": {"fsdp": True, "env": {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}},
    "fsdp2-sharded": {"fsdp": True, "env": {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}},
}


@pytest.mark.parametrize(
    ("world", "kind"),
    [(world, kind) for world in WORLDS for kind in KINDS if world != "ddp" or kind == "lora"],
)
def test_adapters_are_saved_whole_and_resume(ranks: Ranks, tmp_path: Path, kind: str, world: str) -> None:
    recipe = "delayed" if kind in ("rslora", "dora") else "tensorwise"
    results = ranks(train_and_resume, str(tmp_path), kind, recipe, **WORLDS[world])
    saved = load_file(tmp_path / "final" / "adapter_model.safetensors")
    assert not (tmp_path / "final" / "model.safetensors").exists()
    for each in results:
        assert each["sharded"] == world.startswith("fsdp2")
        assert each["losses"] == results[0]["losses"]
        assert each["base"] == {"torch.bfloat16"}
        assert each["adapters"] == {"torch.float32"} and each["fp8"] == 14 + (recipe == "delayed")
        assert each["resumed"] == each["losses"] and len(each["losses"]) == 4
        for name, value in each["trained"].items():
            assert torch.equal(value, each["trained again"][name]), name
            assert torch.equal(value, results[0]["trained"][name]), name
        # The file holds the adapters, all of each: every rank's slice.
        expected = {plain(name): value for name, value in each["trained"].items() if is_adapter(name)}
        assert saved.keys() == expected.keys()
        for name, value in saved.items():
            assert torch.equal(value.float(), expected[name].to(value.dtype).float()), name
    loaded = PeftModel.from_pretrained(models.llama().bfloat16(), tmp_path / "final")
    data = models.texts(8)
    ids = torch.stack([row["input_ids"] for row in data])
    with torch.no_grad():
        loss = loaded(input_ids=ids, labels=ids).loss.item()
    assert loss == pytest.approx(results[0]["evaluation"], rel=0.01)


def start(folder: str, batch: int) -> list[float]:
    """Losses of four steps, with a checkpoint after two."""
    flags = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": batch}
    trainer = models.trainer(folder, adapted("modules_to_save"), **flags)
    trainer.train()
    return models.losses(trainer)


def go_on(folder: str, batch: int) -> tuple[models.Loaded, list[float]]:
    model, loaded = adapted("modules_to_save"), models.Loaded()
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            nn.init.zeros_(parameter)
    flags = {"max_steps": 4, "per_device_train_batch_size": batch}
    trainer = models.trainer(f"{folder}/next", model, callbacks=[loaded], **flags)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    loaded.weights = {name: weight for name, weight in loaded.weights.items() if is_adapter(name)}
    return loaded, models.losses(trainer)


@pytest.mark.parametrize("source", WORLDS)
def test_adapters_go_on_in_every_other_kind_of_run(ranks: Ranks, tmp_path: Path, source: str) -> None:
    """Adapters and their optimizer state arrive exactly; losses stay close to the uninterrupted run."""

    def batch(name: str) -> int:
        return 8 // WORLDS[name].get("world_size", 2)

    expected = ranks(start, str(tmp_path), batch(source), **WORLDS[source])[0]
    saved = load_file(tmp_path / "checkpoint-2" / "adapter_model.safetensors")
    moments: dict[str, torch.Tensor] = {}
    for name in WORLDS.keys() - {source}:
        for loaded, losses in ranks(go_on, str(tmp_path), batch(name), **WORLDS[name]):
            assert len(loaded.weights) == 29 and loaded.weights.keys() == loaded.moments.keys()
            moments = moments or loaded.moments
            for key, weight in loaded.weights.items():
                assert torch.equal(weight, saved[plain(key)]), (name, key)
                assert torch.equal(loaded.moments[key], moments[key]) and moments[key].abs().max() > 0
            assert losses == pytest.approx(expected, rel=1e-2), name
            assert losses[:2] == expected[:2] and len(losses) == 4


def save_two_adapters(folder: str) -> dict[str, torch.Tensor]:
    config = LoraConfig(r=8, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(models.llama(), config, adapter_name="first")
    model.add_adapter("second", config)
    trainer = models.trainer(folder, model)
    trainer.train()
    assert isinstance(model, FSDPModule)
    trainer.save_model(folder)
    return models.whole(model)


def test_every_named_adapter_is_saved_whole(ranks: Ranks, tmp_path: Path) -> None:
    weights = ranks(save_two_adapters, str(tmp_path), fsdp=True)[0]
    for adapter in ("first", "second"):
        saved = load_file(tmp_path / adapter / "adapter_model.safetensors")
        expected = {n.replace(f".{adapter}.", "."): w for n, w in weights.items() if f".{adapter}." in n}
        assert len(saved) == 4 and saved.keys() == expected.keys()
        assert all(torch.equal(saved[name], weight) for name, weight in expected.items())


def plain(name: str) -> str:
    """The key of a parameter in an adapter file."""
    name = name.replace(".modules_to_save.default", "").replace(".lora_magnitude_vector.default", "@")
    return name.replace(".default", "").replace("@.weight", ".lora_magnitude_vector")
