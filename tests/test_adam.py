"""Fused Adam in one pass: torch's results, with clipping and the amaxes of the weights in the step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

import models
from gloo import Ranks
from hf_fp8 import adam
from hf_fp8.adam import OnePass, step_in_one_pass
from hf_fp8.scaling import WeightScales

SIZES = [(64, 48), (70001,), (3,), (8, 16, 3)]


# --- the mechanism, with the kernel's arithmetic in torch -----------------------------------------------------


def in_torch(rows: Any, dtype: torch.dtype, group: Any, clip: Tensor | None, amaxes: Any) -> None:
    """What `_launch` does."""
    beta1, beta2 = group["betas"]
    for row in rows:
        p, g, m, v = (t.float() for t in row[1:5])
        if clip is not None:
            g = (g * clip).to(dtype).float()
        decay = group["weight_decay"]
        p, g = (p - group["lr"] * decay * p, g) if group["decoupled_weight_decay"] else (p, g + decay * p)
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        step = float(row.step)
        size = group["lr"] / (1 - beta1**step)
        p = p - size * m / ((v / (1 - beta2**step)).sqrt() + group["eps"])
        for target, value in ((row.parameter, p), (row.first, m), (row.second, v)):
            target.copy_(value)
        if row.key in amaxes:
            amaxes[row.key].copy_(row.parameter.abs().max())


PATCHES: dict[str, Any] = {
    "_HAS_KERNEL": True,
    "_on_gpu": lambda group: bool(group["fused"]),
    "_fits": lambda row: True,
    "_launch": in_torch,
}


def run(
    folder: str, callbacks: Any = None, *, one_pass: bool, resume: str | None = None, **changes: Any
) -> Any:
    """A trained FP8Trainer, its losses, its gradient norms, and for each step whether it measured the weights."""
    measured: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, value in PATCHES.items() if one_pass else ():
            patch.setattr(adam, name, value)
        amax = WeightScales.local_amax

        def local_amax(scales: WeightScales) -> Tensor:
            measured.append(scales.measured is not None)
            return amax(scales)

        patch.setattr(WeightScales, "local_amax", local_amax)
        flags = {"fp8_recipe": "delayed", "max_steps": 4, "weight_decay": 0.1, "optim": "adamw_torch_fused"}
        trainer = models.trainer(folder, models.llama(), callbacks=callbacks, **{**flags, **changes})
        trainer.train(resume_from_checkpoint=resume)
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return trainer, models.losses(trainer), norms, measured


def moments(trainer: Any) -> float:
    """The norm of all first moments, which have the size of the gradients that the steps have seen."""
    state = trainer.optimizer.optimizer.state.values()
    norm = torch.nn.utils.get_total_norm([each["exp_avg"] for each in state])
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def test_trainer_clips_and_measures_in_the_step(tmp_path: Path) -> None:
    saved = {"save_strategy": "steps", "save_steps": 2}
    plain, losses, norms, measured = run(str(tmp_path / "a"), one_pass=False, **saved)
    assert type(plain.optimizer.optimizer) is torch.optim.AdamW
    assert min(norms) > 1.0 and not any(measured)
    trainer, *found, measured = run(str(tmp_path / "b"), one_pass=True)
    assert isinstance(trainer.optimizer.optimizer, OnePass)
    assert isinstance(trainer.optimizer.optimizer, torch.optim.AdamW)
    # The last bits of the weights differ, and FP8 makes more of it.
    assert found[0] == pytest.approx(losses, rel=5e-3)
    assert found[1] == pytest.approx(norms, rel=5e-2)
    assert moments(trainer) == pytest.approx(moments(plain), rel=5e-2)
    assert measured[-4:] == [True] * 4
    weights = trainer.fp8_plugin.weights
    scales = {name: m.fp8_weight_scale.item() for name, m in weights.modules.items()}
    weights.refresh()
    assert scales == {name: m.fp8_weight_scale.item() for name, m in weights.modules.items()}
    # A checkpoint of torch's optimizer goes on here.
    resumed = run(str(tmp_path / "b"), one_pass=True, resume=str(tmp_path / "a/checkpoint-2"), **saved)
    assert resumed[1] == pytest.approx(losses, rel=5e-3)


class Looks(TrainerCallback):
    """Reads gradients before the step, and must see clipped ones."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        gradients = [p.grad for p in kwargs["model"].parameters()]
        self.norms.append(torch.nn.utils.get_total_norm(gradients).item())


def test_who_reads_gradients_before_the_step_sees_clipped_ones(tmp_path: Path) -> None:
    _, losses, *_ = run(str(tmp_path), one_pass=True)
    looks = Looks()
    _, same, norms, _ = run(str(tmp_path), [looks], one_pass=True)
    assert min(norms) > 1.0 and looks.norms == pytest.approx([1.0] * 4, rel=1e-3)
    assert same == pytest.approx(losses, rel=5e-3)


