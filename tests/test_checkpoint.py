"""Checkpoints: real files, written by one, DDP and FSDP2 ranks, read by others and without this package."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import merge_fsdp_weights
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import models
from gloo import RankError, Ranks
from hf_fp8 import FP8Trainer, iter_full_weights
from hf_fp8.masters import remainder, restore

FULL = {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
SHARDED = {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
WORLDS: dict[str, dict[str, Any]] = {
    "one": {"world_size": 1},
    "ddp": {"world_size": 2},
    "fsdp2-full": {"world_size": 2, "fsdp": True, "env": FULL},
    "fsdp2-sharded": {"world_size": 2, "fsdp": True, "env": SHARDED},
}
STATE_DICT_TYPES = pytest.mark.parametrize("env", [FULL, SHARDED], ids=["full", "sharded"])


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    settings = {"num_key_value_heads": 2, "vocab_size": models.VOCABULARY, "initializer_range": 0.1}
    return MixtralForCausalLM(MixtralConfig(**{**models.SIZES, **settings, **experts}))


def bf16_tied_llama() -> nn.Module:
    return models.tied_llama().to(torch.bfloat16)


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "bf16": models.bf16_llama,
    "tied": models.tied_llama,
    "bf16_tied": bf16_tied_llama,
    "mixtral": mixtral,
}


def spoiled(model: nn.Module) -> nn.Module:
    """`model` with NaN in every parameter: what a checkpoint does not bring shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    return model


# --- a saved model is an ordinary one ----------------------------------------------------------------------


def save_all(folder: str) -> dict[str, Any]:
    """Train each model, with a checkpoint at the end, and save it once more by hand."""
    weights = {}
    for name, build in BUILDERS.items():
        trainer = models.trainer(
            f"{folder}/{name}",
            build(),
            max_steps=2,
            save_strategy="steps",
            save_steps=2,
            fp8_recipe="delayed",
        )
        trainer.train()
        trainer.save_model(f"{folder}/{name}/final")
        assert isinstance(trainer.model, FSDPModule) == (os.environ.get("ACCELERATE_USE_FSDP") == "true")
        weights[name] = models.whole(trainer.model)
    return weights


def opened_plainly(out: Path, folders: list[Path]) -> dict[Path, dict[str, Any]]:
    script = Path(__file__).parent / "opens_plainly.py"
    subprocess.run([sys.executable, str(script), str(out), *map(str, folders)], check=True)
    return {Path(k): v for k, v in torch.load(out, weights_only=False).items()}


@pytest.mark.parametrize(
    "world", [w for n, w in WORLDS.items() if n != "ddp"]
)  # DDP saves as one process does
def test_every_saved_folder_opens_without_this_package(
    ranks: Ranks, tmp_path: Path, world: dict[str, Any]
) -> None:
    """Same names, dtypes and bits as stock save_pretrained of a plain model with these weights; same logits."""
    weights = ranks(save_all, str(tmp_path), **world)[0]
    saved = ["final"] if world == WORLDS["fsdp2-sharded"] else ["final", "checkpoint-2"]
    folders = [tmp_path / name / which for name in BUILDERS for which in saved]
    opened = opened_plainly(tmp_path / "opened.pt", folders)
    for name, build in BUILDERS.items():
        plain = build()
        dtype = plain.dtype
        plain.load_state_dict(weights[name], strict=False)
        plain.save_pretrained(tmp_path / name / "stock")
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / name / "stock")
        stock = load_file(tmp_path / name / "stock" / "model.safetensors")
        with torch.no_grad():
            logits = plain(torch.arange(16)[None]).logits
        assert "lm_head.weight" in stock or "tied" in name
        for which in saved:
            found = opened[tmp_path / name / which]
            assert found["dtype"] == dtype
            assert torch.equal(found["logits"], logits)
            assert found["file"].keys() == stock.keys()
            for key, tensor in stock.items():
                assert found["file"][key].dtype == dtype and torch.equal(found["file"][key], tensor), key
            assert json.loads((tmp_path / name / which / "config.json").read_text())["dtype"] in str(dtype)


