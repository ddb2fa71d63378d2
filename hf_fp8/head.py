"""LM head and loss as one compiled region.

transformers computes logits and loss outside the blocks, eagerly. With a vocabulary of 128k that is a chain of
memory-bound kernels over the largest tensors of the step, some of them fp32 (measured on an H200: 37 of 280 ms for
Llama-3.2-1B's shape). No model class is patched for this. The base model runs first, its blocks with graphs of their
own. Then the model's own `forward` is compiled with a base model that hands over what was computed, so that all that
the class does after it (scaling or soft-capping of logits, labels of -100, `num_items_in_batch`) is one graph, in
which fp32 logits never reach memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_fp8.linear import FP8Module
from hf_fp8.roles import hf_roots


class CompiledHead:
    """The forward of one causal LM, compiled where it computes a loss.

    A call without `labels` (generation, label smoothing, a loss of the user's own) runs eagerly behind the blocks.

    Args:
        root: the model; its base model and its head must be children of it.
        eager: True while nothing should be compiled.
        options: for `torch.compile`.
    """

    def __init__(self, root: PreTrainedModel, eager: Callable[[], bool], options: dict[str, Any]) -> None:
        self.drop_logits = False
        """Return no logits from a training forward with labels: they then exist inside the graph only."""
        self._root, self._plain = root, root.forward
        self._head = root.get_output_embeddings()
        self._caller, self._done = _bare(root.base_model, _Caller), _bare(root.base_model, _Done)
        self._bare_head = _bare(self._head, type(self._head))
        self._compiled = torch.compile(self._after_base, **options)
        # An FP8 head takes other scales while it calibrates: not worth a graph.
        fp8_head = isinstance(self._head, FP8Module)

        @wraps(type(root).forward)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            replaced = root.get_output_embeddings() is not self._head  # by a merge of adapters, or a user
            if module is not root:  # a copy of it
                return type(root).forward(module, *args, **kwargs)
            if kwargs.get("labels") is None or replaced or (fp8_head and eager()):
                return self._plain(*args, **kwargs)
            return self._run_head(self._run_base(*args, **kwargs), args, kwargs)

        root.forward = MethodType(forward, root)

    def _run_base(self, *args: Any, **kwargs: Any) -> Any:
        """What the base model returns, called as the model calls it."""
        try:
            with self._swapped(self._root.base_model, self._caller):
                self._plain(*args, **kwargs)
        except _BaseIsCalled as call:
            return self._root.base_model(*call.args, **call.kwargs)
        raise RuntimeError(f"{type(self._root).__name__}.forward does not call its base model")

    def _run_head(self, outputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The compiled rest, as the forward of the head: the hooks of FSDP2 run around it, not in it."""

        def forward(hidden: Tensor) -> Any:
            outputs.last_hidden_state = hidden
            with self._swapped(self._root.base_model, self._done), self._swapped(head, self._bare_head):
                return self._compiled(outputs, self.drop_logits and torch.is_grad_enabled(), args, kwargs)

        head: Any = self._head
        head.forward = forward
        try:
            return head(outputs.last_hidden_state)
        finally:
            del head.forward

    def _after_base(
        self, outputs: Any, drop_logits: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._done.outputs = outputs
        result = self._plain(*args, **kwargs)
        self._done.outputs = None
        if not drop_logits:
            return result
        if isinstance(result, tuple):
            return result[:1]
        return type(result)(**{key: value for key, value in result.items() if key != "logits"})

    @contextmanager
    def _swapped(self, child: nn.Module, other: nn.Module) -> Iterator[None]:
        """`other` in the place of a child of the model."""
        name = next(name for name, module in self._root._modules.items() if module is child)
        self._root._modules[name] = other
        try:
            yield
        finally:
            self._root._modules[name] = child

    @contextmanager
    def without_logits(self) -> Iterator[None]:
        """For a caller that reads nothing but the loss of a training forward."""
        self.drop_logits = True
        try:
            yield
        finally:
            self.drop_logits = False


def compile_head(model: nn.Module, eager: Callable[[], bool], options: dict[str, Any]) -> CompiledHead | None:
    """Compile head and loss of `model` in place; None for a model that is no causal LM."""
    roots = [root for _, root in hf_roots(model)]
    if len(roots) != 1:
        return None
    (root,) = roots
    children = list(root.children())
    if root.base_model not in children or root.get_output_embeddings() not in children:
        return None
    if root.loss_function is not ForCausalLMLoss:
        return None
    # Said, so that GPT-2 need not fall back to it with a warning, which would break the graph.
    root.loss_function = ForCausalLMLoss
    return CompiledHead(root, eager, options)


class _BaseIsCalled(Exception):
    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.args, self.kwargs = args, kwargs


class _Caller(nn.Module):
    """Stands for the base model, to see how it is called."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _BaseIsCalled(args, kwargs)


class _Done(nn.Module):
    """Stands for a base model that has run."""

    outputs: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.outputs


def _bare(module: nn.Module, kind: type[nn.Module]) -> Any:
    """A `kind` with everything that `module` has, also what it will get, but hooks."""
    bare = kind.__new__(kind)
    nn.Module.__init__(bare)
    vars(bare).update({name: value for name, value in vars(module).items() if not name.endswith("_hooks")})
    return bare
