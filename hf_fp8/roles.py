"""What each module of a Hugging Face model is for, read from the model's own structure.

A linear layer's role decides whether FP8 may touch it. Roles come from identity and structure (output
embeddings, ties, the body of a task model, adapters of PEFT, siblings of expert weights), not from lists
of names, so that a new architecture is handled like the known ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel

HEAD = "output head"
TIED = "tied to an embedding"
TASK_HEAD = "task head"
ADAPTER = "adapter"
ROUTER = "router"


def hf_roots(model: nn.Module) -> list[tuple[str, PreTrainedModel]]:
    """The outermost `PreTrainedModel`s in `model` with their names: under PEFT or value-head wrappers too."""
    if isinstance(model, PreTrainedModel):
        return [("", model)]
    return [
        (f"{name}.{inner}".rstrip("."), root)
        for name, child in model.named_children()
        for inner, root in hf_roots(child)
    ]


def forward_is_replaced(model: nn.Module) -> bool:
    """Whether somebody put a forward on the model itself. TRL's reads the weight of the head and never calls it."""
    return any("forward" in vars(root) for _, root in hf_roots(model))


def module_roles(model: nn.Module) -> dict[str, str]:
    """Module name -> role, for every module whose role keeps it in high precision."""
    roles: dict[str, str] = {}
    roles.update(_routers(model))
    roles.update(_task_heads(model))
    roles.update(_adapters(model))
    shared = {id(p): modules for p, modules in _parameter_owners(model) if len(modules) > 1}
    heads = {id(root.get_output_embeddings()) for _, root in hf_roots(model)}
    for name, module in model.named_modules():
        if any(id(p) in shared for p in module.parameters(recurse=False)):
            roles[name] = TIED
        elif id(module) in heads:
            roles[name] = HEAD
    return roles


def expert_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The 3-D weights (experts, out, in) that `module` holds itself."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.ndim == 3 and parameter.shape[0] > 1 and parameter.is_floating_point():
            yield name, parameter


def _task_heads(model: nn.Module) -> dict[str, str]:
    """Modules outside the body of a task model: classifiers, score layers, prediction heads."""
    roots = hf_roots(model)
    if not roots:
        return _outer_linears(model)
    bodies = [
        next(_join(prefix, name) for name, module in root.named_modules() if module is root.base_model)
        for prefix, root in roots
    ]
    return {
        name: TASK_HEAD
        for name, _ in model.named_modules()
        if not any(name == body or name.startswith(f"{body}." if body else "") for body in bodies)
    }


def _outer_linears(model: nn.Module) -> dict[str, str]:
    """A model that declares no roles: its first and last linear touch the data and the prediction."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return {
        name: "first or last layer of a model that declares no roles" for name in linears[:1] + linears[-1:]
    }


def _adapters(model: nn.Module) -> dict[str, str]:
    roles: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            base = _join(name, "base_layer")
            adapted = cast(nn.Module, module)  # a mixin to the type checker
            roles.update(
                {n: ADAPTER for n in _below(adapted, name) if not (n == base or n.startswith(f"{base}."))}
            )
        elif isinstance(module, AuxiliaryTrainingWrapper):
            roles.update({n: ADAPTER for n in _below(module, name)})
    return roles


def read_by_adapters(model: nn.Module) -> set[str]:
    """Modules whose weight an adapter reads itself (DoRA takes its norm), beside the call of the module."""
    return {
        _join(name, "base_layer")
        for name, module in model.named_modules()
        if isinstance(module, BaseTunerLayer)
        and not (isinstance(module, LoraLayer) and not module.lora_variant)
    }


def _routers(model: nn.Module) -> dict[str, str]:
    """Siblings of expert weights whose output dimension is the number of experts."""
    roles: dict[str, str] = {}
    for name, parent in model.named_modules():
        children = dict(parent.named_children())
        experts = {p.shape[0] for child in children.values() for _, p in expert_parameters(child)}
        for child_name, child in children.items():
            weights = [p for p in child.parameters() if p.ndim == 2]
            if experts and len(weights) == 1 and weights[0].shape[0] in experts:
                roles.update(
                    {n: ROUTER for n in [_join(name, child_name), *_below(child, _join(name, child_name))]}
                )
    return roles


def _parameter_owners(model: nn.Module) -> list[tuple[nn.Parameter, list[nn.Module]]]:
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    return list(owners.items())


def plain_name(name: str, model: nn.Module) -> str:
    """`name` as it was before PEFT or a value head wrapped the model: the name that a user writes in `fp8_skip`."""
    for prefix, _ in hf_roots(model):
        name = name.removeprefix(f"{prefix}.")
    return name.replace(".base_layer", "")


def _below(module: nn.Module, prefix: str) -> list[str]:
    return [_join(prefix, name) for name, _ in module.named_modules() if name]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
