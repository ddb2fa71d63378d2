"""A dozen architectures: trained in FP8, evaluated, saved, and opened by plain transformers again."""

import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

import models
from gloo import Ranks, forget_accelerate
from hf_fp8 import FP8Config, FP8Trainer
from hf_fp8.linear import fp8_modules
from hf_fp8.regions import compile_model, find_blocks, without_cache
from hf_fp8.selection import convert, select
from test_trainer import stock_arguments

IMAGE = models.VOCABULARY - 1  # token that stands for a part of an image
NOT_LOGITS = [
    "image_outputs",
    "image_hidden_states",
    "encoder_last_hidden_state",
    "router_logits",
    "past_key_values",
]
ROUTERS = {"router": 2}
SHAPES = {**models.SIZES, "vocab_size": models.VOCABULARY, "initializer_range": 0.1}
GROUPED = {**SHAPES, "num_key_value_heads": 2, "head_dim": 16}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION = {**models.SIZES, "image_size": 16, "patch_size": 8}


@dataclass(frozen=True)
class Architecture:
    settings: dict[str, Any]
    """Of its config."""
    converted: int
    """Modules in FP8."""
    kept: dict[str, int]
    """Reason -> number of modules in high precision."""
    task: Any = AutoModelForCausalLM
    data: str = "text"
    unused: set[str] = field(default_factory=set)
    """Parameters without influence on the loss."""
    graphs: int = 1
    """Compiled, for all kinds of blocks."""
    splits: int = 0
    """Graphs more than blocks in one forward."""


ARCHITECTURES = {
    "llama": Architecture(GROUPED, 14, {"output head (fp8_head=auto)": 1}),
    "qwen3": Architecture(GROUPED, 14, {"output head (fp8_head=auto)": 1}),
    "mistral": Architecture({**GROUPED, "sliding_window": 8}, 14, {"output head (fp8_head=auto)": 1}),
    "gemma": Architecture({**GROUPED, "pad_token_id": 0}, 14, {"tied to an embedding": 1}),
    "phi": Architecture(SHAPES, 12, {"output head (fp8_head=auto)": 1}),
    "gpt2": Architecture(
        {
            "n_embd": 64,
            "n_head": 4,
            "n_layer": 2,
            "n_positions": 64,
            "vocab_size": models.VOCABULARY,
            **TOKENS,
        },
        8,
        {"tied to an embedding": 1},
    ),
    "mixtral": Architecture(
        {**GROUPED, "num_local_experts": 4}, 12, {"output head (fp8_head=auto)": 1, **ROUTERS}
    ),
    "qwen3_moe": Architecture(
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        12,
        {"output head (fp8_head=auto)": 1, **ROUTERS},
    ),
    "bert": Architecture(SHAPES, 13, {"task head": 1}, AutoModelForSequenceClassification, "labelled text"),
    "t5": Architecture(
        {
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": models.VOCABULARY,
            "pad_token_id": 0,
            "decoder_start_token_id": 0,
        },
        32,
        {"tied to an embedding": 1},
        AutoModelForSeq2SeqLM,
        graphs=4,  # first and other blocks, of encoder and decoder
    ),
    "vit": Architecture(
        {**models.SIZES, "initializer_range": 0.1, "image_size": 16, "patch_size": 4},
        12,
        {"not convertible: Conv2d": 1, "task head": 1},
        AutoModelForImageClassification,
        "image",
    ),
    # The features of the first of two vision layers go into the language model.
    "llava": Architecture(
        {
            "vision_config": {"model_type": "clip_vision_model", **VISION},
            "text_config": {"model_type": "llama", **GROUPED},
            "image_token_index": IMAGE,
            "image_seq_length": 4,
        },
        28,
        {"not convertible: Conv2d": 1, "output head (fp8_head=auto)": 1},
        AutoModelForImageTextToText,
        "image and text",
        unused={"model.vision_tower.encoder.layers.1.", "model.vision_tower.post_layernorm."},
        # transformers records hidden states by hooks, where the compiler splits each of the two vision layers in three.
        graphs=4,
        splits=4,
    ),
}


