"""Train a critic in FP8: a reward model that tells right sums from wrong ones, with TRL's RewardTrainer.

    python examples/reward_model.py                                # half a minute on a CPU, in emulated FP8
    python examples/reward_model.py --fp8 false                    # the same in bf16
    accelerate launch --config_file accelerate_configs/fsdp2.yaml examples/reward_model.py

Pairs are a right and a wrong answer to one sum; a fifth of them is held out. The score layer stays in high
precision. At the end the model is saved, opened with plain transformers, and asked for the score of every answer:
a sum counts as solved if the right answer scores highest. Writes `metrics.json` beside the model.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from datasets import Dataset
from transformers import HfArgumentParser, LlamaForSequenceClassification, PrinterCallback, set_seed
from trl import RewardConfig, RewardTrainer

from arithmetic import ANSWERS, PROMPTS, small_config
from hf_fp8 import FP8ArgumentsMixin, FP8TrainerMixin
from runs import fp8_gpu, print_rows
from text_data import byte_tokenizer


class FP8RewardTrainer(FP8TrainerMixin, RewardTrainer):
    """Training of a reward model in FP8."""


class FP8RewardConfig(FP8ArgumentsMixin, RewardConfig):
    """Its arguments."""


def parse() -> FP8RewardConfig:
    """Command-line arguments over the defaults of the small run."""
    parser = HfArgumentParser(FP8RewardConfig)
    parser.set_defaults(
        output_dir="outputs/reward_model",
        max_steps=150,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=32,
        learning_rate=1e-3,
        warmup_steps=10,
        gradient_checkpointing=False,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        fp8_emulate=None if fp8_gpu() else True,  # None leaves it to the launch config
        fp8_convert_small=True,  # the small model is here to be checked, not to gain speed
    )
    (args,) = parser.parse_args_into_dataclasses()
    return args


def pairs() -> Dataset:
    """Every right answer with each of the nine wrong ones."""
    return Dataset.from_list(
        [
            {"prompt": prompt, "chosen": answer, "rejected": str(wrong)}
            for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)
            for wrong in range(10)
            if str(wrong) != answer
        ]
    )


@torch.no_grad()
def solved(folder: Path) -> float:
    """Share of all sums whose right answer the saved model scores highest, run without FP8."""
    model = LlamaForSequenceClassification.from_pretrained(folder, dtype="float32").eval()
    tokenizer = byte_tokenizer()
    texts = [f"{prompt}{digit}<eos>" for prompt in PROMPTS for digit in range(10)]
    scores = model(**tokenizer(texts, return_tensors="pt")).logits.view(len(PROMPTS), 10)
    return (scores.argmax(-1) == torch.tensor([int(answer) for answer in ANSWERS])).float().mean().item()


def main() -> None:
    args = parse()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # GEMMs this small lose more to waking threads than they gain
    set_seed(args.seed)
    parts = pairs().train_test_split(test_size=0.2, seed=0)
    trainer = FP8RewardTrainer(
        model=LlamaForSequenceClassification(small_config(num_labels=1)),
        args=args,
        train_dataset=parts["train"],
        eval_dataset=parts["test"],
        processing_class=byte_tokenizer(),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    evaluation = trainer.evaluate()
    trainer.save_model()  # on every rank: sharded models are gathered here
    if trainer.is_world_process_zero():
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        metrics = {
            "loss_first": logs[0]["loss"],
            "loss_last": logs[-1]["loss"],
            "accuracy_first": logs[0]["accuracy"],
            "accuracy_last": logs[-1]["accuracy"],
            "eval_accuracy": evaluation["eval_accuracy"],
            "sums_solved": solved(Path(str(args.output_dir))),
            "fp8_layers": len(trainer.fp8_report.converted),
        }
        Path(str(args.output_dir), "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
        print_rows(
            tuple(metrics), [tuple(f"{v:.3f}" if isinstance(v, float) else str(v) for v in metrics.values())]
        )
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
