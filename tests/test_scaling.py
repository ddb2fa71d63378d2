"""The delayed recipe in one process: scale arithmetic, history, calibration, weight copies, checkpoints.

Two set-ups. `Loop` drives a plain Accelerate loop over linear layers whose inputs and output gradients are chosen,
so that every amax is known exactly. `fp8_trainer` trains a small Llama, recorded step by step (`Record`).
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

import models
from gloo import forget_accelerate
from hf_fp8 import FP8Config, FP8Plugin, FP8Trainer, FP8TrainingArguments
from hf_fp8.casts import E4M3, cast_saturating
from hf_fp8.checkpoint import SCALING_FILE
from hf_fp8.linear import FP8_BUFFERS, FP8Module, fp8_modules
from hf_fp8.multi_cast import MultiCast
from hf_fp8.scaling import ScalingState, scale_of

FP8_MAX = {torch.float8_e4m3fn: 448, torch.float8_e5m2: 57344}


# --- set-ups ------------------------------------------------------------------------------------------------


def delayed(**options: Any) -> FP8Config:
    return FP8Config(recipe="delayed", emulate=True, **options)


class Chain(nn.Module):
    """Bias-free linear layers, one after another. Two idle ones around them are what selection leaves alone."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16).requires_grad_(False)
        self.chain = nn.Sequential(*(nn.Linear(k, n, bias=False) for k, n in pairwise(widths)))
        self.last = nn.Linear(16, 16).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.chain(x)


class Loop:
    """A plain Accelerate loop over a `Chain`; nothing is learned."""

    def __init__(self, *widths: int, accumulation: int = 1, **options: Any) -> None:
        self.plugin = FP8Plugin(delayed(**{"amax_margin": 0, **options}))
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=accumulation, **self.plugin.accelerator_kwargs()
        )
        model = Chain(*(widths or (32, 48)))
        self.layers = [*model.chain]
        self.model, self.optimizer = self.plugin.prepare(
            self.accelerator, model, torch.optim.SGD(model.chain.parameters(), lr=0.0)
        )

    @property
    def scaling(self) -> ScalingState:
        assert self.plugin.scaling is not None
        return self.plugin.scaling

    def step(self, x: Tensor, dy: Tensor) -> Tensor:
        """One micro-batch with input `x` whose output has gradient `dy`; returns the output."""
        with self.accelerator.accumulate(self.model):
            y = self.model(x)
            self.accelerator.backward((y * dy).sum() * self.accelerator.gradient_accumulation_steps)
            self.optimizer.zero_grad()  # first: not even NaN gradients reach the weights
            self.optimizer.step()
        return y.detach()


def normal(*shape: int, amax: float | None = None) -> Tensor:
    """bf16 numbers in fp32 (autocast changes nothing), the largest of them `amax`."""
    x = torch.randn(*shape)
    return (x if amax is None else x / x.abs().max() * amax).bfloat16().float()


def amax_of(x: Tensor) -> float:
    return x.abs().max().item()


def fp32(value: Fraction) -> float:
    """`value` rounded once, to float32."""
    return torch.tensor(float(value), dtype=torch.float64).float().item()


def published_scale(amax: float, dtype: torch.dtype, margin: int = 0) -> float:
    """fp8_max / (amax * 2**margin) in exact arithmetic, then rounded to float32."""
    return fp32(Fraction(FP8_MAX[dtype]) / (Fraction(amax) * 2**margin))


def tiny_llama(seed: int = 0, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    # Initial weights are large enough for every layer to matter in the loss.
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, "initializer_range": 0.1, **options}))


def token_data(rows: int = 32, seed: int = 1) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 128, (rows, 16), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def snapshot(scaling: ScalingState) -> dict[str, Tensor]:
    """Every tensor of the delayed recipe's state, recorded amaxes included."""
    amax = [
        getattr(m, f"fp8_{role}_amax").clone() for role in ("input", "grad") for m in scaling.modules.values()
    ]
    return {
        "amax": torch.stack(amax).view(2, -1),
        "history": scaling.history.clone(),
        "scales": scaling.scales(),
        "step": scaling.step.clone(),
    }


