"""The benchmarks and the convergence series run in a short form, and count what they say they count."""

import json
from pathlib import Path

import pytest

from launch import accelerate_launch
from test_examples import ROOT, run


@pytest.mark.parametrize(
    ("script", "arguments", "written"),
    [
        ("benchmark.py", ("--modes", "bf16", "ours:delayed", "loop:delayed"), "benchmark.json"),
        ("benchmark_linear.py", (), "benchmark_linear.json"),
        ("benchmark_experts.py", ("--runs", "bf16", "delayed"), "benchmark_experts.json"),
    ],
)
def test_benchmarks_run_on_a_cpu(
    tmp_path: Path, script: str, arguments: tuple[str, ...], written: str
) -> None:
    output = tmp_path / written
    run(script, "--smoke", *arguments, "--output", str(output), folder=tmp_path)
    assert json.loads(output.read_text())["environment"]["torch"]


def test_benchmark_under_accelerate_launch_counts_what_every_mode_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    modes = [
        "bf16",
        "ours:delayed",
        "ours:delayed,fsdp_reshard_after_forward=false",
        "ours:delayed,fsdp_none=1",
    ]
    done = accelerate_launch(
        *("fsdp2.yaml", ROOT / "examples" / "benchmark.py"),
        *("--smoke", "--dtype", "float32", "--output", "found.json", "--modes", *modes),
        extra=("--num_processes", "2"),
        fsdp_on_gloo=True,
    )
    assert done.stdout.count("MB gathered") == 1  # rank 0 alone prints
    bf16, freed, kept, failed = json.loads(Path("found.json").read_text())["modes"].values()
    assert done.returncode == 1 and "fsdp_none: no option of this launch" in failed["error"]
    # Elements of the tiny Llama. Of two ranks each sends its half.
    linear, norms, table = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128), 4 * 64, 256 * 64
    tail = 2 * (table + 64)  # head and last norm, gathered once
    assert bf16["gathered_bytes"] * 2 == 2 * (2 * linear + 2 * norms + 2 * table) + tail
    tail -= table  # the head as FP8
    assert freed["gathered_bytes"] * 2 == 2 * (linear + 2 * norms + 2 * table) + tail
    assert kept["gathered_bytes"] * 2 == linear + 2 * norms + 2 * table + tail
    everything = linear + norms + 2 * table + 64
    assert bf16["reduced_bytes"] * 2 == 2 * everything  # gradients in bf16
    assert freed["reduced_bytes"] * 2 == kept["reduced_bytes"] * 2 == 4 * everything  # in fp32
    assert kept["loss_last"] == freed["loss_last"]


def test_a_mixture_of_experts_converges_as_in_bf16(tmp_path: Path) -> None:
    arguments = ("--moe", "--smoke", "--runs", "bf16", "delayed", "--output_dir", str(tmp_path))
    run("convergence.py", *arguments, folder=tmp_path)
    runs = json.loads((tmp_path / "convergence.json").read_text())["runs"]
    assert runs["delayed"]["fp8_flop_share"] > 0.7  # of so small a model; without its experts 0.44
    assert abs(runs["delayed"]["difference"]) < 0.005


def test_convergence_compares_every_recipe_with_bf16(tmp_path: Path) -> None:
    printed = run("convergence.py", "--smoke", "--output_dir", str(tmp_path), folder=tmp_path)
    runs = json.loads((tmp_path / "convergence.json").read_text())["runs"]
    assert list(runs) == ["bf16", "bf16#2", "tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"]
    assert all(abs(run["difference"]) < 0.005 for run in runs.values())
    assert (tmp_path / "convergence.png").exists()
    assert "within" in printed
