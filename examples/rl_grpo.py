"""Reinforcement learning in FP8: TRL's GRPO on an actor that learns to add, with the reward curves of FP8 and bf16.

    python examples/rl_grpo.py                                # two minutes on a CPU, in emulated FP8
    python examples/rl_grpo.py --runs fp8 --rollout fp8       # FP8 weights on the rollout side, too
    accelerate launch --config_file accelerate_configs/fsdp2.yaml examples/rl_grpo.py --runs fp8

First an actor is made that knows the format of an answer and little of its value: supervised training on sums of
which 40 % are right. From its checkpoint each run trains with GRPO. A completion earns 1 if it is right and 0.2 if
it is one digit. Completions come from a rollout side of its own, which gets the actor's weights before each update,
as an inference engine would.

Writes `rl_grpo.json`, `rl_grpo.png` and each run's actor into `output_dir`.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from datasets import Dataset
from torch import Tensor
from transformers import HfArgumentParser, LlamaForCausalLM, PrinterCallback, set_seed
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from arithmetic import ANSWERS, PROMPTS, small_config
from hf_fp8 import FP8ArgumentsMixin, FP8TrainerMixin, iter_full_weights, quantize_weights, rollout_layout
from runs import clean_start, environment, fp8_gpu, print_rows
from text_data import byte_tokenizer

SHARE_RIGHT = 0.4
BLOCK = 128  # of the FP8 format


class FP8SFTTrainer(FP8TrainerMixin, SFTTrainer):
    """Supervised training in FP8."""


class FP8SFTConfig(FP8ArgumentsMixin, SFTConfig):
    """Its arguments."""


class FP8GRPOTrainer(FP8TrainerMixin, GRPOTrainer):
    """GRPO in FP8."""


class FP8GRPOConfig(FP8ArgumentsMixin, GRPOConfig):
    """Its arguments."""


@dataclass
class Arguments:
    """What to run, beside TRL's and the FP8 flags."""

    runs: list[str] = field(
        default_factory=lambda: ["bf16", "fp8"], metadata={"help": "Runs to compare: bf16, fp8."}
    )
    rollout: Literal["bf16", "fp8"] = field(
        default="bf16", metadata={"help": "Weights that the rollout side gets."}
    )
    sft_steps: int = field(default=300, metadata={"help": "Supervised steps before GRPO."})

    def __post_init__(self) -> None:
        if unknown := set(self.runs) - {"bf16", "fp8"}:
            raise ValueError(f"--runs {min(unknown)} is not known. Use bf16 and fp8.")


def parse() -> tuple[Arguments, FP8GRPOConfig]:
    """Command-line arguments over the defaults of the small run; new objects each time."""
    parser = HfArgumentParser((Arguments, FP8GRPOConfig))
    parser.set_defaults(
        output_dir="outputs/rl_grpo",
        max_steps=150,
        per_device_train_batch_size=128,
        num_generations=16,
        max_completion_length=2,  # a digit and the end
        learning_rate=2e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        reward_weights=[1.0, 0.2],
        gradient_checkpointing=False,
        logging_steps=1,
        logging_nan_inf_filter=False,  # a NaN must show
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        fp8_emulate=None if fp8_gpu() else True,  # None leaves it to the launch config
        fp8_convert_small=True,  # the small model is here to be checked, not to gain speed
    )
    return parser.parse_args_into_dataclasses()


# --- reward -------------------------------------------------------------------------------------------------


def right(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    """1 for the sum."""
    return [float(text == true) for text, true in zip(completions, answer, strict=True)]


def well_formed(completions: list[str], **kwargs: Any) -> list[float]:
    """1 for a digit and nothing else."""
    return [float(len(text) == 1 and text.isdigit()) for text in completions]


# --- rollouts -----------------------------------------------------------------------------------------------


class Rollout:
    """The rollout side: a plain bf16 model without FP8 or sharding, fed as an inference engine is."""

    def __init__(self, kind: str, tokenizer: Any) -> None:
        self.model = LlamaForCausalLM(small_config()).to(torch.bfloat16).eval()
        self.kind, self.tokenizer = kind, tokenizer
        self.layout: Any = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over every weight, high-precision or FP8 with the scale of each block after it."""
        parameters = self.model.state_dict()
        stored: Tensor | None = None
        for name, tensor in weights:
            if name.endswith("_scale_inv"):
                assert stored is not None
                scale = tensor.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
                parameters[name.removesuffix("_scale_inv")].copy_(stored.float() * scale)
            elif tensor.dtype == torch.float8_e4m3fn:
                stored = tensor
            else:
                parameters[name].copy_(tensor)

    def __call__(self, prompts: list[str], trainer: FP8GRPOTrainer) -> dict[str, Any]:
        """TRL's `rollout_func`: completions by the actor as it is now. On all ranks."""
        if self.kind == "fp8":
            self.layout = self.layout or rollout_layout(trainer.model)
            self.load_weights(quantize_weights(iter_full_weights(trainer.model), self.layout))
        else:
            self.load_weights(iter_full_weights(trainer.model, dtype=torch.bfloat16))
        self.model.to(trainer.accelerator.device)
        inputs = self.tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt").to(
            trainer.accelerator.device
        )
        texts = self.model.generate(**inputs, generation_config=trainer.generation_config)
        completions = [self._until_end(row) for row in texts[:, inputs["input_ids"].shape[1] :].tolist()]
        return {
            "prompt_ids": self.tokenizer(prompts)["input_ids"],
            "completion_ids": completions,
            "logprobs": None,
        }

    def _until_end(self, ids: list[int]) -> list[int]:
        end = self.tokenizer.eos_token_id
        return ids[: ids.index(end) + 1] if end in ids else ids