class Record(TrainerCallback):
    """The FP8 state at each optimizer step: amaxes before it, history and scales after it."""

    def __init__(self, trainer: FP8Trainer) -> None:
        self.trainer = trainer
        self.amax: list[Tensor] = []
        self.after: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.amax.append(snapshot(self.trainer.fp8_plugin.scaling)["amax"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.after.append(snapshot(self.trainer.fp8_plugin.scaling))


class RecordedTrainer(FP8Trainer):
    """Keeps each micro-batch with its loss, and the random state that its forward started from."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.batches: list[Tensor] = []
        self.micro_losses: list[float] = []
        self.random_states: list[Tensor] = []
        super().__init__(*args, **kwargs)
        self.record = Record(self)
        if self.args.fp8_recipe == "delayed":
            self.add_callback(self.record)

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        self.batches.append(inputs["input_ids"].clone())
        self.random_states.append(torch.get_rng_state())
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.micro_losses.append(loss.item())
        return loss

    @property
    def losses(self) -> list[float]:
        return [entry["loss"] for entry in self.state.log_history if "loss" in entry]


def fp8_trainer(
    folder: str | Path,
    model: LlamaForCausalLM | None = None,
    *,
    callbacks: Any = (),
    compiled: bool = False,
    **flags: Any,
) -> RecordedTrainer:
    defaults: dict[str, Any] = {
        "fp8_recipe": "delayed",
        "fp8_emulate": True,
        "fp8_head": "on",  # whatever the recipe: runs are compared
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    if compiled:
        defaults |= {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    return RecordedTrainer(
        model=tiny_llama() if model is None else model,
        args=FP8TrainingArguments(str(folder), **{**defaults, **flags}),
        train_dataset=token_data(),
        eval_dataset=token_data(4, seed=2),
        callbacks=list(callbacks),
    )


def trained(folder: str | Path, *args: Any, **kwargs: Any) -> RecordedTrainer:
    trainer = fp8_trainer(folder, *args, **kwargs)
    trainer.train()
    return trainer


def assert_same_run(a: RecordedTrainer, b: RecordedTrainer) -> None:
    """Losses, amaxes, history and scales of two runs agree bit for bit."""
    assert a.micro_losses == b.micro_losses
    assert len(a.record.after) == len(b.record.after) > 0
    for mine, other in zip(a.record.amax, b.record.amax, strict=True):
        assert torch.equal(mine, other)
    for mine, other in zip(a.record.after, b.record.after, strict=True):
        assert all(torch.equal(mine[key], other[key]) for key in mine)


def graphs_of(run: Callable[[], Any]) -> int:
    """How many graphs `run` compiles."""
    torch._dynamo.reset()
    counters.clear()
    run()
    return counters["stats"]["unique_graphs"]


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """What the package logs (its logger does not propagate)."""
    kept: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = kept.append  # type: ignore[method-assign]
    logging.getLogger("hf_fp8").addHandler(handler)
    yield kept
    logging.getLogger("hf_fp8").removeHandler(handler)


def warnings_in(records: list[logging.LogRecord]) -> list[str]:
    return [r.getMessage() for r in records if r.levelno >= logging.WARNING]


# --- arithmetic ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FP8_MAX)
@pytest.mark.parametrize("margin", [0, 1, 3])
def test_scale_is_fp8_max_over_amax_times_two_to_the_margin(dtype: torch.dtype, margin: int) -> None:
    amax = torch.rand(200) * 10.0 ** torch.randint(-9, 6, (200,)).float()
    expected = [published_scale(value, dtype, margin) for value in amax.tolist()]
    assert scale_of(amax, dtype, margin).tolist() == expected


def test_scale_of_a_zero_amax_is_finite() -> None:
    for dtype in FP8_MAX:
        assert scale_of(torch.zeros(3), dtype).isfinite().all()


@pytest.mark.parametrize("margin", [0, 2])
def test_scales_follow_the_largest_of_the_last_recorded_amaxes_newest_first(margin: int) -> None:
    loop = Loop(amax_history_len=3, amax_margin=margin)
    seen: list[tuple[float, float]] = []
    for size in (1.0, 8.0, 0.5, 2.0, 0.1, 0.2, 3.0):  # the 8 leaves the history after three steps
        x, dy = normal(24, 32, amax=size), normal(24, 48, amax=1 / size)
        loop.step(x, dy)
        seen.insert(0, (amax_of(x), amax_of(dy)))
        kept = seen[:3] + [(0.0, 0.0)] * (3 - len(seen[:3]))
        assert loop.scaling.history[:, 0].T.tolist() == [list(pair) for pair in kept]
        x_amax, dy_amax = (max(column) for column in zip(*kept, strict=True))
        layer = loop.layers[0]
        assert layer.fp8_input_scale.item() == published_scale(x_amax, torch.float8_e4m3fn, margin)
        assert layer.fp8_grad_scale.item() == published_scale(dy_amax, torch.float8_e5m2, margin)
        weight_scale = published_scale(amax_of(layer.weight), torch.float8_e4m3fn)
        assert layer.fp8_weight_scale.item() == weight_scale  # exact, no margin
    assert loop.scaling.step.item() == 7


def test_inputs_are_cast_with_the_scale_of_earlier_steps() -> None:
    loop = Loop(amax_history_len=4)
    loop.step(normal(16, 32, amax=2.0), normal(16, 48))
    x = normal(16, 32, amax=1.0)
    y = loop.step(x, normal(16, 48))
    weight = loop.layers[0].weight.detach()

    def round_trip(value: Tensor, amax: float) -> Tensor:
        scale = published_scale(amax, torch.float8_e4m3fn)
        return (value * scale).to(torch.float8_e4m3fn).double() / scale

    reference = round_trip(x, 2.0) @ round_trip(weight, amax_of(weight)).T
    torch.testing.assert_close(y.double(), reference, rtol=2**-8, atol=1e-4)  # rounded to bf16
    dynamic = round_trip(x, 1.0 * 1.37) @ round_trip(weight, amax_of(weight)).T  # another scale is told apart
    assert (y.double() - dynamic).norm() > 10 * (y.double() - reference).norm()


@pytest.mark.parametrize("zero", ["input", "gradient"])
def test_zero_amax_keeps_the_scale(zero: str) -> None:
    loop = Loop(amax_history_len=1)
    loop.step(normal(16, 32), normal(16, 48))
    before = loop.scaling.scales()
    x, dy = normal(16, 32, amax=9.0), normal(16, 48, amax=9.0)
    loop.step(x * (zero != "input"), dy * (zero != "gradient"))
    row = 0 if zero == "input" else 1
    assert loop.scaling.history[row].eq(0).all()
    assert torch.equal(loop.scaling.scales()[row], before[row])
    assert not torch.equal(loop.scaling.scales()[1 - row], before[1 - row])


def test_accumulation_records_the_largest_amax_of_all_micro_batches() -> None:
    loop = Loop(accumulation=4, amax_history_len=4)
    newest = []
    for peak in (0, 1, 3):
        batches = [(normal(16, 32, amax=1 + 5 * (i == peak)), normal(16, 48)) for i in range(4)]
        for i, (x, dy) in enumerate(batches):
            assert loop.scaling.step.item() == len(newest)  # no sync inside the window
            loop.step(x, dy)
            assert loop.scaling.step.item() == len(newest) + (i == 3)
        newest.insert(0, [max(amax_of(b[role]) for b in batches) for role in (0, 1)])
        assert loop.scaling.history[:, 0, : len(newest)].T.tolist() == newest


# --- NaN, Inf, saturation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("role", ["input", "output gradient"])
def test_a_nonfinite_amax_is_reported_with_step_and_layer_and_leaves_history_and_scales_alone(
    bad: float, role: str, records: list[logging.LogRecord]
) -> None:
    loop = Loop(32, 48, 16, amax_history_len=2)
    for _ in range(2):
        loop.step(normal(16, 32), normal(16, 16))
    before = snapshot(loop.scaling)
    x, dy = normal(16, 32), normal(16, 16)
    (x if role == "input" else dy)[3, 5] = bad
    loop.step(x, dy)
    row, layer = (0, 0) if role == "input" else (1, 1)
    after = snapshot(loop.scaling)
    assert after["history"].isfinite().all() and after["scales"].isfinite().all()
    assert (
        after["history"][row, layer, 0] == before["history"][row, layer, 0]
    )  # the newest finite value again
    loop.scaling.log_values()
    name = list(loop.scaling.modules)[layer]
    assert any(f"FP8 {role} of {name} " in text and "step 3" in text for text in warnings_in(records))

    records.clear()
    for _ in range(2):
        good = loop.step(normal(16, 32), normal(16, 16))
    assert good.isfinite().all() and snapshot(loop.scaling)["history"].isfinite().all()
    loop.scaling.log_values()
    assert not [text for text in warnings_in(records) if "NaN or Inf" in text]  # said once


def test_a_nonfinite_first_batch_does_not_spoil_the_calibration() -> None:
    loop = Loop(amax_history_len=4)
    x = normal(16, 32)
    x[0, 0] = float("nan")
    loop.step(x, normal(16, 48))
    assert loop.scaling.history.isfinite().all() and loop.scaling.scales().isfinite().all()
    x = normal(16, 32)
    loop.step(x, normal(16, 48))
    assert loop.step(x, normal(16, 48)).isfinite().all()
    assert loop.layers[0].fp8_input_scale.item() == published_scale(amax_of(x), torch.float8_e4m3fn)


def test_the_log_line_of_an_infinite_amax_names_no_innocent_layer() -> None:
    loop = Loop(32, 48, 16, amax_history_len=2)
    loop.step(normal(16, 32), normal(16, 16))
    loop.scaling.log_values()
    dy = normal(16, 16)
    dy[3, 5] = float("inf")
    loop.step(normal(16, 32, amax=1e-3), dy)
    values = loop.scaling.log_values()
    named = values.get("fp8/worst_layer")
    assert (values["fp8/saturated_layers"] > 0) == (named is not None)
    assert named is None or named in ("chain.1 output gradient", "chain.0 output gradient")


def test_an_input_a_hundred_times_larger_saturates_is_counted_and_is_followed_the_step_after() -> None:
    loop = Loop(32, 48, 16, amax_history_len=4)
    dy = normal(16, 16)
    loop.step(normal(16, 32, amax=1.0), dy)
    assert loop.scaling.log_values() == {"fp8/saturated_layers": 0}
    assert loop.scaling.log_values() == {}  # no step since

    x = normal(16, 32, amax=100.0)
    clipped = loop.model(x.clamp(-1.0, 1.0))
    torch.testing.assert_close(loop.step(x, dy), clipped.detach())  # out of range becomes the largest number
    values = loop.scaling.log_values()
    assert values["fp8/saturated_layers"] >= 1
    assert values["fp8/worst_layer"] == "chain.0 input"
    assert values["fp8/worst_excess"] == pytest.approx(100.0, rel=1e-4)

    loop.step(x, dy)
    values = loop.scaling.log_values()
    assert values.get("fp8/worst_layer") != "chain.0 input"


class Grow(TrainerCallback):
    """Multiplies one weight before each step, so that the input of the layer behind it grows as fast."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            model.model.layers[1].self_attn.v_proj.weight *= self.factor


def test_trainer_logs_saturated_layers_and_warns_when_it_repeats(
    tmp_path: Path, records: list[logging.LogRecord]
) -> None:
    trainer = trained(tmp_path, callbacks=[Grow(4.0)], max_steps=8, logging_steps=4, learning_rate=0.0)
    lines = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(lines) == 2
    for line in lines:
        assert line["fp8/saturated_layers"] >= 1
        assert line["fp8/worst_layer"] == "model.layers.1.self_attn.o_proj input"
        assert line["fp8/worst_excess"] > 2
    repeated = [text for text in warnings_in(records) if "model.layers.1.self_attn.o_proj" in text]
    assert repeated and all("--fp8_amax_margin" in text and "input" in text for text in repeated)


def test_a_steady_run_with_headroom_logs_zero_and_does_not_warn(
    tmp_path: Path, records: list[logging.LogRecord]
) -> None:
    trainer = trained(tmp_path, fp8_amax_margin=3, learning_rate=0.0)
    lines = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [line["fp8/saturated_layers"] for line in lines] == [0, 0, 0, 0]
    assert not any("fp8/worst_layer" in line for line in lines)
    assert not warnings_in(records)


# --- recomputation, compile, evaluation ---------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_records_the_same_amaxes_bit_for_bit(tmp_path: Path, reentrant: bool) -> None:
    plain = trained(tmp_path, gradient_accumulation_steps=2)
    recomputed = trained(
        tmp_path,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": reentrant},
    )
    assert_same_run(plain, recomputed)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_equals_eager_bit_for_bit(tmp_path: Path, checkpointing: bool) -> None:
    flags: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 3}
    if checkpointing:
        flags |= {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
        }
    eager = trained(tmp_path, **flags)
    compiled = fp8_trainer(tmp_path, compiled=True, **flags)
    assert graphs_of(compiled.train) > 0
    assert_same_run(eager, compiled)
    assert compiled.evaluate()["eval_loss"] == eager.evaluate()["eval_loss"]


def test_no_other_compile_backend_is_used_than_the_one_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inductor = torch._inductor.compile_fx.compile_fx
    calls: list[Any] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return inductor(*args, **kwargs)

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", counted)
    assert graphs_of(lambda: trained(tmp_path, compiled=True, max_steps=2)) > 0
    assert not calls


class AskDuring(TrainerCallback):
    """Runs the model forward at every chance that a callback gets."""

    def __init__(self, mode: Callable[[], Any]) -> None:
        self.mode, self.answers = mode, 0

    def _ask(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        tokens = torch.randint(
            0, 128, (3, 16), generator=torch.Generator().manual_seed(self.answers)
        )  # the run's own random state stays as it is
        with self.mode():
            assert model(input_ids=tokens, labels=tokens).loss.isfinite()
        self.answers += 1

    on_train_begin = on_step_begin = on_substep_end = on_pre_optimizer_step = on_step_end = _ask


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_callback_that_runs_the_model_does_not_disturb_training(
    tmp_path: Path, mode: Callable[[], Any], compiled: bool
) -> None:
    flags: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 3}
    plain = trained(tmp_path, **flags)
    ask = AskDuring(mode)
    disturbed = trained(tmp_path, callbacks=[ask], compiled=compiled, **flags)
    assert ask.answers == 1 + 3 * 4
    assert_same_run(plain, disturbed)


def test_evaluate_predict_and_generate_leave_the_fp8_state_alone(tmp_path: Path) -> None:
    trainer = fp8_trainer(tmp_path, fp8_weight_cache="on")
    fresh = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert fresh == fp8_trainer(tmp_path).evaluate()["eval_loss"]  # with and without a copy
    before = snapshot(trainer.fp8_plugin.scaling)
    copies = {
        n: m.fp8_weight.float() for n, m in fp8_modules(trainer.model).items() if m.fp8_weight is not None
    }
    assert copies
    first = trainer.evaluate()["eval_loss"]
    trainer.predict(token_data(6, seed=3))
    trainer.model.generate(torch.randint(0, 128, (2, 5)), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert trainer.evaluate()["eval_loss"] == first
    after = snapshot(trainer.fp8_plugin.scaling)
    assert all(torch.equal(before[key], after[key]) for key in before)
    for name, module in fp8_modules(trainer.model).items():
        assert torch.equal(copies[name], module.fp8_weight.float())


def test_evaluation_between_steps_changes_no_bit_of_training(tmp_path: Path) -> None:
    plain = trained(tmp_path)
    evaluated = trained(tmp_path, eval_strategy="steps", eval_steps=1, eval_on_start=True)
    assert sum("eval_loss" in entry for entry in evaluated.state.log_history) == 5
    assert_same_run(plain, evaluated)


# --- calibration --------------------------------------------------------------------------------------------


class FirstGradients(TrainerCallback):
    """The gradients of the first optimizer step, unclipped, and the parameters before it."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.parameters: dict[str, Tensor] = {}

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kw: Any
    ) -> None:
        if not self.gradients:
            self.gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
            self.parameters = {n: p.detach().clone() for n, p in model.named_parameters()}


CALIBRATION_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "compiled": {"compiled": True, "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("case", CALIBRATION_CASES)
def test_calibration_computes_what_tensorwise_computes_and_moves_nothing_else(
    tmp_path: Path, case: str
) -> None:
    """Dropout is on: a pass too many would show in the random state, the masks and the losses."""
    runs, firsts = {}, {}
    for recipe in ("tensorwise", "delayed"):
        torch._dynamo.reset()
        firsts[recipe] = FirstGradients()
        runs[recipe] = trained(
            tmp_path,
            tiny_llama(attention_dropout=0.2),
            callbacks=[firsts[recipe]],
            fp8_recipe=recipe,
            fp8_head="off",  # whose gradient is dithered, except in calibration
            max_steps=2,
            max_grad_norm=0.0,
            **CALIBRATION_CASES[case],
        )
    tensorwise, ours = runs["tensorwise"], runs["delayed"]
    assert ours.micro_losses[0] == tensorwise.micro_losses[0]
    assert ours.micro_losses != tensorwise.micro_losses  # and from then on scales are delayed
    assert all(torch.equal(a, b) for a, b in zip(ours.batches, tensorwise.batches, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(ours.random_states, tensorwise.random_states, strict=True))
    initial = tiny_llama(attention_dropout=0.2).state_dict()
    assert all(torch.equal(p, initial[n]) for n, p in firsts["delayed"].parameters.items())
    if "gradient_accumulation_steps" not in CALIBRATION_CASES[case]:
        for name, gradient in firsts["tensorwise"].gradients.items():
            assert torch.equal(gradient, firsts["delayed"].gradients[name])


def test_calibration_sets_the_scales_of_the_second_micro_batch() -> None:
    loop = Loop(accumulation=2)
    x, dy = normal(16, 32, amax=3.0), normal(16, 48, amax=0.25)
    loop.step(x, dy)
    assert loop.scaling.step.item() == 0 and not loop.scaling.calibrating
    assert loop.layers[0].fp8_input_scale.item() == published_scale(3.0, torch.float8_e4m3fn)
    assert loop.layers[0].fp8_grad_scale.item() == published_scale(0.25, torch.float8_e5m2)
    loop.step(normal(16, 32, amax=1.0), normal(16, 48, amax=0.125))
    assert loop.scaling.history[:, 0, 0].tolist() == [3.0, 0.25]  # the window includes the first micro-batch


class Fork(nn.Module):
    """Two linear layers, on one input or on two."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16).requires_grad_(False)  # idle, as in `Chain`
        self.left, self.right = (nn.Linear(32, 48, bias=False) for _ in range(2))
        self.last = nn.Linear(16, 16).requires_grad_(False)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.left(x) + self.right(z)


def test_layers_with_one_input_share_its_scale_which_serves_the_larger_if_inputs_differ_later() -> None:
    plugin = FP8Plugin(delayed(amax_margin=0))
    accelerator = Accelerator(cpu=True, **plugin.accelerator_kwargs())
    model = Fork()
    parameters = [model.left.weight, model.right.weight]
    model, optimizer = plugin.prepare(accelerator, model, torch.optim.SGD(parameters, lr=0.0))

    def step(x: Tensor, z: Tensor) -> None:
        accelerator.backward(model(x, z).sum())
        optimizer.step()
        optimizer.zero_grad()

    assert model.left.fp8_input_scale is not model.right.fp8_input_scale
    x = normal(16, 32, amax=2.0)
    step(x, x)
    assert model.left.fp8_input_scale is model.right.fp8_input_scale
    assert model.left.fp8_grad_scale is not model.right.fp8_grad_scale
    assert model.left.fp8_input_scale.item() == published_scale(2.0, torch.float8_e4m3fn)
    step(x, normal(16, 32, amax=8.0))
    assert model.left.fp8_input_scale.item() == published_scale(8.0, torch.float8_e4m3fn)
    assert plugin.scaling is not None
    assert plugin.scaling.history[0, :, 0].tolist() == [2.0, 8.0]  # each keeps its own amaxes


def input_scales(loop: "LlamaLoop") -> list[list[str]]:
    """The names of the modules that share an input scale, by scale."""
    groups: dict[int, list[str]] = {}
    for name, module in fp8_modules(loop.model).items():
        groups.setdefault(id(module.fp8_input_scale), []).append(name.removeprefix("model.layers.0."))
    return [names for names in groups.values() if names[0].split(".")[0] in ("self_attn", "mlp")]


def test_a_blocks_projections_share_their_input_scale_after_the_first_step_and_after_resuming() -> None:
    shared = [
        [f"self_attn.{name}_proj" for name in "qkv"],
        ["self_attn.o_proj"],
        ["mlp.gate_proj", "mlp.up_proj"],
        ["mlp.down_proj"],
    ]
    loop, resumed, old = (LlamaLoop() for _ in range(3))
    assert all(len(names) == 1 for names in input_scales(loop))
    loop.run(range(1))
    assert input_scales(loop) == shared
    state = loop.plugin.scaling.state_dict()
    resumed.plugin.scaling.load_state_dict(state)
    assert input_scales(resumed) == shared
    old.plugin.scaling.load_state_dict({key: value for key, value in state.items() if key != "leaders"})
    assert all(len(names) == 1 for names in input_scales(old))
    assert torch.equal(old.plugin.scaling.scales(), loop.plugin.scaling.scales())


def test_a_compiled_block_casts_a_shared_input_once() -> None:
    loop = LlamaLoop()
    loop.run(range(1))
    casts: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        casts.append(sum(node.meta["val"].dtype == E4M3 for node in graph.graph.nodes if is_cast(node)))
        return make_boxed_func(graph.forward)

    def is_cast(node: torch.fx.Node) -> bool:
        return node.target is torch.ops.aten._to_copy.default

    model = loop.model
    x = normal(1, 16, model.config.hidden_size).requires_grad_()
    torch._dynamo.reset()
    block = torch.compile(
        model.model.layers[0],
        backend=aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition),
    )
    block(x, position_embeddings=model.model.rotary_emb(x, torch.arange(16)[None]))
    assert casts == [4 + 7]  # four inputs, seven weights


def test_first_step_allows_several_forwards_before_their_backwards() -> None:
    loop = Loop()
    batches = [(normal(16, 32, amax=size), normal(16, 48)) for size in (1.0, 2.0)]
    outputs = [loop.model(x) for x, _ in batches]
    for y, (_, dy) in zip(outputs, batches, strict=True):
        loop.accelerator.backward((y * dy).sum())
    loop.optimizer.step()
    assert loop.scaling.history[:, 0, 0].tolist() == [2.0, max(amax_of(dy) for _, dy in batches)]


def test_a_first_step_that_ends_without_the_accelerators_backward_counts_no_saturation() -> None:
    loop = Loop()
    (loop.model(normal(16, 32, amax=1000.0)) * normal(16, 48)).sum().backward()
    loop.optimizer.step()
    assert not loop.scaling.calibrating
    assert loop.layers[0].fp8_input_scale.item() == published_scale(1000.0, torch.float8_e4m3fn)
    assert loop.scaling.log_values() == {"fp8/saturated_layers": 0}


# --- the weight copy ----------------------------------------------------------------------------------------


def test_weight_cache_changes_no_bit_and_is_written_once_per_optimizer_step(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"gradient_accumulation_steps": 4, "max_steps": 3}
    cached = fp8_trainer(tmp_path, **flags)
    writes: list[list[int]] = []

    class CountWrites(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            modules = fp8_modules(cached.model).values()
            writes.append([m.fp8_weight._version for m in modules if m.fp8_weight is not None])

    cached.add_callback(CountWrites())
    cached.train()
    assert len(writes) == 3 and len(writes[0]) == len(fp8_modules(cached.model))
    for earlier, later in pairwise(writes):
        assert [b - a for a, b in zip(earlier, later, strict=True)] == [1] * len(earlier)

    uncached = trained(tmp_path, fp8_weight_cache="off", **flags)
    assert all(m.fp8_weight is None for m in fp8_modules(uncached.model).values())
    assert_same_run(cached, uncached)
    assert cached.evaluate()["eval_loss"] == uncached.evaluate()["eval_loss"]


def test_micro_batches_compute_with_the_cached_copy() -> None:
    loop = Loop(accumulation=4)
    x, dy = normal(16, 32), normal(16, 48)
    before = loop.step(x, dy)
    copy = loop.layers[0].fp8_weight
    copy.copy_(torch.zeros_like(copy))
    assert before.abs().max() > 0 and loop.step(x, dy).abs().max() == 0


def test_copies_are_kept_where_a_weight_is_read_more_often_than_it_changes(tmp_path: Path) -> None:
    def kept(**flags: Any) -> set[str]:
        model = models.llama()
        model.model.layers[0].mlp.requires_grad_(False)
        trainer = models.trainer(str(tmp_path), model, fp8_recipe="delayed", max_steps=1, **flags)
        trainer.train()
        return {name for name, m in fp8_modules(model).items() if m.fp8_weight is not None}

    frozen = {f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")}
    assert kept() == frozen
    assert kept(fp8_weight_cache="off") == set()
    everything = kept(fp8_weight_cache="on")
    assert everything > frozen
    assert kept(gradient_accumulation_steps=2) == kept(gradient_checkpointing=True) == everything


def test_the_report_states_the_memory_of_the_weight_copies() -> None:
    assert any("3 MiB" in note for note in Loop(1024, 1024, 2048, accumulation=2).plugin.report.notes)
    notes = Loop(1024, 1024, 2048, weight_cache="off").plugin.report.notes
    assert not any("MiB" in note for note in notes)


def rescaled(model: nn.Module, factor: float) -> dict[str, Tensor]:
    """Another set of weights, with FP8 scales far from the model's own."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return {name: v * factor if name.endswith("proj.weight") else v for name, v in state.items()}


def evaluated_afresh(folder: Path, weights: dict[str, Tensor], like: FP8Trainer, **flags: Any) -> float:
    """Evaluation loss of a newly built trainer with these weights and the input scales of `like`."""
    model = tiny_llama(seed=5)
    model.load_state_dict(weights)
    fresh = fp8_trainer(folder, model, **flags)
    fresh.evaluate()  # sets the FP8 state up
    fresh.fp8_plugin.scaling.load_state_dict(like.fp8_plugin.scaling.state_dict())
    return fresh.evaluate()["eval_loss"]


@pytest.mark.parametrize("cache", ["on", "off"])
@pytest.mark.parametrize("change", ["load_state_dict", "ema", "assign"])
def test_weight_scales_and_copies_follow_weights_changed_outside_the_optimizer(
    tmp_path: Path, change: str, cache: str
) -> None:
    trainer = trained(tmp_path, max_steps=2, fp8_weight_cache=cache)
    stale = trainer.evaluate()["eval_loss"]
    other = rescaled(trainer.model, 6.0)
    if change == "ema":
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                parameter.lerp_(other[name], 1.0)
        other = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    else:
        trainer.model.load_state_dict(other, assign=change == "assign")
    loss = trainer.evaluate()["eval_loss"]
    assert loss != stale
    assert loss == evaluated_afresh(tmp_path, other, trainer, fp8_weight_cache=cache)


def test_load_best_model_at_end_evaluates_with_the_best_models_scales(tmp_path: Path) -> None:
    trainer = trained(
        tmp_path,
        max_steps=4,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # the loss falls: the first checkpoint is the best
    )
    best = trainer.state.best_model_checkpoint
    assert best is not None and best.endswith("checkpoint-1")
    weights = LlamaForCausalLM.from_pretrained(best).state_dict()
    assert all(torch.equal(v, weights[n]) for n, v in trainer.model.state_dict().items())
    assert trainer.evaluate()["eval_loss"] == evaluated_afresh(tmp_path / "fresh", weights, trainer)


# --- checkpoints --------------------------------------------------------------------------------------------


def test_resume_restores_the_fp8_state_bitwise_and_continues_bit_for_bit(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    whole = trained(tmp_path, fp8_amax_history_len=4, **flags)
    resumed = fp8_trainer(tmp_path, tiny_llama(seed=9), fp8_amax_history_len=4, **flags)
    restored: list[dict[str, Tensor]] = []

    class AtStart(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            restored.append(snapshot(resumed.fp8_plugin.scaling))

    resumed.add_callback(AtStart())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    saved = whole.record.after[2]
    assert saved["step"].item() == 3 and saved["history"][:, :, :3].gt(0).all()
    assert all(torch.equal(restored[0][key], saved[key]) for key in saved)
    assert resumed.micro_losses == whole.micro_losses[3:]
    assert len(resumed.record.after) == 3
    for mine, other in zip(resumed.record.after, whole.record.after[3:], strict=True):
        assert all(torch.equal(mine[key], other[key]) for key in mine)


def test_fp8_state_stays_out_of_the_model_checkpoint(tmp_path: Path) -> None:
    trained(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    checkpoint = tmp_path / "checkpoint-1"
    assert (checkpoint / SCALING_FILE).exists()
    plain, info = LlamaForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not any(buffer in name for name in plain.state_dict() for buffer in FP8_BUFFERS)


def test_resuming_from_a_tensorwise_checkpoint_calibrates_anew_with_a_warning(
    tmp_path: Path, records: list[logging.LogRecord]
) -> None:
    flags: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = trained(tmp_path, fp8_recipe="tensorwise", **flags)
    records.clear()
    resumed = fp8_trainer(tmp_path, **flags)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert any("calibrated anew" in text for text in warnings_in(records))
    assert resumed.micro_losses[0] == whole.micro_losses[2]  # exact scales, as tensorwise
    assert resumed.record.after[-1]["step"].item() == 2


def test_resuming_with_other_converted_modules_is_refused_by_name(tmp_path: Path) -> None:
    trained(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    other = fp8_trainer(tmp_path, max_steps=2, fp8_skip=["model.layers.1.mlp.up_proj"])
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj.*fp8 flags"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@pytest.mark.parametrize("length", [2, 6])
def test_another_history_length_keeps_the_newest_amaxes(length: int) -> None:
    first = Loop(amax_history_len=4)
    for size in (4.0, 3.0, 2.0, 1.0):
        first.step(normal(16, 32, amax=size), normal(16, 48))
    second = Loop(amax_history_len=length)
    second.scaling.load_state_dict(first.scaling.state_dict())
    assert second.scaling.history[0, 0].tolist() == [1.0, 2.0, 3.0, 4.0, 0.0, 0.0][:length]
    assert torch.equal(second.scaling.scales(), first.scaling.scales())


class LlamaLoop:
    """A plain Accelerate training loop over a small Llama."""

    def __init__(self, seed: int = 0, *, compiled: bool = False) -> None:
        forget_accelerate()  # the first accelerator of a process would decide for all whether to compile
        self.plugin = FP8Plugin(delayed(amax_history_len=4))
        self.accelerator = Accelerator(
            cpu=True,
            dynamo_plugin=TorchDynamoPlugin(backend="aot_eager") if compiled else None,
            **self.plugin.accelerator_kwargs(),
        )
        model = tiny_llama(seed)
        self.model, self.optimizer = self.plugin.prepare(
            self.accelerator, model, torch.optim.AdamW(model.parameters(), lr=1e-3)
        )

    def run(self, steps: range, *, backward: Callable[[Tensor], None] | None = None) -> list[float]:
        losses = []
        for step in steps:
            batch = torch.stack([row["input_ids"] for row in token_data(2, seed=100 + step)])
            loss = self.model(input_ids=batch, labels=batch).loss
            (backward or self.accelerator.backward)(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def test_accelerate_loop_resumes_bit_for_bit_from_its_saved_state(tmp_path: Path) -> None:
    whole = LlamaLoop()
    whole.run(range(3))
    whole.accelerator.save_state(str(tmp_path))
    saved = snapshot(whole.plugin.scaling)
    losses = whole.run(range(3, 6))

    resumed = LlamaLoop(seed=9)
    resumed.accelerator.load_state(str(tmp_path))
    restored = snapshot(resumed.plugin.scaling)
    assert all(torch.equal(restored[key], saved[key]) for key in saved)
    assert resumed.run(range(3, 6)) == losses
    end, other_end = snapshot(whole.plugin.scaling), snapshot(resumed.plugin.scaling)
    assert all(torch.equal(end[key], other_end[key]) for key in end)


def test_a_resumed_accelerate_loop_runs_compiled(tmp_path: Path) -> None:
    first = LlamaLoop()
    first.run(range(1))
    first.accelerator.save_state(str(tmp_path))
    resumed = LlamaLoop(compiled=True)
    resumed.accelerator.load_state(str(tmp_path))
    assert graphs_of(lambda: resumed.run(range(1, 3))) > 0


def test_a_loop_that_calls_backward_itself_is_calibrated_and_then_runs_compiled() -> None:
    reference = LlamaLoop().run(range(3))
    loop = LlamaLoop(compiled=True)
    losses: list[float] = []
    assert graphs_of(lambda: losses.extend(loop.run(range(3), backward=Tensor.backward))) > 0
    assert losses == reference
    assert isinstance(next(iter(fp8_modules(loop.model).values())), FP8Module)


def test_frozen_weights_are_cast_once_and_trained_ones_every_step(tmp_path: Path) -> None:
    model = models.llama()
    frozen = {f"model.layers.0.{name}" for name, _ in model.model.layers[0].named_modules() if name}
    model.model.layers[0].requires_grad_(False)
    trainer = models.trainer(str(tmp_path), model, fp8_recipe="delayed", fp8_weight_cache="on", max_steps=4)
    cast: Counter[str] = Counter()
    original = MultiCast.__call__

    def counted(
        self: MultiCast, sources: list[torch.Tensor], targets: list[torch.Tensor], scales: torch.Tensor
    ) -> None:
        names = {id(module.fp8_weight): name for name, module in fp8_modules(model).items()}
        cast.update(names[id(target)] for target in targets)
        original(self, sources, targets, scales)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MultiCast, "__call__", counted)
        trainer.train()
    assert cast
    for name, times in cast.items():
        assert times == (1 if name in frozen else 5), name  # before the first forward, then after each step


def weights_to_cast(device: str) -> list[torch.Tensor]:
    """Sizes around the kernel's chunks, two dtypes, and the values that casts get wrong."""
    shapes = [(64, 48), (1, 17), (300, 1024), (129, 513), (0, 16)]
    weights = [3 * torch.randn(shape, device=device) for shape in shapes]
    weights += [weight.bfloat16() for weight in weights[:3]] + [weights[2].t()]
    weights[0].view(-1)[:5] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e-9, 448.0])
    return weights


def check_multi_cast(device: str) -> None:
    weights = weights_to_cast(device)
    copies = [torch.empty_like(weight, dtype=E4M3) for weight in weights]
    cast = MultiCast()
    for _ in range(2):  # the second time with what it remembers of the first
        scales = torch.rand(len(weights), device=device) * 100 + 1
        cast(weights, copies, scales)
        for weight, copy, scale in zip(weights, copies, scales):
            right = cast_saturating(weight, scale, E4M3)
            assert torch.equal(copy.view(torch.uint8), right.view(torch.uint8))
        cast(weights[1:3], copies[1:3], scales[:2])
        assert torch.equal(copies[2].float(), cast_saturating(weights[2], scales[1], E4M3).float())


def test_multi_cast_equals_casts_one_by_one() -> None:
    check_multi_cast("cpu")


@pytest.mark.gpu
def test_one_kernel_casts_all_weights_as_casts_one_by_one_do() -> None:
    check_multi_cast("cuda")
    contiguous = [weight.contiguous() for weight in weights_to_cast("cuda")]
    copies = [torch.empty_like(weight, dtype=E4M3) for weight in contiguous]
    scales = torch.rand(len(copies), device="cuda") * 100 + 1
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        MultiCast()(contiguous, copies, scales)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if "_cast_kernel" in event.name]
    assert len(kernels) == 2  # one for each dtype
    for weight, copy, scale in zip(contiguous, copies, scales):
        right = cast_saturating(weight, scale, E4M3)
        assert torch.equal(copy.view(torch.uint8), right.view(torch.uint8))
