"""The examples run as the README says, and print and write what it says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
METRICS = {
    "loss_first",
    "loss_last",
    "eval_loss",
    "perplexity",
    "fp8_flop_share",
    "tokens_per_second",
    "reload_loss_difference",
    "recipe",
}


def run(script: str, *arguments: str, folder: Path) -> str:
    """Standard output of an example run in `folder`, so that nothing is left in the source tree."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_readme_main_command_is_the_example_without_arguments() -> None:
    readme = (ROOT / "README.md").read_text()
    command = re.search(r"<!-- command: main -->\n```bash\n(.+)\n```", readme)
    assert command is not None
    assert command[1] == "pip install -e . && python examples/train_causal_lm.py"


def test_main_job_learns_real_text_and_its_checkpoint_opens_with_plain_transformers(tmp_path: Path) -> None:
    printed = run("train_causal_lm.py", folder=tmp_path)
    metrics = json.loads((tmp_path / "outputs/train_causal_lm/metrics.json").read_text())
    assert set(metrics) == METRICS
    assert metrics["loss_first"] > 5  # bytes at random: ln 256 = 5.5
    assert metrics["loss_last"] < 3
    assert metrics["eval_loss"] < 3
    assert metrics["fp8_flop_share"] > 0.9
    assert abs(metrics["reload_loss_difference"]) < 0.05
    assert "FP8 share of matmul FLOPs" in printed
    assert "checkpoint reloaded" in printed


def test_main_job_takes_a_text_file_and_a_recipe(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("FP8 has eight bits.\n" * 2000)
    run(
        "train_causal_lm.py",
        *("--train_file", str(text), "--fp8_recipe", "delayed", "--max_steps", "6", "--logging_steps", "2"),
        *("--output_dir", str(tmp_path / "out")),
        folder=tmp_path,
    )
    assert json.loads((tmp_path / "out/metrics.json").read_text())["recipe"] == "delayed"


def test_accelerate_loop_learns_and_saves(tmp_path: Path) -> None:
    printed = run("accelerate_loop.py", "--max_steps", "20", folder=tmp_path)
    first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", printed).groups())  # type: ignore[union-attr]
    assert last < first - 1
    assert (tmp_path / "outputs/accelerate_loop/model.safetensors").exists()
