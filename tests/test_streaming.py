"""Weights streamed out of a model in training: those of save_pretrained, adapters merged, one at a time."""

import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

import models
from gloo import Ranks
from hf_fp8 import FP8Config, FP8Plugin, iter_full_weights
from test_checkpoint import BUILDERS, WORLDS
from test_fsdp2 import HYBRID
from test_peft import KINDS

PLACES: dict[str, dict[str, Any]] = {
    **{name: WORLDS[name] for name in ("one", "ddp", "fsdp2-sharded")},
    "hybrid": {"world_size": 4, "fsdp": True, "env": HYBRID},
}


def prepared(model: nn.Module, *, offload: bool = False, recipe: Any = "tensorwise") -> nn.Module:
    """`model` ready to train, after a forward, which leaves the tail of an FSDP2 model gathered."""

    plugin = FP8Plugin(FP8Config(recipe=recipe, emulate=True))
    sharded = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    accelerator = Accelerator(cpu=not sharded, **plugin.accelerator_kwargs())
    if offload:
        accelerator.state.fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, _ = plugin.prepare(accelerator, model, optimizer)
    assert isinstance(model, FSDPModule) == sharded
    model(input_ids=models.texts(2)[0]["input_ids"][None])
    return model


def streamed(name: str, offload: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    plain = BUILDERS[name]()
    weights = {k: v.clone() for k, v in plain.state_dict().items()}
    return {k: v.clone() for k, v in iter_full_weights(prepared(plain, offload=offload))}, weights


@pytest.mark.parametrize("name", ["tied", "mixtral"])
@pytest.mark.parametrize("place", [*PLACES, "offload"])
def test_streamed_weights_are_what_save_pretrained_writes(
    ranks: Ranks, tmp_path: Path, name: str, place: str
) -> None:
    """Tied weights come once."""
    world = PLACES["fsdp2-sharded" if place == "offload" else place]
    results = ranks(streamed, name, place == "offload", **world)
    plain = BUILDERS[name]()
    plain.save_pretrained(tmp_path)
    stock = load_file(tmp_path / "model.safetensors")
    for found, weights in results:
        plain.load_state_dict(weights)
        assert found.keys() == stock.keys()
        assert all(type(t) is torch.Tensor and torch.equal(t, stock[k]) for k, t in found.items())


# --- adapters ----------------------------------------------------------------------------------------------


def adapted(kind: str, dtype: torch.dtype) -> PeftModel:
    """A base with tied embeddings (untied where the head is trained), one bias, and adapters that do something."""
    tied = kind != "modules_to_save"
    config = LoraConfig(
        r=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False, **KINDS[kind]
    )
    model = models.llama(tie_word_embeddings=tied, attention_bias=True).to(dtype)
    torch.manual_seed(0)
    return get_peft_model(model, config)


def merged_stream(kind: str, dtype: torch.dtype) -> dict[str, Any]:
    model = adapted(kind, dtype)
    stored = {name: p.detach().clone() for name, p in model.named_parameters()}
    model = prepared(model, recipe="delayed")
    found = {
        wanted: {name: t.clone() for name, t in iter_full_weights(model, dtype=wanted)}
        for wanted in (None, torch.float32)
    }
    whole: Any = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    unchanged = all(torch.equal(stored[n].to(p.dtype), p) for n, p in models.whole(whole).items())
    untouched = not any(m.merged for m in whole.modules() if isinstance(m, BaseTunerLayer))
    with whole.disable_adapter():
        base = {name: t.clone() for name, t in iter_full_weights(model, dtype=torch.float32)}
    return {"found": found, "unchanged": unchanged and untouched, "base": base}


@pytest.mark.parametrize(
    ("place", "dtype"),
    [*((place, torch.bfloat16) for place in PLACES), ("fsdp2-sharded", torch.float32)],
    ids=str,
)
def test_adapters_are_merged_in_fp32_under_the_names_of_the_base(
    ranks: Ranks, place: str, dtype: torch.dtype
) -> None:
    """As PEFT merges them into an fp64 copy of the base; the model in training is left as it is."""
    for kind in KINDS if place == "fsdp2-sharded" else ["lora"]:
        expected = adapted(kind, dtype).double().merge_and_unload().state_dict()
        plain = adapted(kind, dtype).unload().state_dict()
        for each in ranks(merged_stream, kind, dtype, **PLACES[place]):
            assert each["unchanged"]
            exact, rounded = each["found"][torch.float32], each["found"][None]
            assert exact.keys() == rounded.keys() == each["base"].keys()
            assert ("lm_head.weight" in exact) == (kind == "modules_to_save")
            assert exact.keys() | {"lm_head.weight"} == expected.keys()
            for name, value in exact.items():
                assert type(value) is torch.Tensor and value.dtype == torch.float32
                torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)
                trained = kind == "modules_to_save" and name == "lm_head.weight"  # has an fp32 master
                assert rounded[name].dtype == (torch.float32 if trained else dtype)
                assert torch.equal(rounded[name], value.to(rounded[name].dtype))
                assert torch.equal(each["base"][name], plain[name].float())
            assert sum(not torch.equal(exact[name], each["base"][name]) for name in exact) == 14


def test_prompts_are_refused() -> None:
    model = get_peft_model(models.llama(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match=r"PREFIX_TUNING adapters.*model\.get_base_model\(\)"):
        next(iter_full_weights(model))


# --- memory ------------------------------------------------------------------------------------------------


class Living:
    """Full tensors that are alive: bytes and number, and the most of each at a time."""

    def __init__(self) -> None:
        self.bytes = self.peak_bytes = self.count = self.peak_count = 0

    def watch(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.untyped_storage().nbytes()
        self._add(size, 1)
        weakref.finalize(tensor, self._add, -size, -1)
        return tensor

    def _add(self, size: int, count: int) -> None:
        self.bytes, self.count = self.bytes + size, self.count + count
        self.peak_bytes, self.peak_count = max(self.peak_bytes, self.bytes), max(self.peak_count, self.count)


def stream_watched(kind: str | None) -> tuple[Living, int, int]:
    """(gathered tensors, bytes of the largest parameter, bytes of all)."""
    plain = models.llama(num_hidden_layers=6, tie_word_embeddings=kind is not None)
    if kind is not None:
        plain = get_peft_model(plain, LoraConfig(r=8, target_modules="all-linear", **KINDS[kind]))
    sizes = [p.numel() * 4 for p in plain.parameters()]
    model = prepared(plain)
    living, gather = Living(), DTensor.full_tensor
    DTensor.full_tensor = lambda self, **kwargs: living.watch(gather(self, **kwargs))  # type: ignore[method-assign]
    try:
        for _, tensor in iter_full_weights(model):
            assert tensor.abs().max() >= 0
    finally:
        DTensor.full_tensor = gather  # type: ignore[method-assign]
    return living, max(sizes), sum(sizes)


@pytest.mark.parametrize("kind", [None, "lora", "dora"])
def test_streaming_holds_one_parameter_beside_the_one_in_hand(ranks: Ranks, kind: str | None) -> None:
    """With adapters: one layer's weight and adapters."""
    for living, largest, everything in ranks(stream_watched, kind, fsdp=True):
        assert living.count == 0
        assert 0 < living.peak_count <= (2 if kind is None else 4)
        assert 0 < living.peak_bytes <= 2 * largest < everything / 4
