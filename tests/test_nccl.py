"""FSDP2 for real: two GPUs and NCCL, FP8 tensor cores, compiled by Inductor.

Four launches make all the trainings (launched_nccl.py). At the same time: two ranks, one rank, and two ranks that keep
their shards in host memory; then one rank that continues from checkpoints of the first. Each test reads what they
found.

With NCCL_TESTS_ON_GLOO=1 the same runs on CPU ranks, emulated and smaller, in two minutes.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from launch import accelerate_launch
from launched_nccl import CASES, RECIPES, SCALED

on_two_gpus = pytest.mark.gpu(0 if os.environ.get("NCCL_TESTS_ON_GLOO") else 2)

CLOSE = 0.01  # other rounding than the run compared with, for a few steps

SCRIPT = Path(__file__).with_name("launched_nccl.py")
CONTINUED = [f"resume-elsewhere-{name}" for name in SCALED]
ON_TWO = [name for name in CASES if name not in ("offload", *CONTINUED)]
ON_ONE = [name for name in CASES if name.startswith(("recipe-", "tied", "converge-"))]


@dataclass
class Launch:
    ranks: list[dict[str, Any]]
    log: str

    def __getitem__(self, case: str) -> Any:
        """What a case found on rank 0; fails with the errors of all ranks."""
        return self.on_each_rank(case)[0]

    def on_each_rank(self, case: str) -> list[Any]:
        assert self.ranks, f"the launch ended before its first case\n{self.log[-8000:]}"
        every = [rank.get(case, {"error": f"did not run\n{self.log[-8000:]}"}) for rank in self.ranks]
        errors = [f"rank {rank}: {each['error']}" for rank, each in enumerate(every) if "error" in each]
        assert not errors, "\n".join(errors)
        return [each["found"] for each in every]


@dataclass
class Launches:
    two: Launch
    one: Launch
    offloaded: Launch
    continued: Launch


def launch(
    folder: Path,
    label: str,
    config: str,
    cases: list[str],
    *extra: str,
    gpu: bool = torch.cuda.is_available(),
) -> Launch:
    done = accelerate_launch(
        config,
        SCRIPT,
        *(str(folder), label, *cases),
        extra=(*extra, "--dynamo_backend", "no"),
        gpu=gpu,
        fsdp_on_gloo="fsdp" in config and not gpu,
        timeout=300,
    )
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{label}.[0-9]"))]
    for name in cases:
        print(
            f"{label} {name}: {ranks[0][name]['seconds']:.1f} s"
            if ranks and name in ranks[0]
            else f"{label} {name}: -"
        )
    return Launch(ranks, done.stdout + done.stderr)


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    folder = tmp_path_factory.mktemp("nccl")
    alone = "single_gpu.yaml" if torch.cuda.is_available() else "cpu.yaml"
    on_two = ("--num_processes", "2")
    with ThreadPoolExecutor() as pool:
        two = pool.submit(launch, folder, "two", "fsdp2.yaml", ON_TWO, *on_two)
        one = pool.submit(launch, folder, "one", alone, ON_ONE)
        offloaded = pool.submit(launch, folder, "offloaded", "fsdp2_cpu_offload.yaml", ["offload"], *on_two)
        continued = pool.submit(lambda: two.result() and launch(folder, "continued", alone, CONTINUED))
        return Launches(two.result(), one.result(), offloaded.result(), continued.result())


def test_script_of_these_tests_runs_and_a_failed_case_hides_no_other(tmp_path: Path) -> None:
    """On CPU ranks: there is no checkpoint that the first case could continue from."""
    missing, trained = "resume-elsewhere-delayed", "gather-delayed-on"
    found = launch(tmp_path, "two", "fsdp2.yaml", [missing, trained], "--num_processes", "2", gpu=False)
    assert len(found.ranks) == 2
    assert all("checkpoint-3" in rank[missing]["error"] for rank in found.ranks)
    for each in found.on_each_rank(trained):
        assert each["fsdp"] == 2 and falls(each["losses"])


def falls(losses: list[float]) -> bool:
    """Two batches, in turn, are learned by heart: the last of eight losses is that of the second batch."""
    return losses[-1] < 0.9 * losses[1]


@on_two_gpus
@pytest.mark.parametrize("recipe", SCALED)
def test_fp8_gather_starts_with_the_same_loss_and_stays_close(launches: Launches, recipe: str) -> None:
    on, off = (launches.two[f"gather-{recipe}-{way}"] for way in ("on", "off"))
    assert on["fsdp"] == off["fsdp"] == 2
    assert f"FP8 all-gather: all {on['converted']} converted weights" in on["notes"]
    assert f"FP8 all-gather: 0 of {off['converted']} converted weights" in off["notes"]
    assert on["losses"][0] == off["losses"][0]
    assert on["losses"] == pytest.approx(off["losses"], rel=CLOSE) and falls(on["losses"])


@on_two_gpus
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains_alike_on_both_ranks_and_as_on_one(launches: Launches, recipe: str) -> None:
    first, second = launches.two.on_each_rank(f"recipe-{recipe}")
    alone = launches.one[f"recipe-{recipe}"]
    assert first == second and (first["fsdp"], alone["fsdp"]) == (2, 0)
    assert first["converted"] == alone["converted"] > 0
    assert falls(first["losses"])
    assert first["losses"] == pytest.approx(alone["losses"], rel=CLOSE)
    assert first["norms"] == pytest.approx(alone["norms"], rel=0.05)


@on_two_gpus
def test_ranks_share_every_scale(launches: Launches) -> None:
    """Of weights with both recipes, of inputs and gradients with the delayed one."""
    for recipe, kinds in (("tensorwise", 1), ("delayed", 3)):
        first, second = (each["scales"] for each in launches.two.on_each_rank(f"recipe-{recipe}"))
        assert first == second
        assert len(first) == kinds * launches.two[f"recipe-{recipe}"]["converted"]


@on_two_gpus
def test_tied_model_keeps_its_tie_and_trains(launches: Launches) -> None:
    for each in launches.two.on_each_rank("tied"):
        assert each["fsdp"] == 2 and each["tied"] and not each["head_in_fp8"]
        assert falls(each["losses"])
        assert each["losses"] == pytest.approx(launches.one["tied"]["losses"], rel=CLOSE)


@on_two_gpus
def test_offloaded_shards_have_the_gradient_norms_of_shards_on_the_gpu(launches: Launches) -> None:
    on_gpu = launches.two["clipped"]
    for each in launches.offloaded.on_each_rank("offload"):
        assert each["fsdp"] == 2 and each["devices"] == ["cpu"]
        assert min(each["norms"]) > 0.1  # clipping had something to do
        assert each["norms"] == pytest.approx(on_gpu["norms"], rel=0.01)
        assert each["losses"] == pytest.approx(on_gpu["losses"], rel=CLOSE) and falls(each["losses"])


@on_two_gpus
def test_compiled_fsdp1_trains_and_validates_in_turn(launches: Launches) -> None:
    first, second = launches.two.on_each_rank("fsdp1")
    assert first["losses"] == second["losses"] and first["fsdp"] == 1
    assert first["losses"] == pytest.approx(launches.two["recipe-tensorwise"]["losses"], rel=CLOSE)
    assert len(first["evaluations"]) == len(first["losses"]) // 2
    assert first["evaluations"] == sorted(first["evaluations"], reverse=True)


@on_two_gpus
@pytest.mark.parametrize("recipe", SCALED)
def test_resumed_run_repeats_the_uninterrupted_one(launches: Launches, recipe: str) -> None:
    """Bit for bit, if two uninterrupted runs do so; some kernels add in no fixed order."""
    for each in launches.two.on_each_rank(f"resume-{recipe}"):
        whole, again, resumed = (each[name]["losses"] for name in ("whole", "again", "resumed"))
        assert len(set(whole)) == 6
        print(f"{recipe}: two uninterrupted runs are{'' if again == whole else ' not'} the same bit for bit")
        assert resumed == (whole if again == whole else pytest.approx(whole, rel=1e-3))


@on_two_gpus
@pytest.mark.parametrize("recipe", SCALED)
def test_checkpoint_of_two_ranks_continues_on_one(launches: Launches, recipe: str) -> None:
    whole = launches.two[f"resume-{recipe}"]["whole"]["losses"]
    alone = launches.continued[f"resume-elsewhere-{recipe}"]
    assert alone["fsdp"] == 0
    assert alone["losses"][:3] == whole[:3]  # from the checkpoint's own record
    assert alone["losses"][3:] == pytest.approx(whole[3:], rel=CLOSE)


@on_two_gpus
@pytest.mark.parametrize("recipe", SCALED)
def test_hundred_steps_on_two_gpus_end_where_one_gpu_does(launches: Launches, recipe: str) -> None:
    two, one = (where[f"converge-{recipe}"] for where in (launches.two, launches.one))
    assert two["final_loss"] == pytest.approx(one["final_loss"], rel=0.01)
    assert two["eval_loss"] == pytest.approx(one["eval_loss"], rel=0.01)
    assert two["final_loss"] < two["losses"][0] - 0.5
