"""One `FP8Config` from flags, from Python and from a launch config; Accelerate's own FP8 stays out."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchao.float8.float8_linear import Float8Linear
from transformers import HfArgumentParser, Seq2SeqTrainingArguments

from gloo import Ranks
from hf_fp8 import FP8ArgumentsMixin, FP8Config, FP8Plugin, FP8TrainingArguments
from hf_fp8.config import keep_accelerate_from_converting
from hf_fp8.linear import FP8Linear, fp8_modules
from launch import CONFIGS
from models import bf16_llama, llama, losses, trainer
from test_launch_configs import free_port, launch_environment

# Field by field: a value that is not the default, as Python, as flags, and as YAML under `fp8_config:`.
FIELDS: dict[str, tuple[Any, list[str], str]] = {
    "recipe": ("tensorwise", ["--fp8_recipe", "tensorwise"], "recipe: tensorwise"),
    "skip": (
        ("*.down_proj", "model.layers.0.*"),
        ["--fp8_skip", "*.down_proj", "model.layers.0.*"],
        'skip: ["*.down_proj", "model.layers.0.*"]',
    ),
    "convert_small": (True, ["--fp8_convert_small", "true"], "convert_small: true"),
    "head": ("off", ["--fp8_head", "off"], "head: off"),
    "all_gather": ("off", ["--fp8_all_gather", "off"], "all_gather: off"),
    "emulate": (True, ["--fp8_emulate", "true"], "emulate: true"),
    "amax_history_len": (4, ["--fp8_amax_history_len", "4"], "amax_history_len: 4"),
    "amax_margin": (2, ["--fp8_amax_margin", "2"], "amax_margin: 2"),
    "amax_sync": (False, ["--fp8_amax_sync", "false"], "amax_sync: false"),
    "weight_cache": ("off", ["--fp8_weight_cache", "off"], "weight_cache: off"),
    "experts": ("off", ["--fp8_experts", "off"], "experts: off"),
}


def launched(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *fp8_lines: str, precision: str = "fp8", flags: Any = ()
) -> None:
    """Set what `accelerate launch` exports for a CPU launch config with these lines under `fp8_config:`."""
    for name in ("ACCELERATE_USE_CPU", "ACCELERATE_TORCH_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    file = folder / "launch.yaml"
    fp8_config = "fp8_config:\n" + "".join(f"  {line}\n" for line in fp8_lines) if fp8_lines else ""
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nuse_cpu: true\nnum_machines: 1\n"
        f"num_processes: 1\nmixed_precision: '{precision}'\n{fp8_config}"
    )
    for key, value in launch_environment(file, *flags).items():
        monkeypatch.setenv(key, value)


def from_command_line(folder: Path, *flags: str) -> FP8TrainingArguments:
    command = ["--output_dir", str(folder), "--use_cpu", "true", "--report_to", "none", *flags]
    (args,) = HfArgumentParser(FP8TrainingArguments).parse_args_into_dataclasses(command)
    return args


def arguments(folder: Path, **options: Any) -> FP8TrainingArguments:
    return FP8TrainingArguments(str(folder), use_cpu=True, report_to="none", **options)


# --- the same object from everywhere ------------------------------------------------------------------------


def test_every_field_has_a_case_here() -> None:
    assert set(FIELDS) | {"enabled"} == {field.name for field in dataclasses.fields(FP8Config)}


@pytest.mark.parametrize("name", FIELDS)
def test_flag_python_and_launch_config_give_the_same_config(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    value, flags, line = FIELDS[name]
    python = FP8Config(**{name: value})
    assert python != FP8Config()
    assert from_command_line(tmp_path, *flags).fp8_config == python
    assert arguments(tmp_path, **{f"fp8_{name}": value}).fp8_config == python
    launched(monkeypatch, tmp_path, "backend: AO", line)
    assert FP8Config.from_launch() == python
    assert arguments(tmp_path).fp8_config == python
    assert FP8Plugin().config == python
    assert getattr(arguments(tmp_path), f"fp8_{name}") == (list(value) if name == "skip" else value)


def test_all_fields_at_once_give_the_same_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = FP8Config(**{name: value for name, (value, _, _) in FIELDS.items()})
    flags = [flag for _, flags, _ in FIELDS.values() for flag in flags]
    assert from_command_line(tmp_path, *flags).fp8_config == python
    launched(monkeypatch, tmp_path, "backend: AO", *(line for _, _, line in FIELDS.values()))
    assert from_command_line(tmp_path).fp8_config == FP8Config.from_launch() == python


def test_nothing_said_is_the_default_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert FP8Config() == FP8Config.from_launch() == arguments(tmp_path).fp8_config
    for lines in ((), ("backend: AO",)):
        launched(monkeypatch, tmp_path, *lines)
        assert FP8Config() == FP8Config.from_launch() == from_command_line(tmp_path).fp8_config


@pytest.mark.parametrize("name", FIELDS)
def test_an_explicit_flag_wins_over_the_launch_config(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, _, line = FIELDS[name]
    launched(monkeypatch, tmp_path, line)
    said = {"skip": ["lm_head"], "amax_history_len": 7}.get(name, getattr(FP8Config(), name))
    expected = FP8Config(**{name: tuple(said) if name == "skip" else said})
    assert arguments(tmp_path, **{f"fp8_{name}": said}).fp8_config == expected
    assert FP8Config.from_launch(**{name: said}) == expected


def test_fp8_false_wins_over_an_fp8_launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launched(monkeypatch, tmp_path, "backend: AO", "recipe: rowwise")
    args = from_command_line(tmp_path, "--fp8", "false")
    assert args.fp8_config == FP8Config(enabled=False, recipe="rowwise")
    assert args.mixed_precision == "bf16"


@pytest.mark.parametrize("name", ["head", "all_gather", "experts"])
@pytest.mark.parametrize(
    ("written", "meant"),
    [("on", "on"), ("off", "off"), ("true", "on"), ("false", "off"), ('"on"', "on"), ("auto", "auto")],
)
def test_yaml_booleans_are_switches(
    name: str, written: str, meant: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert isinstance(yaml.safe_load("on"), bool)  # why this needs a test
    launched(monkeypatch, tmp_path, f"{name}: {written}")
    assert getattr(FP8Config.from_launch(), name) == meant


@pytest.mark.parametrize("name", ["head", "all_gather", "experts"])
@pytest.mark.parametrize("meant", ["on", "off"])
def test_yaml_booleans_are_switches_in_an_arguments_file_too(name: str, meant: str, tmp_path: Path) -> None:
    file = tmp_path / "arguments.yaml"
    file.write_text(f"output_dir: {tmp_path}\nuse_cpu: true\nreport_to: none\nfp8_{name}: {meant}\n")
    (args,) = HfArgumentParser(FP8TrainingArguments).parse_yaml_file(str(file))
    assert args.fp8_config == FP8Config(**{name: meant})


@pytest.mark.parametrize(
    "written",
    [
        '["*.down_proj", lm_head]',
        "'*.down_proj, lm_head'",
        "'*.down_proj,lm_head'",
        "\n    - '*.down_proj'\n    - lm_head",
    ],
)
def test_skip_is_a_yaml_list_or_a_comma_list(
    written: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launched(monkeypatch, tmp_path, f"skip: {written}")
    assert FP8Config.from_launch().skip == ("*.down_proj", "lm_head")


@pytest.mark.parametrize("pattern", ["*.down_proj", "model.layers.0.*", "lm_head", "*"])
def test_skip_of_one_pattern_needs_no_list(
    pattern: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launched(monkeypatch, tmp_path, f'skip: "{pattern}"')
    assert FP8Config.from_launch().skip == (pattern,)


def test_launcher_flags_reach_the_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`--fp8_…` of the launcher itself, and its option for FP8 gather."""
    launched(
        monkeypatch, tmp_path, "backend: AO", "enable_fsdp_float8_all_gather: false", "pad_inner_dim: true"
    )
    assert FP8Config.from_launch() == FP8Config(all_gather="off")
    launched(monkeypatch, tmp_path, "recipe: delayed", flags=["--fp8_amax_history_len", "3"])
    assert FP8Config.from_launch() == FP8Config(recipe="delayed", amax_history_len=3)