def files_of_checkpoints(folder: str, names: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    """The weights of each model in its checkpoint."""
    weights = {}
    for name in names:
        trainer = models.trainer(
            f"{folder}/{name}", BUILDERS[name](), max_steps=1, save_strategy="steps", save_steps=1
        )
        trainer.train()
        weights[name] = models.whole(trainer.model)
    return weights


def test_a_full_checkpoint_holds_weights_once_in_the_dtype_of_the_model(ranks: Ranks, tmp_path: Path) -> None:
    weights = ranks(files_of_checkpoints, str(tmp_path), ["bf16", "tied"], fsdp=True, env=FULL)[0]
    for name, dtype in (("bf16", torch.bfloat16), ("tied", torch.float32)):
        checkpoint = tmp_path / name / "checkpoint-1"
        assert not any("pytorch_model" in path.name for path in checkpoint.iterdir())
        saved = load_file(checkpoint / "model.safetensors")
        assert all(torch.equal(tensor, weights[name][key].to(dtype)) for key, tensor in saved.items())
        assert (checkpoint / "fp8_masters").is_dir() == (name == "bf16")
    check_masters_are_17_bits_a_weight(tmp_path / "bf16" / "checkpoint-1", weights["bf16"])


def check_masters_are_17_bits_a_weight(checkpoint: Path, weights: dict[str, torch.Tensor]) -> None:
    entries = FileSystemReader(checkpoint / "fp8_masters").read_metadata().state_dict_metadata
    assert entries.keys() == weights.keys()
    size = sum(entry.size.numel() for entry in entries.values())
    matrices = sum(w.numel() for w in weights.values() if w.dim() > 1)
    assert size == matrices * 17 // 8 + 3 * sum(w.numel() for w in weights.values() if w.dim() == 1)


HALFWAY = 0x8000  # between two bf16 values: half of them round up, half down


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_weight_and_remainder_give_every_master_back(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    any_bits = torch.randint(-(2**31), 2**31 - 1, (64, 21), dtype=torch.int64).to(torch.int32)
    ties = (any_bits & ~0xFFFF) | HALFWAY
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, 3.4e38, -3.4e38, 1e-45, 65504.0, 65520.0, 1.0])
    masters = [any_bits.view(torch.float32), ties.view(torch.float32), special, torch.randn(5, 3, 7)]
    masters += [torch.empty(0, 8), torch.empty(0)]
    for master in masters:
        master = torch.where(master.isnan(), 0.0, master)
        weight = master.to(dtype).float()
        restore(weight, remainder(master, dtype))
        assert torch.equal(weight.view(torch.int32), master.view(torch.int32))


def merged(checkpoint: Path) -> Path:
    """A folder for `from_pretrained`, from the shards of a checkpoint: what `accelerate merge-weights` runs."""
    folder = checkpoint.parent / f"{checkpoint.name}-merged"
    merge_fsdp_weights(str(checkpoint / "pytorch_model_fsdp_0"), str(folder))
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    return folder


def test_sharded_checkpoint_holds_weights_once_and_merges_with_accelerate(
    ranks: Ranks, tmp_path: Path
) -> None:
    """In the dtype that the model was loaded in."""
    weights = ranks(files_of_checkpoints, str(tmp_path), [*BUILDERS], fsdp=True, env=SHARDED)[0]
    for name, build in BUILDERS.items():
        checkpoint = tmp_path / name / "checkpoint-1"
        files = {path.name for path in checkpoint.iterdir()}
        assert {"config.json", "generation_config.json", "training_args.bin"} <= files
        assert not any(file.startswith(("model", "pytorch_model.")) for file in files)
        folder = merged(checkpoint)
        assert {t.dtype for t in load_file(folder / "model.safetensors").values()} == {build().dtype}
        opened, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert opened.dtype == build().dtype
        state = opened.state_dict()
        assert all(torch.equal(state[key], w.to(opened.dtype)) for key, w in weights[name].items())
    check_masters_are_17_bits_a_weight(tmp_path / "bf16" / "checkpoint-1", weights["bf16"])
    command = ["merge-weights", str(checkpoint / "pytorch_model_fsdp_0"), str(tmp_path / "by-command")]
    subprocess.run([sys.executable, "-m", "accelerate.commands.accelerate_cli", *command], check=True)
    assert load_file(tmp_path / "by-command" / "model.safetensors").keys() >= weights[name].keys()


