"""Fixtures of all tests, and the `gpu` marker."""

import os
from collections.abc import Iterator

# Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from importlib.metadata import version

import pytest
import torch

from gloo import Ranks, environment, forget_accelerate


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
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU of compute capability 8.9 or higher"))
