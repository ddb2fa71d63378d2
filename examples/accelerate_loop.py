"""FP8 in a training loop of your own: plain Accelerate, with `FP8Plugin`.

    python examples/accelerate_loop.py
    accelerate launch --config_file accelerate_configs/ddp.yaml examples/accelerate_loop.py --recipe rowwise

The same job as `train_causal_lm.py` without Trainer. What FP8 adds to an ordinary Accelerate loop is three
lines: the plugin, its keyword arguments for `Accelerator`, and `plugin.prepare`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import HfArgumentParser, get_cosine_schedule_with_warmup

from hf_fp8 import FP8Config, FP8Plugin
from runs import fp8_gpu
from text_data import DataArguments, byte_llama, lm_datasets


@dataclass
class LoopArguments:
    """Options of the loop."""

    # HfArgumentParser reads these annotations at run time and knows Optional, not `X | None`, on Python 3.10.
    recipe: Optional[str] = field(  # noqa: UP045
        default=None, metadata={"help": "FP8 recipe; without it the launch config's, or the default."}
    )
    max_steps: int = field(default=60, metadata={"help": "Optimizer steps."})
    batch_size: int = field(default=16, metadata={"help": "Blocks in a micro-batch of one process."})
    gradient_accumulation_steps: int = field(
        default=2, metadata={"help": "Micro-batches in an optimizer step."}
    )
    learning_rate: float = field(default=3e-3, metadata={"help": "Peak learning rate."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Gradients are clipped to this norm."})
    output_dir: str = field(default="outputs/accelerate_loop", metadata={"help": "Where the model is saved."})
    seed: int = field(default=42, metadata={"help": "Seed of weights and data order."})


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> float:
    """Mean loss over the held-out blocks of all processes."""
    model.eval()
    losses = []
    for batch in loader:
        loss = model(**batch, use_cache=False).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
    model.train()
    return torch.cat(losses).mean().item()


def main() -> None:
    args, data_args = HfArgumentParser((LoopArguments, DataArguments)).parse_args_into_dataclasses()
    config = FP8Config.from_launch(
        recipe=args.recipe,
        emulate=None if fp8_gpu() else True,
        convert_small=True,  # the small model is here to be checked, not to gain speed
    )
    plugin = FP8Plugin(config)
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps, **plugin.accelerator_kwargs()
    )
    set_seed(args.seed)
    with accelerator.main_process_first():
        train_blocks, eval_blocks = lm_datasets(data_args)
    train_loader = DataLoader(train_blocks, batch_size=args.batch_size, shuffle=True, drop_last=True)
    eval_loader = accelerator.prepare(DataLoader(eval_blocks, batch_size=args.batch_size))

    torch.set_num_threads(1)  # on a CPU, GEMMs this small lose more to waking threads than they gain
    model = byte_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model, optimizer, train_loader = plugin.prepare(accelerator, model, optimizer, train_loader)
    schedule = get_cosine_schedule_with_warmup(optimizer, args.max_steps // 10, args.max_steps)

    model.train()
    steps, losses = 0, []
    bar = tqdm(total=args.max_steps, disable=not accelerator.is_main_process)
    while steps < args.max_steps:
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
            if accelerator.sync_gradients:
                schedule.step()
                steps += 1
                bar.update()
                bar.set_postfix(loss=f"{losses[-1]:.3f}")
            if steps == args.max_steps:
                break
    bar.close()

    eval_loss = evaluate(accelerator, model, eval_loader)
    state_dict = accelerator.get_state_dict(model)  # on every rank: sharded models are gathered here
    accelerator.unwrap_model(model).save_pretrained(
        args.output_dir, is_main_process=accelerator.is_main_process, state_dict=state_dict
    )
    accelerator.print(
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, eval loss {eval_loss:.3f}, saved in {args.output_dir}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
