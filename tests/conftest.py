"""Fixtures of all tests, and the `gpu` marker."""

import os
import sys
from collections.abc import Iterator

# Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from importlib.metadata import version

import pytest
import torch

from gloo import Ranks, environment, forget_accelerate

# TRL, the extra `trl`, is for Python 3.11 and newer.
collect_ignore = ["test_trl.py", "test_trl_examples.py"] if sys.version_info < (3, 11) else []


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """`ranks(fn, *args, world_size=2, fsdp=False, env=None, timeout=240)`: see `gloo.Ranks`."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def isolated() -> Iterator[None]:
    """What a test, or `TrainingArguments` inside it, exports or sets up in Accelerate ends with the test."""
    with environment():
        yield
    forget_accelerate()


def pytest_report_header() -> str:
    packages = ("torch", "torchao", "accelerate", "transformers", "peft", "datasets")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return f"{', '.join(f'{name} {version(name)}' for name in packages)}, GPU: {gpu}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    capable = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    present = torch.cuda.device_count() if capable else 0
    for item in items:
        if marker := item.get_closest_marker("gpu"):
            needed = marker.args[0] if marker.args else 1
            if present < needed:
                which = "a GPU" if needed == 1 else f"{needed} GPUs"
                item.add_marker(
                    pytest.mark.skip(
                        reason=f"needs {which} of compute capability 8.9 or higher, found {present}"
                    )
                )
