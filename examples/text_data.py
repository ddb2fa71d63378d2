"""What the examples share: text as blocks of tokens, and the small byte-level Llama that reads it.

Without further arguments the text is the Python standard library's own source, already on every machine:
files in sorted order, mixed by a fixed seed, every tenth one held out. A token is a byte, so the vocabulary
is 256 and no tokenizer is needed. With `--dataset_name` or `--train_file` the text comes through
`datasets`, tokenised when a tokenizer is given and as bytes otherwise.
"""

from __future__ import annotations

import random
import sysconfig
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

BYTE_VOCABULARY = 256
SEPARATOR = b"\0"  # ends a file: the one byte that source text does not contain
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}
_TESTS = {"test", "tests", "idle_test"}
_FORMATS = {".txt": "text", ".md": "text", ".py": "text", ".json": "json", ".jsonl": "json", ".csv": "csv"}


@dataclass
class DataArguments:
    """Which text to train on. With none named: the standard library's source, as bytes."""

    # HfArgumentParser reads these annotations at run time and knows Optional, not `X | None`, on Python 3.10.
    dataset_name: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "Dataset to load through `datasets`, e.g. Salesforce/wikitext."}
    )
    dataset_config_name: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "Configuration of the dataset, e.g. wikitext-2-raw-v1."}
    )
    train_file: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "Own text: a .txt, .json, .jsonl or .csv file."}
    )
    validation_file: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "Held-out text; without it a share of the training text is held out."}
    )
    validation_split_percentage: int = field(
        default=5, metadata={"help": "Share that is held out where the data has no validation split."}
    )
    block_size: int = field(default=128, metadata={"help": "Tokens in a training example."})
    max_train_blocks: Optional[int] = field(  # noqa: UP045
        default=None, metadata={"help": "Keep at most this many training blocks."}
    )
    max_eval_blocks: int = field(default=64, metadata={"help": "Keep at most this many evaluation blocks."})
    max_bytes: int = field(default=2_000_000, metadata={"help": "Bytes of standard library source to read."})
    include_tests: bool = field(
        default=False, metadata={"help": "Read the standard library's test suites too."}
    )


def stdlib_files(include_tests: bool = False) -> list[Path]:
    """The standard library's `.py` files, in sorted order.

    Raises:
        FileNotFoundError: this Python has no source files (a zipped or compiled-only standard library).
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = _NOT_STDLIB if include_tests else _NOT_STDLIB | _TESTS
    files = sorted(p for p in root.rglob("*.py") if not skipped.intersection(p.relative_to(root).parts[:-1]))
    if not files:
        raise FileNotFoundError(
            "This Python ships no standard library source. Pass --train_file or --dataset_name."
        )
    return files


def stdlib_texts(
    max_bytes: int | None = None, include_tests: bool = False
) -> tuple[list[bytes], list[bytes]]:
    """Source files for training and for evaluation, split by file, together about `max_bytes` long.

    Every text ends in `SEPARATOR`.
    """
    files = stdlib_files(include_tests)
    random.Random(0).shuffle(files)
    train: list[bytes] = []
    held_out: list[bytes] = []
    total = 0
    for index, path in enumerate(files):
        if max_bytes is not None and total >= max_bytes:
            break
        text = path.read_bytes() + SEPARATOR
        (held_out if index % 10 == 0 else train).append(text)
        total += len(text)
    return train, held_out


def stdlib_tensors(
    max_bytes: int | None = None, include_tests: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same texts, each side joined into one uint8 tensor, for loops that cut their own blocks."""

    def tensor(texts: list[bytes]) -> torch.Tensor:
        return torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)

    train, held_out = stdlib_texts(max_bytes, include_tests)
    return tensor(train), tensor(held_out)


