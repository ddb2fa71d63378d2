"""`accelerate launch` with the files of `accelerate_configs/`: short trainings, one node and two."""

import json
import math
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from launch import accelerate_launch

SCRIPT = Path(__file__).with_name("launched_training.py")
NO_COMPILE = ("--dynamo_backend", "no")


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def launch(folder: Path, config: str, *extra: str, flags: tuple[str, ...] = ()) -> None:
    fsdp = "fsdp" in config or "hsdp" in config
    done = accelerate_launch(
        config, SCRIPT, str(folder / "found"), *flags, extra=(*extra, *NO_COMPILE), fsdp_on_gloo=fsdp
    )
    assert done.returncode == 0, done.stderr[-5000:]


def found(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """What every rank said; all of them trained, and ended with the same losses and weights."""
    every = [json.loads(path.read_text()) for path in sorted(folder.glob("found.[0-9]"))]
    assert len(every) == ranks == len({each["process"] for each in every})
    for each in every:
        assert len(each["losses"]) == 6 and all(map(math.isfinite, each["losses"]))
        assert each["losses"][-1] < each["losses"][0]
        assert each["losses"] == every[0]["losses"] and each["weights"] == every[0]["weights"]
        assert each["converted"] == 15
    return every


def test_cpu_config_trains_in_emulated_fp8(tmp_path: Path) -> None:
    launch(tmp_path, "cpu.yaml")
    (alone,) = found(tmp_path, 1)
    assert not alone["sharded"] and any("emulated FP8" in note for note in alone["notes"])


def test_ddp_config_trains_alike_on_all_ranks(tmp_path: Path) -> None:
    flags = ("--use_cpu", "true", "--fp8_emulate", "true", "--fp8_recipe", "delayed")
    launch(tmp_path, "ddp.yaml", "--num_processes", "2", flags=flags)
    for each in found(tmp_path, 2):
        assert not each["sharded"] and each["rows"] == 128 and each["recipe"] == "delayed"


def test_fsdp2_config_shards_and_trains(tmp_path: Path) -> None:
    launch(tmp_path, "fsdp2.yaml", "--num_processes", "2", flags=("--fp8_emulate", "true"))
    for each in found(tmp_path, 2):
        assert each["sharded"] and each["mesh"] == [2] and each["rows"] == 64
        assert any("FP8 all-gather: all 15 converted weights" in note for note in each["notes"])
        assert any("weights from rank 0" in note for note in each["notes"])


def test_two_nodes_train_one_model_sharded_within_and_replicated_across(tmp_path: Path) -> None:
    """Two launchers over loopback, two ranks each."""
    flags = ["--main_process_ip", "127.0.0.1", "--main_process_port", free_port(), "--num_processes", "4"]
    flags += ["--parallelism_config_dp_shard_size", "2", "--machine_rank"]

    def node(rank: int) -> None:
        launch(tmp_path, "multi_node_hsdp.yaml", *flags, str(rank), flags=("--fp8_emulate", "true"))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(node, range(2)))
    for each in found(tmp_path, 4):
        assert each["sharded"] and each["mesh"] == [2, 2] and each["rows"] == 64
        assert any("sharded over 2x2 ranks" in note for note in each["notes"])
        assert any("FP8 all-gather: all 15 converted weights" in note for note in each["notes"])
