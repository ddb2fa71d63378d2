"""Persistent gloo ranks on the CPU, for the distributed tests.

Importing torch and transformers takes seconds a process, so the ranks of a world size are started once, on
first use, and then run one function after another. Between two calls a rank forgets what Accelerate,
Dynamo and the last call's environment left behind. Ranks that failed, hung or drifted apart are killed
and started anew for the next call.

    def both_ranks_see_two(x):               # at module level: a function travels by its name
        return dist.get_world_size() + x

    def test_two(ranks):
        assert ranks(both_ranks_see_two, 1) == [3, 3]
"""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState

from fsdp_on_gloo import fsdp_on_gloo

# Seconds that the other ranks get to finish, or to fail too, once one has failed.
GRACE = 30

RANK_ENV = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "ACCELERATE_TORCH_DEVICE": "cpu",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

# What `accelerate launch --config_file accelerate_configs/fsdp2.yaml` exports, less the FP8 and Dynamo part.
FSDP_ENV = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_OFFLOAD_PARAMS": "false",
}


# A rank starts from this, not from what the test that happens to need it first has set.
_AT_START = dict(os.environ)


class RankError(Exception):
    """At least one rank failed; the message holds every failing rank's traceback."""


@dataclass
class Outcome:
    """What one rank has to say after a call."""

    value: Any = None
    error: tuple[str, str] | None = None
    """Type name and message of the exception that `fn` raised."""
    report: str = ""
    """The traceback, or why there is none."""
    position: Any = None
    """Where the rank stands in its process group; None: it cannot go on."""