def test_adapters_step_in_one_pass_and_frozen_weights_are_measured_as_before(tmp_path: Path) -> None:
    def frozen(one_pass: bool) -> Any:
        model = models.llama()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp" in name)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in PATCHES.items() if one_pass else ():
                patch.setattr(adam, name, value)
            trainer = models.trainer(
                str(tmp_path), model, fp8_recipe="delayed", optim="adamw_torch_fused", max_grad_norm=0.0
            )
            trainer.train()
        return models.losses(trainer)

    assert frozen(True) == pytest.approx(frozen(False), rel=5e-3)


def sharded(folder: str, one_pass: bool, recipe: str) -> Any:
    trainer, losses, norms, measured = run(folder, one_pass=one_pass, fp8_recipe=recipe)
    return losses, norms, measured[-4:], moments(trainer)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_shards_step_in_one_pass(ranks: Ranks, tmp_path: Path, recipe: str) -> None:
    plain = ranks(sharded, str(tmp_path), False, recipe, fsdp=True)
    found = ranks(sharded, str(tmp_path), True, recipe, fsdp=True)
    for (losses, norms, measured, moment), (right, right_norms, _, right_moment) in zip(
        found, plain, strict=True
    ):
        assert losses == pytest.approx(right, rel=5e-3) and norms == pytest.approx(right_norms, rel=5e-2)
        assert measured == [True] * 4 and moment == pytest.approx(right_moment, rel=5e-2)


# --- the kernel -----------------------------------------------------------------------------------------------


def optimizer_of(kind: Any, dtype: torch.dtype) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(size, device="cuda").to(dtype)) for size in SIZES]
    groups = [
        {"params": parameters[:2], "weight_decay": 0.1},
        {"params": parameters[2:], "weight_decay": 0.0, "lr": 3e-3},
    ]
    return kind(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_kernel_takes_the_steps_of_torch(kind: Any, dtype: torch.dtype) -> None:
    right, found = optimizer_of(kind, dtype), optimizer_of(kind, dtype)
    one_pass = step_in_one_pass(found, None)
    assert one_pass is not None
    values = torch.zeros(len(SIZES), device="cuda")
    pairs = [
        (p, q)
        for a, b in zip(right.param_groups, found.param_groups, strict=True)
        for p, q in zip(a["params"], b["params"], strict=True)
    ]
    one_pass._fp8_amax = {q: value for (_, q), value in zip(pairs, values.unbind(), strict=True)}
    one_pass.fp8_scales = WeightScales(torch.nn.Module(), {}, torch.device("cuda"))
    for step in range(5):
        for p, q in pairs:
            p.grad = torch.randn_like(p) * 10 ** (step - 3)
            q.grad = p.grad.clone()
        if step % 2:
            norm = torch.nn.utils.clip_grad_norm_([p for p, _ in pairs], 1.0)
            assert torch.equal(one_pass.clip_in_step([q for _, q in pairs], 1.0), norm)
        right.step()
        found.step()
        assert one_pass.fp8_clip is None
        assert torch.equal(values, torch.stack([q.detach().abs().max().float() for _, q in pairs]))
    # The arithmetic is in fp32 on both sides, in another order: bf16 may round another way.
    ulp = 2e-6 if dtype == torch.float32 else 2**-7
    for p, q in pairs:
        ours, theirs = found.state[q], right.state[p]
        assert ours["step"].item() == 5
        for a, b in (
            (q, p),
            (ours["exp_avg"], theirs["exp_avg"]),
            (ours["exp_avg_sq"], theirs["exp_avg_sq"]),
        ):
            torch.testing.assert_close(a, b, rtol=ulp, atol=ulp * b.abs().max().item())
            assert dtype == torch.float32 or (a != b).sum() <= 0.02 * a.numel() + 1


@pytest.mark.gpu
def test_on_a_gpu_trainer_steps_in_one_pass(tmp_path: Path) -> None:
    gpu = {"use_cpu": False, "fp8_emulate": False, "fp8_convert_small": True}
    trainer, losses, norms, measured = run(str(tmp_path), one_pass=False, **gpu)
    assert isinstance(trainer.optimizer.optimizer, OnePass) and measured[-4:] == [True] * 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam, "_HAS_KERNEL", False)
        plain, right, right_norms, _ = run(str(tmp_path), one_pass=False, **gpu)
    assert type(plain.optimizer.optimizer) is torch.optim.AdamW
    assert losses == pytest.approx(right, rel=1e-3) and norms == pytest.approx(right_norms, rel=1e-2)