def lm_datasets(
    args: DataArguments, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[Dataset, Dataset]:
    """Training and evaluation blocks: columns `input_ids` and `labels`, each `(block_size,)` int64.

    Args:
        tokenizer: turns text into tokens; None reads the text as bytes.
    """
    texts = _raw_texts(args)
    column = "text" if "text" in texts["train"].column_names else texts["train"].column_names[0]

    def encode(batch: dict[str, list]) -> dict[str, list]:
        if tokenizer is not None:
            return {"input_ids": tokenizer(batch[column])["input_ids"]}
        return {
            "input_ids": [list(text if isinstance(text, bytes) else text.encode()) for text in batch[column]]
        }

    def group(batch: dict[str, list]) -> dict[str, list]:
        tokens = list(chain.from_iterable(batch["input_ids"]))
        whole = len(tokens) // args.block_size * args.block_size
        blocks = [tokens[i : i + args.block_size] for i in range(0, whole, args.block_size)]
        return {"input_ids": blocks, "labels": blocks}

    def blocks(split: str, limit: int | None) -> Dataset:
        raw = texts[split]
        tokens = raw.map(encode, batched=True, remove_columns=raw.column_names, desc=f"Encoding {split} text")
        grouped = tokens.map(group, batched=True, desc=f"Grouping {split} text into blocks")
        if len(grouped) == 0:
            raise ValueError(
                f"The {split} text is shorter than one block. Give more text or a smaller --block_size."
            )
        stride = 1 if limit is None else max(1, len(grouped) // limit)  # from all over the text
        return grouped.select(range(0, len(grouped), stride)[:limit]).with_format("torch")

    return blocks("train", args.max_train_blocks), blocks("validation", args.max_eval_blocks)


def _raw_texts(args: DataArguments) -> DatasetDict:
    """Splits `train` and `validation` of raw text."""
    # Here, not at the top: the scripts that use only `stdlib_tensors` run without `datasets`.
    from datasets import Dataset, DatasetDict, load_dataset

    if args.dataset_name is not None:
        loaded = load_dataset(args.dataset_name, args.dataset_config_name)
    elif args.train_file is not None:
        files = {"train": args.train_file}
        if args.validation_file is not None:
            files["validation"] = args.validation_file
        suffix = Path(args.train_file).suffix
        if suffix not in _FORMATS:
            raise ValueError(f"--train_file has the suffix {suffix!r}. Use one of: {', '.join(_FORMATS)}.")
        options = {"keep_linebreaks": True} if _FORMATS[suffix] == "text" else {}
        loaded = load_dataset(_FORMATS[suffix], data_files=files, **options)
    else:
        train, held_out = stdlib_texts(args.max_bytes, args.include_tests)
        return DatasetDict(
            train=Dataset.from_dict({"text": train}), validation=Dataset.from_dict({"text": held_out})
        )
    if "validation" not in loaded:
        split = loaded["train"].train_test_split(args.validation_split_percentage / 100, seed=0)
        loaded = DatasetDict(train=split["train"], validation=split["test"])
    return loaded


def byte_llama(
    hidden_size: int = 192,
    intermediate_size: int = 512,
    layers: int = 3,
    heads: int = 3,
    positions: int = 2048,
) -> LlamaForCausalLM:
    """A Llama over bytes with random fp32 weights; seed torch before the call."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=BYTE_VOCABULARY,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=positions,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
    )


def byte_mixtral(
    hidden_size: int, intermediate_size: int, layers: int, heads: int, positions: int
) -> MixtralForCausalLM:
    """The same with eight experts a layer, two of which work on a token, each a quarter as wide."""
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=BYTE_VOCABULARY,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size // 4,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            num_local_experts=8,
            num_experts_per_tok=2,
            output_router_logits=True,  # with the loss that keeps experts evenly used
            max_position_embeddings=positions,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Each byte of UTF-8 text a token, and after the 256 of them `<pad>` and `<eos>`."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def _byte_characters() -> list[str]:
    """The characters that stand for the bytes 0 to 255: a printable one is its own, the others follow from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    following = count(256)
    return [chr(byte if byte in printable else next(following)) for byte in range(256)]
