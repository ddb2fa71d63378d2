"""Every file in `accelerate_configs/` loads and reaches the ranks as the environment that it promises."""

import socket
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

from hf_fp8.config import FP8Config
from launch import CONFIGS

COMPILED = {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "True"}
FSDP2 = {
    **COMPILED,
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
}
EXPECTED: dict[str, Mapping[str, str]] = {
    "cpu.yaml": {"ACCELERATE_USE_CPU": "True", "ACCELERATE_DYNAMO_BACKEND": "NO"},
    "single_gpu.yaml": {**COMPILED, "ACCELERATE_USE_CPU": "False", "CUDA_VISIBLE_DEVICES": "0"},
    "ddp.yaml": COMPILED,
    "fsdp2.yaml": FSDP2,
    "fsdp2_cpu_offload.yaml": {**FSDP2, "FSDP_OFFLOAD_PARAMS": "true"},
    "fsdp1.yaml": {
        **FSDP2,
        "FSDP_VERSION": "1",
        "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
        "FSDP_USE_ORIG_PARAMS": "true",
        "FSDP_SYNC_MODULE_STATES": "true",
    },
    "multi_node_hsdp.yaml": {
        **FSDP2,
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "8",
        "PARALLELISM_CONFIG_TP_SIZE": "1",
        "PARALLELISM_CONFIG_CP_SIZE": "1",
    },
}


def launch_environment(config: Path, *flags: str) -> dict[str, str]:
    """What `accelerate launch --config_file config *flags` would put into the environment of its ranks."""
    args = launch_command_parser().parse_args(["--config_file", str(config), *flags, "train.py"])
    args, _, _ = _validate_launch_command(args)
    if args.use_fsdp or args.multi_gpu:  # as `launch_command` decides
        return prepare_multi_gpu_env(args)
    return prepare_simple_launcher_cmd_env(args)[1]


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.fixture(autouse=True)
def launched_from_a_gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    # Accelerate 1.16 turns gpu_ids into the variable of the accelerator that torch was built for.
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    for name in ("ACCELERATE_USE_CPU", "ACCELERATE_USE_FSDP", "ACCELERATE_TORCH_DEVICE"):
        monkeypatch.delenv(name, raising=False)


def test_no_config_is_left_untested() -> None:
    assert {path.name for path in CONFIGS.iterdir()} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_config_says_when_to_pick_it(name: str) -> None:
    first = (CONFIGS / name).read_text().splitlines()[0]
    assert first.startswith("# ") and len(first) > 40


@pytest.mark.parametrize("name", EXPECTED)
def test_config_loads_and_asks_for_fp8(name: str) -> None:
    config = load_config_from_file(str(CONFIGS / name))
    assert config.mixed_precision == "fp8"
    assert config.fp8_config["backend"] == "AO"
    if config.parallelism_config:
        sizes = config.parallelism_config
        nodes, gpus = (sizes[f"parallelism_config_{dim}_size"] for dim in ("dp_replicate", "dp_shard"))
        assert (nodes, nodes * gpus) == (config.num_machines, config.num_processes)


@pytest.mark.parametrize("name", EXPECTED)
def test_environment_of_the_ranks(name: str) -> None:
    seen = launch_environment(CONFIGS / name, "--main_process_port", free_port())
    expected = {
        **EXPECTED[name],
        "ACCELERATE_MIXED_PRECISION": "fp8",
        "ACCELERATE_FP8_BACKEND": "AO",
    }
    assert {key: seen.get(key) for key in expected} == expected
    for feature in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"):
        assert (feature in seen) == (feature in expected)


@pytest.mark.parametrize("name", EXPECTED)
def test_environment_reads_back_as_the_fp8_config(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in launch_environment(CONFIGS / name, "--main_process_port", free_port()).items():
        monkeypatch.setenv(key, value)
    assert FP8Config.from_launch() == FP8Config(emulate=name == "cpu.yaml")