def push(folder: str) -> list[list[str]]:
    """The names in each checkpoint folder when Trainer would upload it."""
    found = []
    for strategy in ("every_save", "end"):
        trainer = models.trainer(f"{folder}/{strategy}", models.llama(), max_steps=1)
        trainer.train()
        trainer.args.push_to_hub, trainer.args.hub_strategy = True, strategy
        uploaded: list[list[str]] = []
        trainer._push_from_checkpoint = lambda at, seen=uploaded: seen.append(os.listdir(at))  # type: ignore[method-assign]
        trainer._save_checkpoint(trainer.model, None)
        found += uploaded
    return found


def test_sharded_checkpoint_that_goes_to_the_hub_holds_model_files(ranks: Ranks, tmp_path: Path) -> None:
    every_save, end = ranks(push, str(tmp_path), fsdp=True, env=SHARDED)[0]
    assert "model.safetensors" in every_save and "model.safetensors" not in end


def save_directly(folder: str) -> dict[str, Any]:
    trainer = models.trainer(folder, models.llama(), max_steps=1)
    trainer.train()
    assert isinstance(trainer.model, FSDPModule)
    with pytest.raises(RuntimeError, match=r"trainer\.save_model\(folder\)"):
        trainer.model.save_pretrained(f"{folder}/refused")
    state = trainer.accelerator.get_state_dict(trainer.model)
    main = trainer.accelerator.is_main_process
    trainer.model.save_pretrained(f"{folder}/loop", state_dict=state, is_main_process=main)
    return models.whole(trainer.model)


def test_save_pretrained_of_shards_names_the_way_out_which_works(ranks: Ranks, tmp_path: Path) -> None:
    weights = ranks(save_directly, str(tmp_path), fsdp=True)[0]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "loop").state_dict()
    assert all(torch.equal(saved[name], weight) for name, weight in weights.items())


# --- resume ------------------------------------------------------------------------------------------------


def dropout_llama(dtype: torch.dtype = torch.float32) -> nn.Module:
    return models.llama(attention_dropout=0.1).to(dtype)


RESUMED: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "train_sampling_strategy": "random",
    "lr_scheduler_type": "cosine",
    "save_strategy": "steps",
    "save_steps": 3,
    "max_steps": 6,
    "learning_rate": 1e-2,
}


def resume_run(folder: str, recipe: str, dtype: torch.dtype) -> tuple[list[float], list[float], bool]:
    """Losses of six steps, and of the last three again from the checkpoint in the middle."""
    flags = {**RESUMED, "fp8_recipe": recipe}
    whole = models.trainer(folder, dropout_llama(dtype), **flags)
    whole.train()
    resumed = models.trainer(folder, spoiled(dropout_llama(dtype)), **flags)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    same = all(torch.equal(v, models.whole(whole.model)[k]) for k, v in models.whole(resumed.model).items())
    return models.losses(whole), models.losses(resumed), same


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("world", WORLDS)
def test_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(
    ranks: Ranks, tmp_path: Path, world: str, recipe: str
) -> None:
    """With dropout, shuffled data, accumulation, a schedule, and fp32 masters of a bf16 model under FSDP2."""
    for dtype in (torch.float32, torch.bfloat16):
        folder = str(tmp_path / str(dtype))
        for losses, resumed, same in ranks(resume_run, folder, recipe, dtype, **WORLDS[world]):
            assert len(losses) == 6 and len(set(losses)) == 6
            assert resumed == losses and same


def offloaded(folder: str, model: nn.Module, **flags: Any) -> FP8Trainer:
    trainer = models.trainer(folder, model, **flags)
    # What FSDP_OFFLOAD_PARAMS=true sets, less the pinned memory, which needs a GPU.
    trainer.accelerator.state.fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
    return trainer


def offloaded_run(folder: str, recipe: str) -> tuple[list[float], list[float], dict[str, torch.Tensor], Any]:
    flags = {**RESUMED, "fp8_recipe": recipe}
    whole = offloaded(folder, dropout_llama(torch.bfloat16), **flags)
    whole.train()
    assert "parameters on CPU" in str(whole.fp8_report)
    whole.save_model(f"{folder}/final")
    weights = models.whole(whole.model)
    resumed = offloaded(folder, spoiled(dropout_llama(torch.bfloat16)), **flags)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    same = all(torch.equal(weights[k], v) for k, v in models.whole(resumed.model).items())
    streamed = {name: tensor.clone() for name, tensor in iter_full_weights(whole.model)}
    assert same and streamed.keys() == weights.keys()
    assert all(torch.equal(weights[k], v) for k, v in streamed.items())
    return models.losses(whole), models.losses(resumed), weights, sorted(os.listdir(f"{folder}/checkpoint-3"))