def test_options_of_other_backends_are_no_options_of_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The launcher exports its own defaults (margin, interval, format, …) beside what the file says."""
    launched(monkeypatch, tmp_path, "backend: AO", flags=["--fp8_margin", "3", "--fp8_format", "E4M3"])
    assert FP8Config.from_launch() == FP8Config()


# --- the object ----------------------------------------------------------------------------------------------


def test_config_is_frozen_and_hashable() -> None:
    config = FP8Config(skip=["lm_head"])  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.recipe = "rowwise"  # type: ignore[misc]
    assert config == FP8Config(skip=("lm_head",)) and hash(config) == hash(FP8Config(skip=("lm_head",)))
    assert len({config, FP8Config(skip=("lm_head",)), FP8Config()}) == 2
    assert dataclasses.replace(config, recipe="rowwise") == FP8Config(recipe="rowwise", skip=("lm_head",))


# --- arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp8"])
def test_bf16_is_the_compute_dtype_and_keeps_fp8_on(
    bf16: bool, precision: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launched(monkeypatch, tmp_path, "backend: AO", "emulate: true", precision=precision)
    args = arguments(tmp_path, bf16=bf16, fp8_emulate=True)
    assert args.fp8 is True and args.fp8_config == FP8Config(emulate=True)
    assert args.mixed_precision == "bf16"


def test_attribute_set_after_construction_is_honoured(tmp_path: Path) -> None:
    trained = trainer(str(tmp_path), llama(), fp8_recipe="tensorwise")
    assert trained.fp8_report.recipe == "tensorwise"
    args = arguments(tmp_path, fp8_emulate=True)
    args.fp8_recipe = "rowwise"
    args.fp8_skip = ["*.o_proj"]
    assert args.fp8_config == FP8Config(recipe="rowwise", skip=("*.o_proj",), emulate=True)
    late = type(trained)(model=llama(), args=args)
    assert late.fp8_report.recipe == "rowwise"
    assert {row.name.rpartition(".")[2] for row in late.fp8_report.rows if row.reason == "fp8_skip"} == {
        "o_proj"
    }


def test_fp8_switched_off_after_construction_converts_nothing(tmp_path: Path) -> None:
    args = arguments(tmp_path, fp8_emulate=True)
    args.fp8 = False
    assert not args.fp8_config.enabled
    assert not fp8_modules(type(trainer(str(tmp_path), llama()))(model=llama(), args=args).model)


def test_arguments_survive_their_own_dictionary(tmp_path: Path) -> None:
    """As `TrainingArguments.to_dict` and a parser reading it back, which Trainer's own tools do."""
    args = arguments(tmp_path, fp8_recipe="delayed", fp8_skip=["lm_head"], fp8_head="off")
    kept = {name: value for name, value in args.to_dict().items() if name.startswith("fp8")}
    (again,) = HfArgumentParser(FP8TrainingArguments).parse_dict({"output_dir": str(tmp_path), **kept})
    assert again.fp8_config == args.fp8_config


