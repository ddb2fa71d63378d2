"""Tiny models, their data, and trainers on them, for the tests that train."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    TrainerCallback,
    ViTConfig,
    ViTForImageClassification,
)

from hf_fp8 import FP8Trainer, FP8TrainingArguments

VOCABULARY = 128
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
Data = list[dict[str, Any]]


def llama(**changes: Any) -> LlamaForCausalLM:
    """A decoder, always with the same weights. Its initial weights are large enough to matter in the loss."""
    torch.manual_seed(0)
    settings = {"num_key_value_heads": 2, "vocab_size": VOCABULARY, "initializer_range": 0.1}
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **settings, **changes}))


def bf16_llama(**changes: Any) -> LlamaForCausalLM:
    return llama(**changes).to(torch.bfloat16)


def tied_llama() -> LlamaForCausalLM:
    return llama(tie_word_embeddings=True)


def bert(labels: int = 2) -> BertForSequenceClassification:
    """With one label, it is a regression whose head has one row and one bias."""
    torch.manual_seed(0)
    settings = {"vocab_size": VOCABULARY, "num_labels": labels, "initializer_range": 0.1}
    return BertForSequenceClassification(BertConfig(**{**SIZES, **settings}))


def vit() -> ViTForImageClassification:
    torch.manual_seed(0)
    settings = {"image_size": 16, "patch_size": 4, "num_labels": 2, "initializer_range": 0.1}
    return ViTForImageClassification(ViTConfig(**{**SIZES, **settings}))


def texts(count: int, length: int = 16) -> Data:
    """Random token sequences to predict the next token of."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (count, length), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def labelled_texts(count: int, labels: int = 2) -> Data:
    """Random token sequences with a class each, or a number to predict if there is one label."""
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(0, 2, (count,), generator=generator)
    rows = texts(count)
    return [
        {"input_ids": row["input_ids"], "labels": target.float() if labels == 1 else target}
        for row, target in zip(rows, targets, strict=True)
    ]


def labelled_images(count: int) -> Data:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 3, 16, 16, generator=generator)
    return [{"pixel_values": image, "labels": i % 2} for i, image in enumerate(images)]


def arguments(folder: str, **changes: Any) -> FP8TrainingArguments:
    """Emulated tensorwise FP8 on the CPU, every step logged, examples in the order given, constant learning rate."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "fp8_emulate": True,
        "fp8_recipe": "tensorwise",
    }
    return FP8TrainingArguments(folder, **{**settings, **changes})


def trainer(
    folder: str, model: nn.Module, data: Data | None = None, *, callbacks: Any = None, **changes: Any
) -> FP8Trainer:
    """Not yet trained. `optimizers` in `changes` goes to the trainer, the rest to the arguments."""
    optimizers = changes.pop("optimizers", (None, None))
    data = texts(48) if data is None else data
    return FP8Trainer(
        model=model,
        args=arguments(folder, **changes),
        train_dataset=data,
        eval_dataset=data[:8],
        callbacks=callbacks,
        optimizers=optimizers,
    )


def losses(trained: FP8Trainer) -> list[float]:
    """Of every step so far."""
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters, gathered if they are sharded: call it on every rank."""
    return {name: _gathered(parameter) for name, parameter in model.named_parameters()}


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    parameters = model.named_parameters()
    return {name: _gathered(p.grad) for name, p in parameters if p.grad is not None}


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


class Loaded(TrainerCallback):
    """The weights, and the second moments of those that train, when a resumed training goes on."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.moments: dict[str, torch.Tensor] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self.weights = whole(model)
        for name, p in model.named_parameters():
            if p.requires_grad:
                self.moments[name] = _gathered(optimizer.state[p]["exp_avg_sq"])


def with_nan(model: PreTrainedModel) -> PreTrainedModel:
    """`model` with NaN in every floating-point parameter and buffer, as uninitialised memory may hold."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
    return model