@STATE_DICT_TYPES
def test_offloaded_run_is_saved_and_resumed_bit_for_bit(
    ranks: Ranks, tmp_path: Path, env: dict[str, str]
) -> None:
    for recipe in ("tensorwise", "delayed"):
        folder = tmp_path / recipe
        for losses, resumed, weights, files in ranks(offloaded_run, str(folder), recipe, fsdp=True, env=env):
            assert resumed == losses and len(set(losses)) == 6
            assert "fp8_masters" in files and ("pytorch_model_fsdp_0" in files) == (env == SHARDED)
            opened = AutoModelForCausalLM.from_pretrained(folder / "final")
            assert opened.dtype == torch.bfloat16
            state = opened.state_dict()
            assert all(torch.equal(state[k], w.bfloat16()) for k, w in weights.items())


def continue_run(folder: str, checkpoint: str, build: Callable[[], nn.Module], flags: Any) -> dict[str, Any]:
    loaded = models.Loaded()
    trainer = models.trainer(folder, spoiled(build()), callbacks=[loaded], **flags)
    trainer.train(resume_from_checkpoint=checkpoint)
    return {"weights": loaded.weights, "moments": loaded.moments, "losses": models.losses(trainer)}


def first_run(folder: str, build: Callable[[], nn.Module], flags: Any) -> list[float]:
    trainer = models.trainer(folder, build(), **flags)
    trainer.train()
    return models.losses(trainer)


ELSEWHERE = {
    "fsdp2-1": {"world_size": 1, "fsdp": True, "env": SHARDED},
    "fsdp2-4": {"world_size": 4, "fsdp": True, "env": SHARDED},
    "fsdp2-full": WORLDS["fsdp2-full"],
    "one": WORLDS["one"],
    "ddp": WORLDS["ddp"],
}


@pytest.mark.parametrize("source", ["fsdp2-sharded", "fsdp2-full", "one"])
def test_checkpoint_continues_on_other_ranks(ranks: Ranks, tmp_path: Path, source: str) -> None:
    """Weights and optimizer arrive exactly, on any number of ranks and in any kind of run; losses stay close."""
    flags = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "fp8_recipe": "delayed"}

    def batch(world: dict[str, Any]) -> dict[str, Any]:
        return {**flags, "per_device_train_batch_size": 8 // world["world_size"]}

    losses = ranks(first_run, str(tmp_path), models.llama, batch(WORLDS[source]), **WORLDS[source])[0]
    args = (str(tmp_path / "next"), str(tmp_path / "checkpoint-2"), models.llama)
    found = {
        name: ranks(continue_run, *args, batch(world), **world)[0]
        for name, world in ELSEWHERE.items()
        if name != source
    }
    first = next(iter(found.values()))
    for name, each in found.items():
        assert each["losses"] == pytest.approx(losses, rel=1e-2), name
        for kind in ("weights", "moments"):
            for key, tensor in each[kind].items():
                assert torch.isfinite(tensor).all() and torch.equal(tensor, first[kind][key]), (name, key)
    checkpoint = tmp_path / "checkpoint-2"
    folder = merged(checkpoint) if source == "fsdp2-sharded" else checkpoint
    saved = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(saved[key], tensor) for key, tensor in first["weights"].items())


