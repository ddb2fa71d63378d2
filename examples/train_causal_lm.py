"""Train a causal language model in FP8 with `FP8Trainer`, check it and its checkpoint.

    python examples/train_causal_lm.py

With no arguments: a small byte-level Llama with random weights learns the Python standard library's source,
on a CPU with emulated FP8 if there is no FP8 GPU, in about two minutes. For a model and text of your own:

    accelerate launch --config_file accelerate_configs/fsdp2.yaml examples/train_causal_lm.py \
        --model_name_or_path meta-llama/Llama-3.2-1B --train_file notes.txt --block_size 4096 \
        --per_device_train_batch_size 4 --learning_rate 1e-5 --max_steps 1000 --output_dir outputs/llama

At the end: the model in `output_dir`, reloaded with plain `AutoModelForCausalLM` and evaluated again, a
table, and the table's values in `output_dir/metrics.json`.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import torch
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    default_data_collator,
    set_seed,
)

from hf_fp8 import FP8Trainer, FP8TrainingArguments
from runs import fp8_gpu
from text_data import DataArguments, byte_llama, lm_datasets

RELOAD_TOLERANCE = 0.05  # the checkpoint runs without FP8, so its loss differs by the rounding of the GEMMs


@dataclass
class ModelArguments:
    """Which model to train. With none named: a small byte-level Llama with random weights."""

    # HfArgumentParser reads these annotations at run time and knows Optional, not `X | None`, on Python 3.10.
    model_name_or_path: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "Pretrained model to fine-tune: a name on the Hub or a folder."}
    )
    config_name: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "Configuration of a model to train from random weights."}
    )
    tokenizer_name: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "Tokenizer, where it is not the model's or the configuration's own."}
    )


def parse_arguments() -> tuple[ModelArguments, DataArguments, FP8TrainingArguments]:
    """Command-line arguments over the defaults of the small run."""
    parser = HfArgumentParser((ModelArguments, DataArguments, FP8TrainingArguments))
    parser.set_defaults(
        output_dir="outputs/train_causal_lm",
        max_steps=120,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=16,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        logging_steps=10,
        logging_first_step=True,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=torch.cuda.is_available(),
        fp8_emulate=None if fp8_gpu() else True,  # None leaves it to the launch config
        torch_compile=fp8_gpu(),
    )
    return parser.parse_args_into_dataclasses()


def load_model(args: ModelArguments) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """The model, and its tokenizer or None for bytes."""
    source = args.tokenizer_name or args.model_name_or_path or args.config_name
    tokenizer = AutoTokenizer.from_pretrained(source) if source else None
    if args.model_name_or_path:
        return AutoModelForCausalLM.from_pretrained(args.model_name_or_path), tokenizer
    if args.config_name:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.config_name)), tokenizer
    return byte_llama(), tokenizer


@torch.no_grad()
def checkpoint_loss(path: Path, blocks: Dataset, batch_size: int, device: torch.device) -> float:
    """Loss of the saved model, opened by plain transformers and run without FP8."""
    model = AutoModelForCausalLM.from_pretrained(path, device_map={"": device}).eval()
    total = 0.0
    for batch in blocks.iter(batch_size):
        ids = batch["input_ids"].to(device)
        with torch.autocast(device.type, torch.bfloat16):
            total += model(input_ids=ids, labels=ids, use_cache=False).loss.item() * len(ids)
    return total / len(blocks)


def print_table(metrics: dict[str, Any], args: FP8TrainingArguments) -> None:
    difference = metrics["reload_loss_difference"]
    check = "ok" if abs(difference) < RELOAD_TOLERANCE else f"DIFFERS by more than {RELOAD_TOLERANCE}"
    emulated = " (emulated)" if args.fp8_emulate and args.fp8 else ""
    rows = {
        "recipe": f"{metrics['recipe']}{emulated}",
        "loss first / last": f"{metrics['loss_first']:.3f} / {metrics['loss_last']:.3f}",
        "eval loss / perplexity": f"{metrics['eval_loss']:.3f} / {metrics['perplexity']:.2f}",
        "FP8 share of matmul FLOPs": f"{metrics['fp8_flop_share']:.1%}",
        "tokens/s": f"{metrics['tokens_per_second']:,.0f}",
        "checkpoint reloaded": f"eval loss {metrics['eval_loss'] + difference:.3f}, {difference:+.4f}: {check}",
        "saved in": args.output_dir,
    }
    print("\n" + "\n".join(f"{name:<27}{value}" for name, value in rows.items()))


def main() -> None:
    model_args, data_args, args = parse_arguments()
    if args.fp8 and args.fp8_emulate and args.process_index == 0:
        print("Emulating FP8: same numerics as an FP8 GPU, but slow.")
    if not (model_args.model_name_or_path or model_args.config_name):
        args.fp8_convert_small = True  # the small model is here to be checked, not to gain speed
        torch.set_num_threads(1)  # on a CPU, GEMMs this small lose more to waking threads than they gain
    set_seed(args.seed)
    model, tokenizer = load_model(model_args)
    with args.main_process_first(desc="preparing the text"):
        train_blocks, eval_blocks = lm_datasets(data_args, tokenizer)

    trainer = FP8Trainer(
        model=model,
        args=args,
        train_dataset=train_blocks,
        eval_dataset=eval_blocks,
        processing_class=tokenizer,
        data_collator=default_data_collator,  # blocks have one length: nothing to pad
    )
    trained = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    eval_loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()  # on every rank: sharded models are gathered here

    if trainer.is_world_process_zero():
        logs = trainer.state.log_history
        losses = [entry["loss"] for entry in logs if "loss" in entry]
        speeds = [entry["tokens_per_second"] for entry in logs if "tokens_per_second" in entry]
        whole_run = (
            trained.metrics["train_samples_per_second"] * data_args.block_size
        )  # shorter than one log interval
        folder = Path(str(args.output_dir))
        reloaded = checkpoint_loss(folder, eval_blocks, args.per_device_eval_batch_size, args.device)
        metrics = {
            "loss_first": losses[0],
            "loss_last": losses[-1],
            "eval_loss": eval_loss,
            "perplexity": math.exp(eval_loss),
            "fp8_flop_share": trainer.fp8_report.flop_coverage,
            "tokens_per_second": statistics.median(speeds or [whole_run]),
            "reload_loss_difference": reloaded - eval_loss,
            "recipe": args.fp8_recipe if args.fp8 else "bf16",
        }
        (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
        print_table(metrics, args)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
