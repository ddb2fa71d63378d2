"""Regional compile: few graphs, no block that runs eager without a word, hooks of FSDP2 kept.

Under `accelerate launch`, because the launcher exports settings (`ACCELERATE_DYNAMO_*`) of its own.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import models
from hf_fp8 import FP8Config
from hf_fp8.regions import compile_model, find_blocks
from hf_fp8.selection import convert, select
from launch import accelerate_launch

SCRIPT = Path(__file__).with_name("launched_compile.py")
LENGTHS = [17, 33, 16, 48, 25, 40, 19, 64, 31, 22, 57, 36, 28, 45]  # 14 different ones
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"]


def case(recipe: str, layers: int = 2, lengths: list[int] = LENGTHS, **flags: Any) -> dict[str, Any]:
    return {"layers": layers, "lengths": lengths, "flags": {"fp8_recipe": recipe, **flags}}


def launch(
    folder: Path, config: str, cases: dict[str, Any], *extra: str, fsdp: bool = False
) -> list[dict[str, Any]]:
    """What `launched_compile.py` found, of every rank."""
    out = folder / "found"
    done = accelerate_launch(
        config,
        SCRIPT,
        str(out),
        json.dumps(cases),
        extra=("--dynamo_backend", "aot_eager", *extra),
        fsdp_on_gloo=fsdp,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads(path.read_text()) for path in sorted(folder.glob("found.[0-9]"))]


def check_compiled(found: dict[str, Any], recipe: str, layers: int = 2, most: int = 2) -> None:
    assert found["compiled"] == [f"model.layers.{i}" for i in range(layers)]
    head = found["frames"].pop("_after_base")
    assert 1 <= head <= most and 1 <= sum(found["frames"].values()) <= most
    assert found["graphs"] <= 2 * most
    # The delayed recipe runs its first micro-batch eagerly, and recomputes its blocks.
    assert found["eager"] == (2 * 7 * layers + 1 if recipe == "delayed" else 0)
    assert found["breaks"] == {} and found["limit"] == {}
    assert found["names_kept"]
    assert torch.isfinite(torch.tensor(found["losses"])).all()


def test_fourteen_lengths_give_two_graphs_and_nothing_runs_eager(tmp_path: Path) -> None:
    cases = {recipe: case(recipe) for recipe in ("rowwise", "delayed")}
    cases |= {f"{recipe} recomputed": case(recipe, gradient_checkpointing=True) for recipe in list(cases)}
    cases["one length"] = case("tensorwise", layers=12, lengths=[32, 32])
    (found,) = launch(tmp_path, "cpu.yaml", cases)
    one_length = found.pop("one length")
    check_compiled(one_length, "tensorwise", layers=12, most=1)
    for name, each in found.items():
        recipe = name.split()[0]
        check_compiled(each, recipe)
        assert each["losses"] == found[recipe]["losses"]
    assert found.keys() == cases.keys() - {"one length"}


@pytest.mark.parametrize("recomputed", ["false", "true"], ids=["kept", "recomputed"])
def test_fourteen_lengths_give_two_graphs_when_sharded(tmp_path: Path, recomputed: str) -> None:
    cases = {recipe: case(recipe) for recipe in ("tensorwise", "delayed")}
    if recomputed == "false":
        cases["tensorwise by Trainer"] = case("tensorwise", gradient_checkpointing=True)
    flags = ("--num_processes", "2", "--fsdp_activation_checkpointing", recomputed)
    for rank in launch(tmp_path, "fsdp2.yaml", cases, *flags, fsdp=True):
        assert rank.keys() == cases.keys()
        for name, each in rank.items():
            assert each["sharded"]
            check_compiled(each, name.split()[0])
            note = "activation checkpointing on every block"
            assert (note in each["notes"]) == (recomputed == "true")


def train(folder: Path, **flags: Any) -> list[float]:
    trainer = models.trainer(str(folder), models.llama(), **flags)
    trainer.train()
    return models.losses(trainer)


def test_compiled_blocks_are_the_only_compiled_modules(tmp_path: Path) -> None:
    model = models.llama(num_hidden_layers=3)
    names = list(model.state_dict())
    trainer = models.trainer(str(tmp_path), model, torch_compile=True, torch_compile_backend="aot_eager")
    trainer.train()
    assert trainer.model is model and list(model.state_dict()) == names
    own = {name for name, m in model.named_modules() if m._compiled_call_impl is not None}
    assert own == {"model.layers.0", "model.layers.1", "model.layers.2"}
    assert not any(isinstance(m, torch._dynamo.OptimizedModule) for m in model.modules())


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_and_eager_losses_agree(tmp_path: Path, recipe: str) -> None:
    compiled = train(tmp_path, fp8_recipe=recipe, torch_compile=True, torch_compile_backend="aot_eager")
    assert compiled == pytest.approx(train(tmp_path, fp8_recipe=recipe), rel=2e-3)


def test_whole_model_compiles_when_regional_is_off(tmp_path: Path) -> None:
    counters.clear()
    model = models.llama()
    flags = {"torch_compile": True, "torch_compile_backend": "aot_eager", "torch_compile_regional": False}
    trainer = models.trainer(str(tmp_path), model, **flags)
    trainer.train()
    own = [name for name, m in model.named_modules() if m._compiled_call_impl is not None]
    assert own == [""] and "compiled as a whole (aot_eager)" in trainer.fp8_report.notes
    assert counters["stats"]["unique_graphs"] == 1
    assert models.losses(trainer) == pytest.approx(train(tmp_path), rel=2e-3)


def converted(recipe: str, layers: int) -> tuple[nn.Module, FP8Config]:
    model, config = models.llama(num_hidden_layers=layers), FP8Config(recipe=recipe, emulate=True)
    convert(model, select(model, config), config)
    return model, config


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_twelve_equal_blocks_are_one_full_graph(recipe: str) -> None:
    """`fullgraph` and regional compile go together: the blocks have no break, what is around them is not compiled."""
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    model, config = converted(recipe, 12)
    options = {"backend": backend, "fullgraph": True, "dynamic": None}
    compile_model(model, find_blocks(model), regional=True, checkpointed=False, config=config, **options)
    ids = torch.stack([example["input_ids"] for example in models.texts(4)])
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert backend.frame_count == 1
    assert all(p.grad is not None for p in model.parameters())


def test_fullgraph_from_the_launch_config_trains(tmp_path: Path) -> None:
    cases = {recipe: case(recipe, lengths=[32, 16, 48, 25]) for recipe in ("tensorwise", "delayed")}
    flags = ("--dynamo_use_fullgraph", "--dynamo_use_regional_compilation")
    (found,) = launch(tmp_path, "cpu.yaml", cases, *flags)
    for recipe, each in found.items():
        check_compiled(each, recipe)
