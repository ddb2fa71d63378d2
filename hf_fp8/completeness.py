"""Whether a checkpoint is whole: a mark that is set first to "being written" and last to a list of all files.

A process can be killed at any moment of a save, and what it leaves must neither be taken for a checkpoint nor
stand in the way of the one before it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open

logger = logging.getLogger(__name__)

MARK = "fp8_checkpoint.json"
_TEXT = (".json", ".txt", ".md", ".jinja", ".py", ".yaml")


def begin_checkpoint(folder: str | Path) -> None:
    """Mark a folder as being written, and clear what an earlier run left in the same place. On one rank."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write_mark(folder, None)
    for path in folder.iterdir():
        if re.match(
            r"(adapter_)?model[-.]|pytorch_model|optimizer|rng_state|fp8_(scaling|masters)", path.name
        ):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def finish_checkpoint(folder: str | Path) -> None:
    """Mark a folder as whole: everything in it was written, on all ranks. On one rank."""
    folder = Path(folder)
    paths = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(MARK)]
    _write_mark(folder, {path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(paths)})


def _write_mark(folder: Path, files: dict[str, int] | None) -> None:
    scratch = folder / f"{MARK}.tmp"
    scratch.write_text(json.dumps({"files": files}, indent=1))
    os.replace(scratch, folder / MARK)


def check_checkpoint(folder: str | Path) -> None:
    """Refuse a checkpoint that was cut off.

    Those of this package are compared with their mark; others must have files that open.

    Raises:
        ValueError: naming the first file at fault.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"There is no checkpoint folder {folder}.")
    if (folder / MARK).is_file():
        files = json.loads((folder / MARK).read_text())["files"]
        if files is None:
            raise ValueError(f"{folder} is not whole: its process ended while it was being written ({MARK}).")
        for name, size in files.items():
            path = folder / name
            found = path.stat().st_size if path.is_file() else 0
            text = path.suffix in _TEXT and path.is_file() and _opens(path)  # people edit these
            if found != size and not text:
                raise ValueError(f"{folder} is not whole: {name} has {found:,} of {size:,} bytes.")
        return
    if not (folder / "trainer_state.json").is_file():
        raise ValueError(f"{folder} is not whole: trainer_state.json, which is written last, is missing.")
    for path in sorted(folder.iterdir()):
        if path.is_file() and not _opens(path):
            raise ValueError(f"{folder} is not whole: {path.name} cannot be read, it is cut off.")
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        if (folder / name).is_dir() and not (folder / name / ".metadata").is_file():
            raise ValueError(f"{folder} is not whole: {name}/.metadata, which is written last, is missing.")


def _opens(path: Path) -> bool:
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt"):
                pass
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.name.startswith(("pytorch_model", "optimizer", "scheduler", "adapter_model", "rng_state")):
            return zipfile.is_zipfile(path)  # its directory is at the end
    except (SafetensorError, ValueError):
        return False
    return True


def newest_whole_checkpoint(folder: str | Path) -> str | None:
    """The newest `checkpoint-<step>` that is whole; warns of newer ones that are not. None if there is none at all.

    Raises:
        ValueError: there are checkpoints, and not one is whole.
    """
    found = {int(m[1]): p for p in Path(folder).iterdir() if (m := re.fullmatch(r"checkpoint-(\d+)", p.name))}
    faults = []
    for _, path in sorted(found.items(), reverse=True):
        try:
            check_checkpoint(path)
        except ValueError as error:
            faults.append(str(error))
            logger.warning("%s Looking for an older checkpoint.", error)
        else:
            return str(path)
    if faults:
        raise ValueError(f"No checkpoint in {folder} is whole. " + " ".join(faults))
    return None