@dataclasses.dataclass
class FP8Seq2SeqArguments(FP8ArgumentsMixin, Seq2SeqTrainingArguments):
    """As a user writes it for TRL's config classes."""


def test_mixin_serves_another_arguments_class_from_the_command_line(tmp_path: Path) -> None:
    command = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--report_to", "none"]
    command += ["--predict_with_generate", "--fp8_recipe", "delayed", "--fp8_skip", "lm_head", "*.wo"]
    command += ["--fp8_emulate", "true", "--torch_compile_regional", "false", "--bf16"]
    (args,) = HfArgumentParser(FP8Seq2SeqArguments).parse_args_into_dataclasses(command)
    assert isinstance(args, Seq2SeqTrainingArguments) and args.predict_with_generate
    assert args.fp8_config == FP8Config(recipe="delayed", skip=("lm_head", "*.wo"), emulate=True)
    assert args.torch_compile_regional is False and args.mixed_precision == "bf16"


def test_boolean_flags_need_no_value(tmp_path: Path) -> None:
    """As the other boolean flags of `TrainingArguments`: `--bf16`."""
    args = from_command_line(tmp_path, "--fp8", "--fp8_emulate", "--fp8_convert_small", "--bf16")
    assert args.fp8_config == FP8Config(emulate=True, convert_small=True)


