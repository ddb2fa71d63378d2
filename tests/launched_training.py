"""Run under `accelerate launch` by test_launch.py: a short training, and what each rank has to say about it.

launched_training.py OUT [FLAGS of FP8TrainingArguments]
"""

import hashlib
import json
import os
import sys

from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import HfArgumentParser

import models
from hf_fp8 import FP8Trainer, FP8TrainingArguments


def main(out: str, flags: list[str]) -> None:
    defaults = ["--output_dir", f"{out}.d", "--max_steps", "6", "--logging_steps", "1", "--report_to", "none"]
    defaults += ["--per_device_train_batch_size", "4", "--save_strategy", "no", "--learning_rate", "1e-2"]
    (args,) = HfArgumentParser(FP8TrainingArguments).parse_args_into_dataclasses([*defaults, *flags])
    model = models.llama()
    trainer = FP8Trainer(model=model, args=args, train_dataset=models.texts(16))
    trainer.train()
    weight = model.model.layers[0].mlp.up_proj.weight
    whole = models.whole(model)
    found = {
        "losses": models.losses(trainer),
        "recipe": trainer.fp8_report.recipe,
        "converted": len(trainer.fp8_report.converted),
        "notes": trainer.fp8_report.notes,
        "sharded": isinstance(trainer.model, FSDPModule),
        "mesh": list(weight.device_mesh.shape) if isinstance(weight, DTensor) else None,
        "rows": (weight.to_local() if isinstance(weight, DTensor) else weight).shape[0],
        "weights": hashlib.sha256(b"".join(w.numpy().tobytes() for w in whole.values())).hexdigest(),
        "process": os.getpid(),
    }
    with open(f"{out}.{os.environ.get('RANK', '0')}", "w") as file:
        json.dump(found, file)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
