"""The test harness itself: what it promises must hold, or other tests pass for the wrong reason."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gloo import RankError, Ranks


def rank_times(factor: int) -> tuple[int, float]:
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    return dist.get_rank() * factor, total.item()


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} says no")
    dist.barrier()


def fail_everywhere() -> None:
    raise ValueError(f"refused on {dist.get_rank()}")


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


def process_id() -> int:
    return os.getpid()


def leak() -> tuple[str | None, str]:
    seen = os.environ.get("LEAK"), str(Accelerator(cpu=True).distributed_type)
    os.environ["LEAKED"] = "1"
    return seen


def leaked() -> bool:
    return "LEAK" in os.environ or "LEAKED" in os.environ


def sharded_model() -> dict[str, object]:
    accelerator = Accelerator()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(1, 8)).sum())
    optimizer.step()
    weight = next(model.parameters())
    assert isinstance(weight, DTensor)
    return {
        "type": accelerator.distributed_type,
        "sharded": isinstance(model, FSDPModule),
        "local": tuple(weight.to_local().shape),
        "backend": dist.get_backend(),
    }


def alone() -> tuple[bool, str, DistributedType]:
    return dist.is_initialized(), os.environ["WORLD_SIZE"], Accelerator().distributed_type


@pytest.mark.parametrize("world_size", [2, 3])
def test_results_come_back_in_rank_order(ranks: Ranks, world_size: int) -> None:
    total = world_size * (world_size + 1) / 2
    expected = [(10 * rank, total) for rank in range(world_size)]
    assert ranks(rank_times, 10, world_size=world_size) == expected


def test_ranks_are_reused(ranks: Ranks) -> None:
    assert ranks(process_id) == ranks(process_id)


def test_failing_rank_is_reported_and_the_pool_recovers(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gloo.GRACE", 3)
    with pytest.raises(
        RankError, match=r"(?s)rank 0 ---.*in fail_on.*rank 1 ---.*in fail_on.*rank 1 says no"
    ):
        ranks(fail_on, 1)
    assert ranks(rank_times, 1) == [(0, 3.0), (1, 3.0)]


def test_hang_and_death_are_reported(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(process_id)
    monkeypatch.setattr("gloo.GRACE", 3)
    with pytest.raises(RankError, match=r"(?s)rank 1 ---\nwas still running after 3 s.*in sleep_on"):
        ranks(sleep_on, 1, timeout=3)
    with pytest.raises(RankError, match="died with exit code 3"):
        ranks(die_on, 0)


def test_refusal_on_all_ranks_is_returned_and_the_pool_stays(ranks: Ranks) -> None:
    before = ranks(process_id)
    assert ranks.errors(fail_everywhere) == [("ValueError", "refused on 0"), ("ValueError", "refused on 1")]
    assert ranks.errors(rank_times, 1) == [None, None]
    assert ranks(process_id) == before


def test_refusal_on_one_rank_only_is_a_hang(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gloo.GRACE", 3)
    with pytest.raises(RankError, match="rank 0 says no"):
        ranks.errors(fail_on, 0)


def test_environment_and_accelerate_state_end_with_the_call(ranks: Ranks) -> None:
    assert ranks(leak, env={"LEAK": "1"}) == [("1", "DistributedType.MULTI_CPU")] * 2
    assert ranks(leaked) == [False, False]


def test_fsdp_shards_for_real_and_only_when_asked(ranks: Ranks) -> None:
    expected = {"type": DistributedType.FSDP, "sharded": True, "local": (4, 8), "backend": "gloo"}
    env = {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "1"}
    assert ranks(sharded_model, fsdp=True, env=env) == [expected, expected]
    assert ranks(leak) == [(None, "DistributedType.MULTI_CPU")] * 2


def test_one_rank_is_a_plain_process(ranks: Ranks) -> None:
    assert ranks(alone, world_size=1) == [(False, "1", DistributedType.NO)]
