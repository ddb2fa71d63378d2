"""FSDP1 and compile: dropping the stale gradients of flat parameters.

FSDP1 keeps the parameters of a block in one flat parameter. During a forward, `module.weight` is a view of the
gathered flat parameter, while the gradient of that flat parameter, `weight._base.grad`, is still the *shard* of
the last backward: smaller than the tensor it belongs to. Eager code never looks. Dynamo wraps the base of every
view that it traces and stops (pytorch/pytorch#139110, closed without a fix, still so in torch 2.13):

    attempting to assign a gradient of size '[18496]' to a tensor of size '[36992]'

It happens whenever a block is traced while such a gradient exists: at the first evaluation after an optimizer step,
for evaluation needs graphs of its own, or at a new batch shape, in loops that clear gradients late. Graphs made
before run on. Trainer clears gradients directly after the step; a callback that evaluates before that meets the
error there too.

The cure is manual grad unrolling: drop those gradients before the first forward of each accumulation window and of
each evaluation. Between two micro-batches of a window they are not stale but the sum so far, and must stay. Under
`no_sync` that does no harm, since gradients are whole then. Two things cannot be cured, and are refused: evaluation
inside a window, and compile with `sync_each_batch`, which keeps shards between micro-batches.

Outside a forward the parameters are plain leaves again and `_base` is None (all but those that a forward left
gathered). Clearing their `grad` is enough: FSDP1 drops the flat gradient once no parameter has one.

Can go when FSDP1 does: FSDP2 has no flat parameters (`accelerate to-fsdp2`).
"""

from __future__ import annotations

from torch import nn

from hf_fp8.fsdp1 import has_fsdp1


def unroll_gradients(model: nn.Module) -> None:
    """Drop all gradients of a model under FSDP1; any other model is left alone.

    For loops of your own: call it on the prepared model between `optimizer.step()` and the next forward, in training
    or evaluation, unless `optimizer.zero_grad()` has done as much by then. Never between the micro-batches of one
    optimizer step, whose sum it would drop.
    """
    if not has_fsdp1(model):
        return
    for parameter in model.parameters():
        owner = parameter if parameter._base is None else parameter._base
        owner.grad = None
