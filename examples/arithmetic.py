"""What `rl_grpo.py` and `reward_model.py` share: sums to be solved, and the small models that solve or judge them.

A prompt is `3+4=`, its right completion `7`: two digits whose sum is one digit, so that every answer is one token.
"""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig

from text_data import BYTE_VOCABULARY, byte_tokenizer

SUMS = [(a, b) for a in range(10) for b in range(10) if a + b < 10]
PROMPTS = [f"{a}+{b}=" for a, b in SUMS]
ANSWERS = [str(a + b) for a, b in SUMS]


def small_config(**changes: Any) -> LlamaConfig:
    """A byte-level Llama of two layers; every linear layer has a shape that FP8 and its export can hold."""
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings: dict[str, Any] = {
        **sizes,
        "num_key_value_heads": 4,
        "vocab_size": BYTE_VOCABULARY + 16,  # a multiple of 16, with room for <pad> and <eos>
        "max_position_embeddings": 64,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "initializer_range": 0.1,  # large enough to learn from at once
    }
    return LlamaConfig(**settings | changes)
