"""`examples/matrix.py` under the launch configs that it names: FSDP1 / FSDP2 x FP8 x compile x offload."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gloo import Ranks
from launch import CONFIGS
from test_launch_configs import free_port, launch_environment

EXAMPLES = Path(__file__).parent.parent / "examples"
SIZE = ["--shape", "tiny", "--layers", "1", "--seq", "32", "--batch", "2", "--warmup", "1", "--steps", "2"]
CELLS = ["--precisions", "bf16", "tensorwise", "--compile", "no", "eager"]


def run_matrix(folder: str) -> dict[str, dict[str, Any]]:
    sys.path.insert(0, str(EXAMPLES))
    import matrix

    return matrix.main([*SIZE, *CELLS, "--output_dir", folder])


@pytest.mark.parametrize("name", ["fsdp1", "fsdp2", "fsdp2_cpu_offload"])
def test_every_cell_trains_and_evaluates_under_its_launch_config(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    exported = launch_environment(CONFIGS / f"{name}.yaml", "--main_process_port", free_port())
    env = {key: value for key, value in exported.items() if key.startswith(("ACCELERATE_", "FSDP_"))}
    env |= {"ACCELERATE_USE_CPU": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}
    if name == "fsdp1":  # broadcasts at wrapping, for which Accelerate looks for a GPU
        env |= {"FSDP_SYNC_MODULE_STATES": "false", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
    results = ranks(run_matrix, str(tmp_path), fsdp=True, env=env)
    assert results[0].keys() == results[1].keys() and len(results[0]) == 4
    losses = results[0]["bf16, eager"]["losses"]
    for cell, found in results[0].items():
        notes = "\n".join(found["notes"])
        assert ("FSDP1" in notes) == (name == "fsdp1") and ("FSDP2: " in notes) == (name != "fsdp1")
        assert ("parameters on CPU" in notes) == (name == "fsdp2_cpu_offload")
        assert ("compiled by block" in notes) == ("compiled" in cell)
        assert found["converted"] == (0 if "bf16" in cell else 7)
        assert found["losses"] == pytest.approx(losses, rel=0.02)
        assert len(found["evaluations"]) == 4 and found["evaluations"][-1] < found["evaluations"][0]
        assert 0 < found["optimizer"] < found["step"]
    assert json.loads((tmp_path / f"{name}.json").read_text())["cells"].keys() == results[0].keys()
