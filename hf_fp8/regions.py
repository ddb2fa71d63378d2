"""The repeated blocks of a model: what is checkpointed, compiled and sharded one by one.

A transformer is a stack of equal blocks. Compiling one block serves all of them (one graph, not one per
layer), recomputing one block at a time bounds activation memory, and FSDP2 gathers one block at a time.
Blocks must be found before `fully_shard`, which renames classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache, PreTrainedModel

from hf_fp8.config import FP8Config

Blocks = list[tuple[str, nn.Module]]

# Graphs of one kind of block: training and evaluation, static and dynamic lengths, sliding and full attention.
GRAPHS_PER_KIND = 16


def find_blocks(model: nn.Module) -> Blocks:
    """The repeated blocks of `model`, by name, in order of definition.

    A block is an element of a ModuleList or Sequential whose class the model lists in `_no_split_modules`.
    A model that lists none: the elements of its longest list of equal class.
    """
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    declared = no_split_classes(model)
    blocks = [
        (f"{name}.{index}".lstrip("."), child)
        for name, container in lists
        for index, child in container.named_children()
        if type(child).__name__ in declared
    ]
    if blocks or declared:
        return blocks
    equal = [(name, m) for name, m in lists if len(m) > 1 and len({type(child) for child in m}) == 1]
    if not equal:
        return []
    name, longest = max(equal, key=lambda item: len(item[1]))
    return [(f"{name}.{index}".lstrip("."), child) for index, child in longest.named_children()]


def no_split_classes(model: nn.Module) -> set[str]:
    """Names of the block classes that `model` and the models inside it declare."""
    models = (m for m in model.modules() if isinstance(m, PreTrainedModel))
    return {name for m in models for name in (m._no_split_modules or ())}


def checkpoint_activations(model: nn.Module, blocks: Blocks, *, offload: bool) -> None:
    """Recompute each block in backward instead of keeping its activations.

    `offload`: what a block does save (its input) waits in host memory until backward.

    transformers' own layers do the checkpointing where the model supports it, so that this and Trainer's
    `gradient_checkpointing` are one mechanism; other models get their blocks' `forward` wrapped.
    """
    recompute = partial(_offloaded_checkpoint if offload else checkpoint, use_reentrant=False)
    supported = [
        m for m in model.modules() if isinstance(m, PreTrainedModel) and m.supports_gradient_checkpointing
    ]
    if supported:
        supported[0]._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=recompute)
        return
    if not blocks:
        raise ValueError(
            f"activation checkpointing was asked for, but {type(model).__name__} has no repeated blocks to checkpoint. "
            "Set fsdp_activation_checkpointing: false."
        )
    for _, block in blocks:
        block.forward = partial(recompute, block.forward)


def recompute_blocks(blocks: Blocks) -> ExitStack:
    """Checkpoint those blocks that are not checkpointed anyway, until the returned stack is closed."""
    stack = ExitStack()
    for _, block in blocks:
        if "forward" not in vars(block) and not vars(block).get("gradient_checkpointing"):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
            stack.callback(vars(block).pop, "forward")
    return stack


def _offloaded_checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(function, *args, **kwargs)


def compile_model(
    model: nn.Module,
    blocks: Blocks,
    *,
    regional: bool,
    checkpointed: bool,
    config: FP8Config,
    eager: Callable[[], bool] = lambda: False,
    **options: Any,
) -> str:
    """Compile in place, block by block or as a whole; returns the sentence for the report.

    In place (`module.compile()`), because the wrapper that `torch.compile(module)` makes is called without
    the hooks that `fully_shard` adds later (huggingface/accelerate#4022: 2.4x slower).

    `eager`: while it returns True, calls run as if nothing were compiled.
    `options` go to `torch.compile`: backend, mode, fullgraph, dynamic.
    """
    if config.enabled and config.recipe.startswith("rowwise"):
        # Rowwise scales of a fused RMSNorm differ from eager's otherwise (pytorch/pytorch#150859).
        torch._inductor.config.emulate_precision_casts = True
    if checkpointed:
        # Recomputation must not repeat Python side effects of the forward (pytorch/pytorch#166926).
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    if not regional:
        _compile(model, eager, options)
        return f"compiled as a whole ({options['backend']})"
    if not blocks:
        raise ValueError(
            f"{type(model).__name__} has no repeated blocks to compile one by one. "
            "Pass --torch_compile_regional false to compile the whole model."
        )
    # All modules share one entry to the compiler, hence one limit (8), and past it run eager. T5 needs more.
    graphs = GRAPHS_PER_KIND * len({repr(block) for _, block in blocks})
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, graphs)
    for _, block in blocks:
        _compile(block, eager, options)
    kinds = Counter(type(block).__name__ for _, block in blocks)
    return (
        "compiled by block: "
        + ", ".join(f"{n} {kind}" for kind, n in kinds.items())
        + f" ({options['backend']})"
    )


def without_cache(model: nn.Module) -> None:
    """A KV cache inside a compiled block recompiles it for every layer; training and evaluation need none."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            for config in {id(c): c for c in (module.config, module.config.get_text_config())}.values():
                config.use_cache = False


def _compile(module: nn.Module, eager: Callable[[], bool], options: dict[str, Any]) -> None:
    """`module.compile()`, except that a call with a KV cache, or while `eager()`, runs eagerly.

    Compiled, a cache makes one graph per layer and again per token that `generate` adds.
    """
    module.compile(**options)
    compiled: Any = module._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        cached = any(isinstance(value, Cache) for value in (*args, *kwargs.values()))
        return (module._call_impl if cached or eager() else compiled)(*args, **kwargs)

    module._compiled_call_impl = call