def build(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    chosen = ARCHITECTURES[name]
    return chosen.task.from_config(AutoConfig.for_model(name, **chosen.settings))


def examples(kind: str, count: int = 24) -> models.Data:
    if kind == "labelled text":
        return models.labelled_texts(count)
    if kind == "image":
        return models.labelled_images(count)
    rows = models.texts(count)
    for row, image in zip(rows, models.labelled_images(count), strict=True):
        ids = row["input_ids"] = row["input_ids"].clamp(min=3, max=IMAGE - 1)
        row["labels"] = ids
        if kind == "image and text":
            row["input_ids"] = torch.cat([ids[:1], torch.full((4,), IMAGE), ids[5:]])
            row["labels"] = torch.where(row["input_ids"] == IMAGE, -100, ids)
            row["pixel_values"] = image["pixel_values"]
    return rows


@dataclass
class Facts:
    """What a process has to say about one architecture."""

    sharded: bool
    differing: set[str]
    """Parameters and buffers that were not those of rank 0's model before the first step."""
    unchanged: set[str]
    """Parameters that training did not change."""
    losses: list[float]
    evaluation: float
    loss: torch.Tensor
    """As the model returns it."""
    logits: torch.Tensor
    """Of the evaluation data."""
    weights: dict[str, torch.Tensor]
    converted: int
    kept: dict[str, int]
    tied: int
    """How often a parameter is reachable under a second name."""


def train(folder: str, name: str, rank0_loads: bool = False) -> Facts:
    model, data = build(name), examples(ARCHITECTURES[name].data)
    initial = copies(model.state_dict())
    buffers = copies(dict(model.named_buffers()))
    if rank0_loads and dist.get_rank():
        models.with_nan(model)
    trainer = models.trainer(folder, model, data)
    trainer._fp8_prepare()
    prepared = {**gathered(model), **dict(model.named_buffers())}
    trainer.train()
    trainer.save_model(folder)
    logits = trainer.predict(trainer.eval_dataset, ignore_keys=NOT_LOGITS).predictions
    weights = gathered(model)
    with torch.no_grad():
        loss = trainer.model(**batch_of(data)).loss
    return Facts(
        sharded=isinstance(model, FSDPModule),
        differing={n for n, t in {**initial, **buffers}.items() if not torch.equal(t, prepared[n])},
        unchanged={n for n, _ in model.named_parameters() if torch.equal(weights[n], initial[n])},
        losses=models.losses(trainer),
        evaluation=trainer.evaluate()["eval_loss"],
        loss=loss,
        logits=torch.from_numpy(logits),
        weights=weights,
        converted=len(fp8_modules(model)),
        kept=dict(Counter(row.reason for row in trainer.fp8_report.rows if not row.converted)),
        tied=len(weights) - len(list(model.parameters())),
    )


def batch_of(data: models.Data) -> dict[str, torch.Tensor]:
    """The first eight examples."""
    return {key: torch.stack([torch.as_tensor(row[key]) for row in data[:8]]) for key in data[0]}


def copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict, whole. Call it on every rank."""
    return {name: models._gathered(tensor) for name, tensor in model.state_dict().items()}


def check(each: Facts, name: str, folder: Path) -> None:
    expected = ARCHITECTURES[name]
    assert not each.differing
    assert each.converted == expected.converted and each.kept == expected.kept
    assert all(n.startswith(tuple(expected.unused or ["-"])) for n in each.unchanged)
    assert each.logits.isfinite().all()
    assert each.loss.dtype == torch.float32 and each.loss != each.loss.bfloat16()  # a grid of 1/64 near 5
    assert len(each.losses) == 3 and each.evaluation < each.losses[0]
    # Whoever opens the files gets the same weights, and about the same logits without FP8.
    model = expected.task.from_pretrained(folder)
    plain = model.state_dict()
    assert plain.keys() == each.weights.keys()
    assert all(torch.equal(plain[n], weight) for n, weight in each.weights.items())
    assert len(plain) - len(list(model.parameters())) == each.tied
    with torch.no_grad():
        logits = model(**batch_of(examples(expected.data))).logits
    # With experts, a token at the border between two goes to another one.
    tolerance = 0.3 if ROUTERS.keys() <= expected.kept.keys() else 0.15
    error = torch.linalg.vector_norm(logits - each.logits) / torch.linalg.vector_norm(logits)
    assert error < tolerance


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_trains_evaluates_saves_and_loads_in_one_process(tmp_path: Path, name: str) -> None:
    each = train(str(tmp_path), name)
    check(each, name, tmp_path)
    # FP8 on the loaded weights gives the very loss of the trained model.
    again = FP8Trainer(
        model=ARCHITECTURES[name].task.from_pretrained(tmp_path),
        args=models.arguments(str(tmp_path)),
        eval_dataset=examples(ARCHITECTURES[name].data)[:8],
    )
    assert again.evaluate()["eval_loss"] == each.evaluation


def train_all(folder: str, rank0_loads: bool) -> dict[str, Facts | str]:
    """An architecture that fails says so and leaves the others alone; it fails on all ranks or hangs."""
    results: dict[str, Facts | str] = {}
    for name in ARCHITECTURES:
        forget_accelerate()
        try:
            results[name] = train(f"{folder}/{name}", name, rank0_loads)
        except Exception:
            results[name] = traceback.format_exc()
    return results


Trained = tuple[list[dict[str, Facts | str]], Path]


@pytest.fixture(scope="module", params=["rank-0-loads", "each-rank-loads"])
def trained(
    ranks: Ranks, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    """Every architecture after FSDP2 training on two ranks, in one call."""
    folder = tmp_path_factory.mktemp("architectures")
    rank0_loads = request.param == "rank-0-loads"
    env = {
        "FSDP_CPU_RAM_EFFICIENT_LOADING": str(rank0_loads).lower(),
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT" if rank0_loads else "SHARDED_STATE_DICT",
    }
    return ranks(train_all, str(folder), rank0_loads, fsdp=True, env=env), folder


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_trains_evaluates_saves_and_loads_when_sharded(trained: Trained, name: str) -> None:
    """Where rank 0 loads, the other ranks' models held NaN: what they have now came from rank 0, buffers included."""
    results, folder = trained
    for each in (result[name] for result in results):
        assert isinstance(each, Facts), each
        assert each.sharded
        check(each, name, folder / name)
        assert each.losses == results[0][name].losses  # type: ignore[union-attr]


def loaded_over_meta(folder: str) -> dict[str, set[str] | str]:
    """Of each architecture, the parameters and buffers that differ from a model of one process after prepare."""
    differing: dict[str, set[str] | str] = {}
    for name in ARCHITECTURES:
        forget_accelerate()
        expected = build(name)
        with torch.device("meta" if dist.get_rank() else "cpu"):
            model = build(name)
        trainer = models.trainer(folder, model, examples(ARCHITECTURES[name].data))
        try:
            trainer._fp8_prepare()
        except Exception:
            differing[name] = traceback.format_exc()
            continue
        assert isinstance(model, FSDPModule)
        found = {**gathered(model), **dict(model.named_buffers())}
        reference = {**expected.state_dict(), **dict(expected.named_buffers())}
        differing[name] = {key for key, tensor in reference.items() if not torch.equal(found[key], tensor)}
        if found.keys() - reference.keys() - {k for k in found if ".fp8_" in k} or any(
            tensor.is_meta for tensor in (*model.parameters(), *model.buffers())
        ):
            differing[name] = {*differing[name], "not filled"}
    return differing


def test_ranks_that_hold_nothing_get_every_parameter_and_buffer_from_rank_0(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Non-persistent buffers (rotary frequencies, position ids) are in no state dict; ties must survive."""
    env = {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    for differing in ranks(loaded_over_meta, str(tmp_path), fsdp=True, env=env):
        assert differing == {name: set() for name in ARCHITECTURES}


# --- logged loss -------------------------------------------------------------------------------------------


def three_losses(folder: str, names: list[str]) -> dict[str, list[float]]:
    """The first loss of the stock Trainer, of ours, and of ours without averaging over the tokens of all ranks."""
    found: dict[str, list[float]] = {}
    for name in names:
        data = examples(ARCHITECTURES[name].data)
        stock = TrainingArguments(**stock_arguments(folder, max_steps=1))
        theirs = Trainer(model=build(name), args=stock, train_dataset=data)
        theirs.train()
        found[name] = models.losses(theirs)  # type: ignore[arg-type]
        for average in (True, False):
            flags = {"max_steps": 1, "average_tokens_across_devices": average}
            ours = models.trainer(folder, build(name), data, **flags)
            ours.train()
            found[name] += models.losses(ours)
    return found


def test_models_that_ignore_the_token_count_log_the_losses_of_the_stock_trainer(
    ranks: Ranks, tmp_path: Path
) -> None:
    """T5 and BERT take Trainer's token count and make nothing of it, Trainer multiplies by the number of ranks."""
    for found in ranks(three_losses, str(tmp_path), ["t5", "bert"]):
        for name, (stock, ours, apart) in found.items():
            assert ours == pytest.approx(stock, rel=0.05), name
            assert apart == pytest.approx(ours / 2, rel=0.05), name


# --- compile -----------------------------------------------------------------------------------------------


def test_four_kinds_of_blocks_compile_for_all_lengths_and_modes() -> None:
    """T5 has two kinds of blocks in the encoder and two in the decoder; the compiler would give up after 8 graphs."""
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("eager")
    model, config = build("t5"), FP8Config(recipe="tensorwise", emulate=True)
    convert(model, select(model, config), config)
    blocks = find_blocks(model)
    compile_model(
        model, blocks, regional=True, checkpointed=False, config=config, backend=backend, dynamic=None
    )
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for length in (16, 12, 20, 9, 31):
            ids = torch.randint(3, models.VOCABULARY, (2, length))
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            with torch.no_grad():
                model.eval()(input_ids=ids, labels=ids, use_cache=False)
            model.train()
    assert len(blocks) == 4 and backend.frame_count == 16


class Graphs:
    """Backend that counts the graphs made, and the graphs run."""

    def __init__(self) -> None:
        self.made = self.run = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        self.made += 1

        def run(*args: Any) -> Any:
            self.run += 1
            return graph(*args)

        return run


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_blocks_of_one_kind_share_one_graph_and_none_runs_eager(name: str) -> None:
    torch._dynamo.reset()
    backend, expected = Graphs(), ARCHITECTURES[name]
    model, config = build(name), FP8Config(recipe="tensorwise", emulate=True)
    convert(model, select(model, config), config)
    blocks = find_blocks(model)
    options = {"regional": True, "checkpointed": False, "config": config, "dynamic": None}
    compile_model(model, blocks, backend=backend, **options)  # type: ignore[arg-type]
    without_cache(model)
    rows = examples(expected.data, 2)
    batch = {key: torch.stack([torch.as_tensor(row[key]) for row in rows]) for key in rows[0]}
    for step in (1, 2):
        model(**batch).loss.backward()
        assert backend.made == expected.graphs
        assert backend.run == step * (len(blocks) + expected.splits)