def test_recipe_choices_are_checked_by_the_parser(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        from_command_line(tmp_path, "--fp8_recipe", "blockwise")
    assert "rowwise_with_gw_hp" in capsys.readouterr().err


# --- Accelerate converts nothing ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["AO", "ao"])
@pytest.mark.parametrize("bf16", [False, True], ids=["", "bf16"])
def test_fp8_launch_config_trains_layers_that_this_package_converted(
    backend: str, bf16: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also with `--bf16` beside it and with the backend in lower case, which Accelerate's own path cannot read."""
    launched(monkeypatch, tmp_path, f"backend: {backend}", "emulate: true", "recipe: rowwise")
    # No flag says fp8: the launch config alone does.
    trained = trainer(str(tmp_path), llama(), bf16=bf16, fp8_emulate=None, fp8_recipe=None, max_steps=1)
    trained.train()
    converted = {row.name for row in trained.fp8_report.converted}
    assert converted and converted == set(fp8_modules(trained.model))
    assert trained.fp8_report.recipe == "rowwise"
    assert not any(isinstance(module, Float8Linear) for module in trained.model.modules())
    assert trained.accelerator.mixed_precision == "bf16"
    assert len(losses(trained)) == 1


@pytest.mark.parametrize("backend", ["AO", "ao"])
def test_accelerator_of_a_plain_loop_converts_nothing(
    backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launched(monkeypatch, tmp_path, f"backend: {backend}")
    keep_accelerate_from_converting()
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    assert accelerator.fp8_backend == "NO"
    model = llama()
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    linears = [module for module in prepared.modules() if isinstance(module, torch.nn.Linear)]
    assert {type(module) for module in linears} == {torch.nn.Linear}


def test_plugin_of_a_plain_loop_takes_the_launch_config(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launched(monkeypatch, tmp_path, "backend: AO", "emulate: true", "recipe: rowwise", "skip: ['*.o_proj']")
    plugin = FP8Plugin()
    accelerator = Accelerator(**plugin.accelerator_kwargs())
    model = llama()
    model, _ = plugin.prepare(accelerator, model, torch.optim.SGD(model.parameters()))
    assert {type(m) for n, m in model.named_modules() if n.endswith("q_proj")} == {FP8Linear}
    assert {type(m) for n, m in model.named_modules() if n.endswith("o_proj")} == {torch.nn.Linear}
    assert accelerator.mixed_precision == "bf16"


def test_fp8_false_under_an_fp8_launch_trains_in_bf16(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launched(monkeypatch, tmp_path, "backend: AO")
    trained = trainer(str(tmp_path), llama(), fp8=False, fp8_emulate=False, max_steps=1)
    trained.train()
    linears = {type(m) for m in trained.model.modules() if isinstance(m, torch.nn.Linear)}
    assert linears == {torch.nn.Linear} and trained.accelerator.mixed_precision == "bf16"
    assert "FP8 is off" in str(trained.fp8_report)


def test_fp8_plugin_off_under_an_fp8_launch_is_bf16(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    launched(monkeypatch, tmp_path, "backend: AO")
    plugin = FP8Plugin(FP8Config(enabled=False))
    accelerator = Accelerator(**plugin.accelerator_kwargs())
    assert (accelerator.mixed_precision, accelerator.fp8_backend) == ("bf16", "NO")


def train_bf16_checkpoint(folder: str, backend: str, bf16: bool) -> dict[str, Any]:
    trained = trainer(folder, bf16_llama(), bf16=bf16, fp8_emulate=True, max_steps=2)
    trained.train()
    model = trained.model
    weights = list(model.parameters())
    return {
        "sharded": isinstance(model, FSDPModule),
        "converted": len(fp8_modules(model)),
        "kinds": {type(w).__name__ for w in weights}
        | {type(w.to_local()) for w in weights if isinstance(w, DTensor)},
        "dtypes": {w.dtype for w in weights},
        "gather": next(note for note in trained.fp8_report.notes if "all-gather" in note),
        "losses": losses(trained),
    }


@pytest.mark.parametrize("bf16", [False, True], ids=["", "bf16"])
def test_bf16_checkpoint_trains_under_the_fsdp2_launch_config_with_fp8_gather(
    ranks: Ranks, bf16: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("ACCELERATE_USE_CPU", "ACCELERATE_TORCH_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    every = launch_environment(CONFIGS / "fsdp2.yaml", "--main_process_port", free_port())
    env = {k: v for k, v in every.items() if k.startswith(("FSDP_", "ACCELERATE_FP8_", "ACCELERATE_MIXED"))}
    for backend in ("AO", "ao") if bf16 else ("AO",):
        env["ACCELERATE_FP8_BACKEND"] = backend
        seen = ranks(train_bf16_checkpoint, str(tmp_path), backend, bf16, fsdp=True, env=env)
        assert seen[0]["losses"] == seen[1]["losses"] and len(seen[0]["losses"]) == 2
        for rank in seen:
            assert rank["sharded"] and rank["converted"] == 14
            assert rank["kinds"] == {"DTensor", torch.Tensor}
            assert rank["dtypes"] == {torch.float32}
            assert rank["gather"] == "FP8 all-gather: all 14 converted weights"
