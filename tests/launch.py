"""`accelerate launch` for tests, on CPU ranks or on GPUs."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gloo import RANK_ENV

CONFIGS = Path(__file__).parent.parent / "accelerate_configs"

# `accelerate launch` copies its environment to the ranks and decides nothing about their device: with
# ACCELERATE_USE_CPU they take the CPU and gloo while every FSDP_* and ACCELERATE_* variable of the config
# stays. Its own `--cpu` starts a single process and drops the FSDP part.
CPU_ENV = {**RANK_ENV, "ACCELERATE_USE_CPU": "true"}


def accelerate_launch(
    config_file: str | Path,
    script: str | Path,
    *script_args: str,
    extra: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    fsdp_on_gloo: bool = False,
    gpu: bool = False,
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """`accelerate launch --config_file config_file *extra script *script_args`, with CPU ranks unless `gpu`.

    A config name such as "fsdp2.yaml" is looked up in `accelerate_configs/`. `extra` are launcher flags that
    win over the file, for example `("--num_processes", "2")`. With `fsdp_on_gloo` the ranks shard for
    real where Accelerate would fall back to DDP. The exit code is the caller's to check.
    """
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(CONFIGS / config_file),
    ]
    command += extra
    if "--main_process_port" not in extra:
        command += ["--main_process_port", "0"]  # any free port
    if fsdp_on_gloo:
        command.append(str(Path(__file__).with_name("fsdp_on_gloo.py")))
    command += [str(script), *script_args]
    launcher = subprocess.Popen(
        command,
        env={**os.environ, **({} if gpu else CPU_ENV), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        stdout, stderr = launcher.communicate(timeout=timeout)
    except BaseException:
        launcher.terminate()  # it ends its ranks first; killed at once, it would leave them running
        try:
            launcher.wait(15)
        except subprocess.TimeoutExpired:
            launcher.kill()
        raise
    return subprocess.CompletedProcess(command, launcher.returncode, stdout, stderr)