# --- training -----------------------------------------------------------------------------------------------


def supervise(args: Arguments, rl: FP8GRPOConfig, folder: Path) -> None:
    """Write the actor that every run starts from."""
    flags = {name: value for name, value in vars(rl).items() if name.startswith("fp8")}
    chance = random.Random(rl.seed)
    texts = [
        (prompt, answer if chance.random() < SHARE_RIGHT else str(chance.randrange(10)))
        for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)
        for _ in range(16)
    ]
    config = FP8SFTConfig(
        output_dir=str(folder),
        max_steps=args.sft_steps,
        per_device_train_batch_size=32,
        learning_rate=2e-3,
        gradient_checkpointing=False,
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=rl.use_cpu,
        dataloader_pin_memory=rl.dataloader_pin_memory,
        seed=rl.seed,
        **flags,
    )
    set_seed(rl.seed)
    trainer = FP8SFTTrainer(
        model=LlamaForCausalLM(small_config()),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": p, "completion": c} for p, c in texts]),
        processing_class=byte_tokenizer(),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()


def reinforce(run: str, args: Arguments, rl: FP8GRPOConfig, start: Path) -> dict[str, Any]:
    """One run from the checkpoint `start`; its record for the JSON file."""
    rl.fp8 = run == "fp8"
    tokenizer = byte_tokenizer()
    trainer = FP8GRPOTrainer(
        model=str(start),
        reward_funcs=[right, well_formed],
        args=rl,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS, "answer": ANSWERS}),
        processing_class=tokenizer,
        rollout_func=Rollout(args.rollout, tokenizer),
    )
    trainer.remove_callback(PrinterCallback)
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    trainer.save_model(str(Path(str(rl.output_dir), run)))
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    rewards = [entry["reward"] for entry in logs]
    answers = [entry["rewards/right/mean"] for entry in logs]
    window = max(1, len(logs) // 10)
    return {
        "fp8_layers": len(trainer.fp8_report.converted),
        "reward_first": statistics.fmean(rewards[:window]),
        "reward_last": statistics.fmean(rewards[-window:]),
        "right_first": statistics.fmean(answers[:window]),
        "right_last": statistics.fmean(answers[-window:]),
        "seconds": seconds,
        "rewards": [round(reward, 4) for reward in rewards],
    }


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """The reward of every step, faint, and its running mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for index, (name, run) in enumerate(runs.items()):
        rewards, window = torch.tensor(run["rewards"]), max(1, len(run["rewards"]) // 15)
        axis.plot(range(1, len(rewards) + 1), rewards, color=f"C{index}", alpha=0.2, linewidth=1)
        mean = rewards.unfold(0, window, 1).mean(-1)
        label = f"{name}: {run['reward_last']:.3f} at the end"
        axis.plot(range(window, len(rewards) + 1), mean, color=f"C{index}", linewidth=1.5, label=label)
    axis.set_xlabel("update")
    axis.set_ylabel("mean reward (at most 1.2)")
    axis.legend()
    figure.suptitle("GRPO on sums of two digits: reward of an FP8 and of a bf16 actor")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> None:
    args, rl = parse()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # GEMMs this small lose more to waking threads than they gain
    folder = Path(str(rl.output_dir))
    main_process, world_size = rl.process_index == 0, rl.world_size
    supervise(args, rl, folder / "sft")
    runs: dict[str, dict[str, Any]] = {}
    for run in args.runs:
        clean_start()
        runs[run] = reinforce(run, *parse(), start=folder / "sft")
    if not main_process:
        return
    record = {"environment": environment(), "processes": world_size, "rollout": args.rollout, "runs": runs}
    (folder / "rl_grpo.json").write_text(json.dumps(record) + "\n")
    header = ("run", "FP8 layers", "reward first", "last", "right first", "last", "seconds")
    keys = ("reward_first", "reward_last", "right_first", "right_last")
    rows = [
        (name, str(run["fp8_layers"]), *(f"{run[key]:.3f}" for key in keys), f"{run['seconds']:.0f}")
        for name, run in runs.items()
    ]
    print_rows(header, rows)
    if find_spec("matplotlib") is None:
        print("The curves are in rl_grpo.json. To draw them: pip install matplotlib (the extra `plot`).")
    else:
        draw(runs, folder / "rl_grpo.png")


if __name__ == "__main__":
    main()