def stock_run(folder: str, checkpoint: str | None) -> list[float]:
    from test_trainer import stock_arguments

    arguments = stock_arguments(folder, save_strategy="steps", save_steps=2, max_steps=4)
    trainer = Trainer(
        model=models.llama(), args=TrainingArguments(**arguments), train_dataset=models.texts(48)
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    return models.losses(trainer)  # type: ignore[arg-type]


@pytest.mark.parametrize("world", WORLDS)
def test_fp8_and_bf16_trainers_continue_each_other(ranks: Ranks, tmp_path: Path, world: str) -> None:
    flags = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "fp8_recipe": "delayed"}
    where = WORLDS[world]
    fp8, stock = tmp_path / "fp8", tmp_path / "stock"
    middle = str(fp8 / "checkpoint-2")
    losses = ranks(first_run, str(fp8), models.llama, flags, **where)[0]
    bf16 = ranks(stock_run, str(stock), None, **where)[0]
    if world == "fsdp2-full":
        # Stock reads one file only, a second copy of the weights. The README's two lines write it.
        model = AutoModelForCausalLM.from_pretrained(middle, dtype="float32")
        torch.save(model.state_dict(), f"{middle}/pytorch_model_fsdp.bin")
    off = {**flags, "fp8": False, "bf16": True}
    for continued in (
        ranks(stock_run, str(tmp_path / "a"), middle, **where)[0],
        ranks(continue_run, str(tmp_path / "b"), middle, models.llama, off, **where)[0]["losses"],
    ):
        assert continued[:2] == losses[:2]
        assert continued[2:] == pytest.approx(losses[2:], rel=2e-2) and continued[2:] != losses[2:]
    back = ranks(
        continue_run, str(tmp_path / "c"), str(stock / "checkpoint-2"), models.llama, flags, **where
    )[0]
    assert back["losses"][:2] == bf16[:2]
    assert back["losses"][2:] == pytest.approx(bf16[2:], rel=2e-2) and back["losses"] != bf16


def mixtral_run(folder: str) -> tuple[list[float], list[float]]:
    flags = {**RESUMED, "fp8_recipe": "delayed", "max_steps": 4, "save_steps": 2}
    whole = models.trainer(folder, mixtral(), **flags)
    whole.train()
    resumed = models.trainer(folder, spoiled(mixtral()), **flags)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return models.losses(whole), models.losses(resumed)


@pytest.mark.parametrize("world", ["one", "fsdp2-full"])
def test_experts_in_published_layout_are_read_back(ranks: Ranks, tmp_path: Path, world: str) -> None:
    """Stock Trainer loads such a file by names that the model does not have, and warns."""
    for losses, resumed in ranks(mixtral_run, str(tmp_path), **WORLDS[world]):
        assert resumed == losses


def lora_llama() -> nn.Module:
    adapters = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    torch.manual_seed(1)
    return get_peft_model(models.bf16_llama(), adapters)


def lora_run(folder: str) -> tuple[list[float], list[float], list[str]]:
    flags = {**RESUMED, "fp8_recipe": "tensorwise", "max_steps": 4, "save_steps": 2}
    whole = models.trainer(folder, lora_llama(), **flags)
    whole.train()
    resumed = models.trainer(folder, lora_llama(), **flags)
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    names = sorted(load_file(f"{folder}/checkpoint-2/adapter_model.safetensors"))
    return models.losses(whole), models.losses(resumed), names


@pytest.mark.parametrize("world", ["one", "fsdp2-full", "fsdp2-sharded"])
def test_adapters_resume_and_only_they_are_saved(ranks: Ranks, tmp_path: Path, world: str) -> None:
    for losses, resumed, names in ranks(lora_run, str(tmp_path), **WORLDS[world]):
        assert resumed == losses
        assert len(names) == 28 and all("lora_" in name for name in names)


# --- cut off ------------------------------------------------------------------------------------------------


def killed_in(folder: str, function: str) -> None:
    """Die inside the second checkpoint, in the middle of writing the optimizer, on all ranks at once."""
    import transformers.trainer

    import hf_fp8.trainer

    def kill(*args: Any, **kwargs: Any) -> None:
        if (Path(folder) / "checkpoint-4").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        original(*args, **kwargs)

    module = hf_fp8.trainer if function == "save_fsdp_optimizer" else transformers.trainer.torch
    original = getattr(module, function)
    setattr(module, function, kill)
    models.trainer(folder, models.llama(), fp8_recipe="delayed", **CUT).train()


CUT: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "save_total_limit": 1}


def resume_newest(folder: str) -> list[float]:
    trainer = models.trainer(folder, spoiled(models.llama()), fp8_recipe="delayed", **CUT)
    trainer.train(resume_from_checkpoint=True)
    return models.losses(trainer)