class Ranks:
    """Runs a function on every rank of a CPU world: the `ranks` fixture."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, bool], _Pool] = {}

    def __call__(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world_size: int = 2,
        fsdp: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float = 240,
    ) -> list[Any]:
        """`fn(*args)` on every rank; returns the results in rank order.

        `fn` is a module-level function; arguments and results are pickled. `env` holds for this call only.
        With `fsdp`, Accelerate takes its FSDP2 path (`FSDP_ENV`, which `env` can override); without it a
        launched CPU run, hence DDP, if the code under test asks for the CPU (`use_cpu=True`). A world of
        one rank is a plain process without a process group, unless `fsdp` asks for one.

        Raises:
            RankError: a rank raised, died, or ran past `timeout` seconds.
        """
        outcomes = self._run(fn, args, world_size, fsdp, env, timeout)
        _raise_unless(outcomes, [not outcome.report for outcome in outcomes], fn)
        return [outcome.value for outcome in outcomes]

    def errors(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world_size: int = 2,
        fsdp: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float = 240,
    ) -> list[tuple[str, str] | None]:
        """As a call, but returns each rank's exception as (type name, message), None where `fn` returned.

        Raises:
            RankError: a rank died, or hung: one that is still running `GRACE` seconds after another raised.
        """
        outcomes = self._run(fn, args, world_size, fsdp, env, timeout)
        _raise_unless(outcomes, [outcome.error is not None or not outcome.report for outcome in outcomes], fn)
        return [outcome.error for outcome in outcomes]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def _run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        world_size: int,
        fsdp: bool,
        env: Mapping[str, str] | None,
        timeout: float,
    ) -> list[Outcome]:
        request = pickle.dumps((fn, args, fsdp, {**(FSDP_ENV if fsdp else {}), **(env or {})}))
        key = world_size, world_size > 1 or fsdp
        # Out of the table while it works: a call that is interrupted leaves nothing half done behind.
        pool = self._pools.pop(key, None) or _Pool(*key)
        try:
            outcomes = pool.call(request, timeout)
        except BaseException:
            pool.kill()
            raise
        if pool.in_step(outcomes):
            self._pools[key] = pool
        else:
            pool.kill()
        return outcomes


class _Pool:
    """The processes of one world."""

    def __init__(self, world_size: int, grouped: bool) -> None:
        env = {**RANK_ENV, "WORLD_SIZE": str(world_size)}
        if grouped:
            # As under torchrun, the store is the parent's: its port is taken before it is announced.
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            env |= {
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "ACCELERATE_USE_CPU": "true",
            }
        self._stacks = tempfile.TemporaryDirectory()
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        context = multiprocessing.get_context("spawn")
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, grouped, str(self._stack_file(rank))), daemon=True
            )
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if grouped else {}
            with environment():  # in place before the rank imports torch
                os.environ.clear()
                os.environ.update({**_AT_START, **env, **place})
                process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def call(self, request: bytes, timeout: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        for rank, connection in enumerate(self._connections):
            try:
                connection.send_bytes(request)
            except BrokenPipeError:
                outcomes[rank] = self._death(rank)
        start = time.monotonic()
        deadline, failed = start + timeout, False
        while pending := [rank for rank in range(len(self._processes)) if rank not in outcomes]:
            if not failed and any(outcome.report for outcome in outcomes.values()):
                failed, deadline = True, min(deadline, time.monotonic() + GRACE)
            ready = wait([self._connections[rank] for rank in pending], max(deadline - time.monotonic(), 0))
            if not ready:
                outcomes |= {rank: self._hang(rank, time.monotonic() - start) for rank in pending}
            for rank in pending:
                if self._connections[rank] in ready:
                    outcomes[rank] = self._receive(rank)
        return [outcomes[rank] for rank in range(len(self._processes))]

    def in_step(self, outcomes: list[Outcome]) -> bool:
        """Whether every rank is alive and all stand at the same point of the same process group."""
        return outcomes[0].position is not None and len({outcome.position for outcome in outcomes}) == 1

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5)
        self.kill()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join()
            connection.close()
        self._stacks.cleanup()

    def _receive(self, rank: int) -> Outcome:
        try:
            return pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            return self._death(rank)
        except Exception as error:
            return Outcome(report=f"sent a result that does not unpickle here: {error!r}")

    def _death(self, rank: int) -> Outcome:
        self._processes[rank].join(5)
        return Outcome(report=f"died with exit code {self._processes[rank].exitcode}")

    def _hang(self, rank: int, seconds: float) -> Outcome:
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        return Outcome(
            report=f"was still running after {seconds:.0f} s, here:\n{self._stack_file(rank).read_text()}"
        )

    def _stack_file(self, rank: int) -> Path:
        return Path(self._stacks.name) / f"rank{rank}"


def _raise_unless(outcomes: list[Outcome], good: list[bool], fn: Callable[..., Any]) -> None:
    failed = [rank for rank, fine in enumerate(good) if not fine]
    if failed:
        # A hang is read beside the exception that caused it.
        shown = [rank for rank, outcome in enumerate(outcomes) if outcome.report]
        reports = [f"--- rank {rank} ---\n{outcomes[rank].report.rstrip()}" for rank in shown]
        raise RankError(
            f"{fn.__qualname__} failed on {failed} of {len(outcomes)} ranks\n" + "\n".join(reports)
        )


@contextmanager
def environment(**changes: str) -> Iterator[None]:
    """`os.environ` with `changes`; afterwards exactly what it was, whatever was set inside."""
    saved = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def _serve(connection: Connection, grouped: bool, stack_file: str) -> None:
    """The life of a rank: one request after another until the pipe closes."""
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        torch.set_num_threads(1)
        if grouped:
            dist.init_process_group("gloo")
        while True:
            try:
                request = connection.recv_bytes()
            except EOFError:
                return
            connection.send_bytes(_answer(request, grouped))


def _answer(request: bytes, grouped: bool) -> bytes:
    try:
        _forget()
        fn, args, fsdp, env = pickle.loads(request)
        with environment(**env), fsdp_on_gloo() if fsdp else nullcontext():
            value = fn(*args)
        return pickle.dumps(Outcome(value=value, position=_position(grouped)))
    except BaseException as error:
        described = type(error).__name__, str(error)
        return pickle.dumps(Outcome(None, described, traceback.format_exc(), _position(grouped)))


def _position(grouped: bool) -> Any:
    if not grouped:
        return "alone"
    if not dist.is_initialized():
        return None
    group = dist.group.WORLD
    assert group is not None
    sent = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return sent, dist.distributed_c10d._world.group_count


def forget_accelerate() -> None:
    """Let the next `Accelerator` or `TrainingArguments` read its surroundings afresh."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _forget() -> None:
    forget_accelerate()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
