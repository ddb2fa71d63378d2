"""Where the weights of an export come from: a live model, sharded or not, or a folder of safetensors."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from hf_fp8.checkpoint import full_state_dict, plain_class, unwrap
from hf_fp8.layout import Layout, skeleton, skeleton_of
from hf_fp8.streaming import iter_full_weights

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# What a folder holds beside weights and config.json that users of the model need.
_COMPANIONS = (
    "generation_config.json tokenizer* special_tokens_map.json added_tokens.json vocab* merges.txt *.model *.tiktoken "
    "chat_template* *.jinja *processor_config.json *.py LICENSE* NOTICE*"
).split()


class Source(Protocol):
    """Where the weights come from."""

    cls: type[PreTrainedModel]
    skeleton: PreTrainedModel
    dtype: torch.dtype
    """In which the high-precision model computes."""

    def weights(self, layout: Layout) -> Iterator[tuple[str, Tensor]]:
        """Full weights in the order of `layout.shapes`."""

    def state(self) -> dict[str, Tensor]:
        """The state dict of the high-precision model on the CPU, on rank 0."""

    def save_companions(self, out: Path) -> None:
        """Write what belongs beside weights and `config.json`."""


class ModelSource:
    """A live model; every rank of it takes part in `weights` and `state`."""

    def __init__(self, model: nn.Module, processing_class: Any) -> None:
        self.model = _plain_model(model)
        self.processing_class = processing_class
        self.cls = plain_class(self.model)
        self.skeleton = skeleton_of(self.model)
        fp32 = any(p.dtype == torch.float32 for p in self.model.parameters())
        self.dtype = torch.float32 if fp32 else self.model.dtype

    def weights(self, layout: Layout) -> Iterator[tuple[str, Tensor]]:
        return iter_full_weights(self.model)

    def state(self) -> dict[str, Tensor]:
        return full_state_dict(self.model, {}, keep=is_main())

    def save_companions(self, out: Path) -> None:
        if self.model.can_generate() and self.model.generation_config is not None:
            self.model.generation_config.save_pretrained(out)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(out)


def _plain_model(model: nn.Module) -> PreTrainedModel:
    model = unwrap(model)
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} has PEFT adapters, and an FP8 checkpoint holds one weight a layer. Export what "
            "model.merge_and_unload() returns. If it is sharded, save the adapters and merge them into a freshly "
            "loaded base model."
        )
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"export_fp8 takes a transformers model or a folder, got {type(model).__name__}. Pass the model itself "
            "if this is a wrapper of one."
        )
    quantized = [m for m in model.modules() if vars(m).get("is_quantized")]
    odd = [name for name, p in model.named_parameters() if p.element_size() < 2 or not p.is_floating_point()]
    if quantized or odd:
        raise ValueError(
            f"{type(model).__name__} is quantized already. Export the high-precision model that it was made from."
        )
    return model


class FolderSource:
    """A checkpoint in safetensors, read one tensor at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = _weight_files(folder)
        self.opened = {file: safe_open(folder / file, "pt") for file in set(self.files.values())}
        config = AutoConfig.from_pretrained(folder)
        if vars(config).get("quantization_config") is not None:
            raise ValueError(
                f"{folder} is quantized already (quantization_config in config.json). Export the high-precision "
                "checkpoint that it was made from."
            )
        name = (config.architectures or ["no class"])[0]
        if name not in dir(transformers):
            raise ValueError(
                f"{folder}/config.json names {name} as the class of the model, and transformers has none of that name. "
                "Load the model, and pass it instead of the folder."
            )
        self.cls = getattr(transformers, name)
        self.skeleton = skeleton(self.cls, config)
        self.dtype = config.dtype or torch.float32

    def weights(self, layout: Layout) -> Iterator[tuple[str, Tensor]]:
        self._check_names(layout)
        for name in layout.shapes:
            yield name, self._read(name)

    def state(self) -> dict[str, Tensor]:
        return self.cls.from_pretrained(self.folder, dtype=self.dtype).state_dict()

    def save_companions(self, out: Path) -> None:
        for path in self.folder.iterdir():
            if path.is_file() and any(fnmatch(path.name, pattern) for pattern in _COMPANIONS):
                shutil.copy(path, out)
        templates = self.folder / "additional_chat_templates"
        if templates.is_dir():
            shutil.copytree(templates, out / templates.name)

    def _read(self, name: str) -> Tensor:
        return self.opened[self.files[name]].get_tensor(name)

    def _check_names(self, layout: Layout) -> None:
        """The files hold what this class of model saves. A tied weight may be there twice."""
        tied: dict[str, str] = self.skeleton.all_tied_weights_keys
        unused = (*(self.skeleton._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$")
        faults = [f"lacks {name!r}" for name in layout.shapes if name not in self.files]
        for name in self.files.keys() - layout.shapes.keys():
            source = tied.get(name)
            if source in self.files and not torch.equal(self._read(name), self._read(source)):
                faults.append(f"has another {name!r} than {source!r}, which config.json ties to it")
            elif source not in self.files and not any(re.search(pattern, name) for pattern in unused):
                faults.append(f"has {name!r} besides")
        if faults:
            raise ValueError(
                f"{self.folder} does not hold the tensors that {self.cls.__name__} saves: it {faults[0]}. Load it with "
                "from_pretrained, look at what it reports, and pass the model instead of the folder."
            )


def _weight_files(folder: Path) -> dict[str, str]:
    """Tensor name -> file."""
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{folder} holds PEFT adapters. Load them on their base model, and export what merge_and_unload() returns."
        )
    if (folder / INDEX).is_file():
        return json.loads((folder / INDEX).read_text())["weight_map"]
    if (folder / WEIGHTS).is_file():
        with safe_open(folder / WEIGHTS, "pt") as file:
            return dict.fromkeys(file.keys(), WEIGHTS)
    raise ValueError(
        f"{folder} holds neither {WEIGHTS} nor {INDEX}. Load the model, and pass it instead, or save it with "
        "save_pretrained first."
    )


def is_main() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
