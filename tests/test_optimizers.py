"""The optimizers that users pick: they train and resume, or are refused before the first step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.distributed.fsdp import FSDPModule
from transformers import Adafactor

import models
from gloo import Ranks, forget_accelerate
from hf_fp8 import FP8Config, FP8Plugin

WORLDS: dict[str, dict[str, Any]] = {
    "one": {"world_size": 1},
    "ddp": {},
    "fsdp2-full": {"fsdp": True, "env": {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}},
    "fsdp2-sharded": {"fsdp": True, "env": {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}},
}
EVERYWHERE = ["adamw_torch", "adamw_torch_fused", "adamw_torch_8bit"]
WHOLE_ONLY = ["adafactor", "adamw_torch_4bit"]


def train_and_resume(folder: str, names: list[str]) -> dict[str, Any]:
    """Losses of four steps, and of the last two once more from a checkpoint."""
    found = {}
    for name in names:
        flags = {"optim": name, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
        forget_accelerate()
        trainer = models.trainer(f"{folder}/{name}", models.llama(), **flags)
        trainer.train()
        forget_accelerate()
        resumed = models.trainer(f"{folder}/{name}", models.llama(), **flags)
        resumed.train(resume_from_checkpoint=f"{folder}/{name}/checkpoint-2")
        optimizer = type(trainer.optimizer.optimizer).__name__
        found[name] = (
            models.losses(trainer),
            models.losses(resumed),
            optimizer,
            isinstance(trainer.model, FSDPModule),
        )
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_optimizers_train_and_resume(ranks: Ranks, tmp_path: Path, world: str) -> None:
    sharded = world.startswith("fsdp2")
    names = EVERYWHERE if sharded else EVERYWHERE + WHOLE_ONLY
    if world == "fsdp2-full":
        names = [name for name in names if name != "adamw_torch_8bit"]  # refused, see below
    results = ranks(train_and_resume, str(tmp_path), names, **WORLDS[world])
    for each in results:
        assert each == results[0]
        for name, (losses, resumed, _, is_sharded) in each.items():
            assert is_sharded == sharded
            assert len(losses) == 4 and resumed == losses, name
            assert losses == pytest.approx(each["adamw_torch"][0], rel=0.02), name
    assert results[0].keys() == set(names)
    assert {name: kind for name, (_, _, kind, _) in results[0].items()}.items() <= {
        "adamw_torch": "AdamW",
        "adamw_torch_fused": "AdamW",
        "adamw_torch_8bit": "AdamW8bit",
        "adafactor": "Adafactor",
        "adamw_torch_4bit": "AdamW4bit",
    }.items()


def refuse(folder: str, name: str) -> None:
    trainer = models.trainer(folder, models.llama(), optim=name, save_strategy="steps")
    try:
        trainer.train()
    finally:
        assert trainer.state.global_step == 0 and not list(Path(folder).glob("checkpoint-*"))


@pytest.mark.parametrize("name", WHOLE_ONLY)
def test_optimizers_that_cannot_shard_are_refused_on_all_ranks(
    ranks: Ranks, tmp_path: Path, name: str
) -> None:
    for kind, message in ranks.errors(refuse, str(tmp_path), name, fsdp=True):  # type: ignore[misc]
        assert kind == "ValueError"
        assert "cannot step on parameters that FSDP2 shards" in message
        assert "--optim adamw_torch_fused" in message and "adamw_torch_8bit" in message


def test_8_bit_adam_is_refused_where_its_checkpoints_could_not_be_loaded(
    ranks: Ranks, tmp_path: Path
) -> None:
    env = {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
    for kind, message in ranks.errors(refuse, str(tmp_path), "adamw_torch_8bit", fsdp=True, env=env):  # type: ignore[misc]
        assert kind == "ValueError" and message.endswith("Use SHARDED_STATE_DICT.")


def refuse_in_a_loop() -> None:
    plugin = FP8Plugin(FP8Config(emulate=True))
    accelerator = Accelerator(**plugin.accelerator_kwargs())
    model = models.llama()
    optimizer = Adafactor(model.parameters(), lr=1e-3, scale_parameter=False, relative_step=False)
    plugin.prepare(accelerator, model, optimizer)


def test_optimizer_that_cannot_shard_is_refused_by_the_plugin(ranks: Ranks) -> None:
    for kind, message in ranks.errors(refuse_in_a_loop, fsdp=True):  # type: ignore[misc]
        assert kind == "ValueError" and "Adafactor (transformers)" in message


class Paged(torch.optim.AdamW):
    """Stands for an optimizer of a package that is not installed."""


def refuse_bitsandbytes() -> None:
    Paged.__module__ = "bitsandbytes.optim.adamw"
    plugin = FP8Plugin(FP8Config(emulate=True))
    accelerator = Accelerator(**plugin.accelerator_kwargs())
    model = models.llama()
    plugin.prepare(accelerator, model, Paged(model.parameters()))


def test_bitsandbytes_is_refused_when_sharded(ranks: Ranks) -> None:
    for kind, message in ranks.errors(refuse_bitsandbytes, fsdp=True):  # type: ignore[misc]
        assert kind == "ValueError" and "Paged (bitsandbytes)" in message


def test_missing_bitsandbytes_is_refused_before_the_first_step(tmp_path: Path) -> None:
    trainer = models.trainer(str(tmp_path), models.llama(), optim="adamw_bnb_8bit")
    with pytest.raises(ImportError, match="pip install -U bitsandbytes"):
        trainer.train()
    assert trainer.state.global_step == 0
