"""The examples that need TRL run in a short form, and reach what they are for."""

import json
from pathlib import Path

from test_examples import run


def test_grpo_raises_the_reward_in_fp8_as_in_bf16(tmp_path: Path) -> None:
    arguments = ("--sft_steps", "80", "--max_steps", "30", "--learning_rate", "1e-3", "--rollout", "fp8")
    printed = run("rl_grpo.py", *arguments, "--output_dir", str(tmp_path), folder=tmp_path)
    runs = json.loads((tmp_path / "rl_grpo.json").read_text())["runs"]
    assert {name: record["fp8_layers"] for name, record in runs.items()} == {"bf16": 0, "fp8": 14}
    for record in runs.values():
        assert len(record["rewards"]) == 30
        assert record["reward_last"] > record["reward_first"] + 0.3
    assert abs(runs["fp8"]["reward_last"] - runs["bf16"]["reward_last"]) < 0.2
    assert (tmp_path / "rl_grpo.png").exists() and (tmp_path / "fp8" / "model.safetensors").exists()
    assert "reward first" in printed


def test_a_reward_model_tells_right_from_wrong_after_it_was_saved(tmp_path: Path) -> None:
    run("reward_model.py", "--max_steps", "60", "--output_dir", str(tmp_path), folder=tmp_path)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["fp8_layers"] == 14
    assert metrics["accuracy_first"] < 0.7 and metrics["eval_accuracy"] > 0.95
    assert metrics["sums_solved"] > 0.9