@pytest.mark.parametrize(
    ("world", "function"),
    [("one", "save"), ("fsdp2-sharded", "save_fsdp_optimizer")],
)
def test_checkpoint_of_a_killed_process_is_refused_and_the_one_before_it_taken(
    ranks: Ranks, tmp_path: Path, world: str, function: str
) -> None:
    """Even with `save_total_limit=1` the older checkpoint is there until the new one is whole."""
    where = WORLDS[world]
    flags = {"fp8_recipe": "delayed", "max_steps": 6}
    uninterrupted = ranks(first_run, str(tmp_path / "u"), models.llama, flags, **where)
    folder = tmp_path / "killed"
    with pytest.raises(RankError, match="exit code -9"):
        ranks(killed_in, str(folder), function, **where)
    weights = "pytorch_model_fsdp_0/.metadata" if world == "fsdp2-sharded" else "model.safetensors"
    assert (folder / "checkpoint-4" / weights).is_file()
    errors = ranks.errors(continue_run, str(folder), str(folder / "checkpoint-4"), models.llama, CUT, **where)
    for error in errors:
        assert error and error[0] == "ValueError" and "checkpoint-4 is not whole" in error[1]
    assert ranks(resume_newest, str(folder), **where) == uninterrupted
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-6"]


@pytest.mark.parametrize(
    "file", ["model.safetensors", "optimizer.pt", "fp8_scaling.pt", "trainer_state.json"]
)
def test_truncated_file_is_named(tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture) -> None:
    flags = {**CUT, "save_total_limit": None, "max_steps": 4}
    trainer = models.trainer(str(tmp_path), models.llama(), fp8_recipe="delayed", **flags)
    trainer.train()
    damaged = tmp_path / "checkpoint-4" / file
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    again = models.trainer(str(tmp_path), models.llama(), fp8_recipe="delayed", **flags)
    with pytest.raises(ValueError, match=f"checkpoint-4 is not whole: {file} has"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    again.train(resume_from_checkpoint=True)
    assert models.losses(again) == models.losses(trainer)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt"])
def test_truncated_file_of_a_stock_checkpoint_is_named(tmp_path: Path, file: str) -> None:
    stock_run(str(tmp_path), None)
    damaged = tmp_path / "checkpoint-4" / file
    damaged.write_bytes(damaged.read_bytes()[:-100])
    trainer = models.trainer(str(tmp_path), models.llama(), max_steps=4)
    with pytest.raises(ValueError, match=f"checkpoint-4 is not whole: {file} cannot be read"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    trainer.train(resume_from_checkpoint=True)
    assert len(models.losses(trainer)) == 4


def test_nothing_whole_is_an_error_and_edited_text_is_not(tmp_path: Path) -> None:
    flags = {**CUT, "save_total_limit": None, "max_steps": 2}
    models.trainer(str(tmp_path), models.llama(), **flags).train()
    config = tmp_path / "checkpoint-2" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "note": "by hand"}))
    models.trainer(str(tmp_path), models.llama(), **flags).train(resume_from_checkpoint=True)
    for file in tmp_path.glob("checkpoint-*/model.safetensors"):
        file.unlink()
    with pytest.raises(ValueError, match=r"is whole.*model\.safetensors has 0 of"):
        models.trainer(str(tmp_path), models.llama(), **flags).train(resume_from_checkpoint=True)


# --- best model ----------------------------------------------------------------------------------------------


class Spoil(TrainerCallback):
    """After the second step the weights go bad: far larger, so that an old scale would clip them."""

    def __init__(self) -> None:
        self.evaluated: list[dict[str, torch.Tensor]] = []
        """The weights after each step, which are evaluated next."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        if state.global_step == 3:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(20.0)
        self.evaluated.append(models.whole(model))


def best_run(folder: str, recipe: str) -> tuple[list[float], float, bool]:
    every_step = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    flags = {**every_step, "load_best_model_at_end": True, "max_steps": 4, "fp8_recipe": recipe}
    spoil = Spoil()
    trainer = models.trainer(folder, models.llama(), callbacks=[spoil], **flags)
    trainer.train()
    loaded = models.whole(trainer.model)
    after = trainer.evaluate()["eval_loss"]
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry][:4]
    best = spoil.evaluated[evaluated.index(min(evaluated))]
    same = all(torch.equal(best[k], v) for k, v in loaded.items())
    return evaluated, after, same


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("world", WORLDS)
def test_best_model_is_evaluated_with_its_own_scales(
    ranks: Ranks, tmp_path: Path, world: str, recipe: str
) -> None:
    for evaluated, after, same in ranks(best_run, str(tmp_path), recipe, **WORLDS[world]):
        best = min(evaluated)
        assert same and evaluated.index(best) < 2 and evaluated[-1] > 2 * best
        assert after == best
