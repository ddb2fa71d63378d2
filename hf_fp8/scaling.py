"""Scales that are chosen once per optimizer step: of weights, and the delayed recipe's of everything else.

A scale brings a tensor's largest magnitude (amax) to the top of the FP8 range:

    scale = fp8_max / (amax * 2**margin)

The delayed recipe (Transformer Engine, torchao before 0.10) takes the amax of inputs and output gradients
not from the tensor at hand, which would need a second pass over it, but from the last steps: the largest of
`history_len` recorded values. What exceeds it saturates. Weights are never delayed: they change once per
optimizer step, and their exact amax is taken then.

Everything meets in one all-reduce per optimizer step: amaxes of inputs, of gradients and of weights. All state
stays on the device; nothing here waits for the GPU, except when a log line asks for counts.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from hf_fp8.casts import E4M3
from hf_fp8.config import FP8Config
from hf_fp8.linear import FP8Module
from hf_fp8.multi_cast import MultiCast

logger = logging.getLogger(__name__)

Group = dist.ProcessGroup | None
SMALLEST_AMAX = 1e-12  # as torchao's: keeps the scale of an all-zero tensor finite
REPEATED = 0.5  # a layer that saturates in this share of the steps between two logs gets a warning


def scale_of(amax: Tensor, dtype: torch.dtype | Tensor, margin: int = 0) -> Tensor:
    """fp32 scale for each amax. Computed in float64: eager and compiled round 1/x differently.

    `dtype`: the 8-bit format, or the largest number of each amax's format.
    """
    fp8_max = torch.finfo(dtype).max if isinstance(dtype, torch.dtype) else dtype
    return (fp8_max / (amax.double().clamp(min=SMALLEST_AMAX) * 2.0**margin)).float()


class WeightScales:
    """Exact per-tensor scales of the FP8 weights of a model, kept current.

    The plugin refreshes them after each optimizer step. Before a forward they are refreshed too if any weight has
    changed otherwise (a checkpoint load, an EMA copy). One all-reduce each time where weights are sharded.

    Args:
        modules: converted modules by name.
        device: where the GEMMs run.
        group: the ranks that hold the parts of one weight; None where each rank holds whole weights.
        keep_fp8: of which modules to keep an FP8 copy of the weight, or of this rank's part of it, for all
            micro-batches of the step (1 byte a parameter).
        on_change: called after each refresh with the weights, sharded if they are, and those copies of parts.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: dict[str, FP8Module],
        device: torch.device,
        group: Group = None,
        *,
        keep_fp8: Collection[str] = (),
        on_change: Callable[[dict[str, Tensor], dict[str, Tensor]], None] | None = None,
    ) -> None:
        self.modules, self.device, self.group = modules, device, group
        self.on_change = on_change
        self.measured: list[Tensor] | None = None
        """0-dim fp32 each: what an optimizer step has measured while it wrote the weights (`adam.py`)."""
        self._versions: tuple[tuple[int, int], ...] = ()
        self._shards: dict[str, Tensor] = {}
        self._copies: dict[str, Tensor] = {}  # of shards; a whole copy belongs to its module
        self._cast = MultiCast()
        for name, module in modules.items():
            module.fp8_weight_scale = torch.ones((), device=device)
            if name in keep_fp8:
                copy = torch.empty_like(local(module.weight), dtype=E4M3, requires_grad=False)
                if group is None:
                    module.fp8_weight = copy
                else:
                    self._copies[name] = copy
        model.register_forward_pre_hook(lambda *_: self.refresh_if_changed(), prepend=True)

    @property
    def weights(self) -> list[Tensor]:
        """The weights; the sharded ones also while FSDP2 keeps them gathered (no backward has freed them yet)."""
        for name, module in self.modules.items():
            weight = module.weight
            if self.group is None or isinstance(weight, DTensor):
                self._shards[name] = weight
        return list(self._shards.values())

    def refresh_if_changed(self) -> None:
        if self._current_versions() != self._versions:
            self.refresh()

    def _current_versions(self) -> tuple[tuple[int, int], ...]:
        return tuple((id(w), w._version) for w in self.weights)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take all amaxes anew. Collective where weights are sharded: call it on all ranks or on none.

        Needed by hand only after writing in a way that leaves no trace on the parameter: through `weight.data`, and of
        shards also through `weight.to_local()` and `torch._foreach_…`.
        """
        self.measured = None
        self._versions = ()  # cast every copy anew
        self.refresh_after_step()

    @torch.no_grad()
    def refresh_after_step(self) -> None:
        """The same at the end of an optimizer step."""
        amax = self.local_amax()
        if self.group is not None:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self.group)
        self.apply(amax)

    def local_amax(self) -> Tensor:
        """Largest magnitude of this rank's part of each weight: fp32, shape (modules,). An empty part counts as 0."""
        measured, self.measured = self.measured, None
        if measured is not None:
            return torch.stack(measured)
        parts = [local(w) for w in self.weights]
        norms = torch._foreach_norm([p if p.numel() else p.new_zeros(1) for p in parts], torch.inf)
        return torch.stack(norms).to(self.device, torch.float32)

    @torch.no_grad()
    def apply(self, amax: Tensor) -> None:
        """Set the scales of these amaxes, fp32 (modules,), and cast the copies of weights that have changed."""
        scales = scale_of(amax, E4M3)
        torch._foreach_copy_([m.fp8_weight_scale for m in self.modules.values()], list(scales.unbind()))
        before, self._versions = self._versions or (None,) * len(scales), self._current_versions()
        sources, targets, used = [], [], []
        for i, (name, module) in enumerate(self.modules.items()):
            weight, target = self._shards[name], self._copies.get(name, module.fp8_weight)
            # Frozen weights are cast once and for all. (A fused optimizer changes weights without a new version.)
            if target is not None and (weight.requires_grad or before[i] != self._versions[i]):
                sources.append(local(weight).detach())
                targets.append(target)
                used.append(i)
        if len(used) < len(scales):
            scales = torch.stack([scales[i] for i in used] or [scales.new_zeros(())])
        self._cast(sources, targets, scales)
        if self.on_change is not None:
            self.on_change(self._shards, self._copies)


def local(weight: Tensor) -> Tensor:
    return weight._local_tensor if isinstance(weight, DTensor) else weight


class WeightsInForward:
    """In place of `WeightScales` where weights are out of reach between forwards: FSDP1's flat ones, offloaded ones.

    Converted modules keep no weight scale, and take the exact one of the gathered weight in each forward.
    """

    group: Group = None

    def __init__(self, modules: dict[str, FP8Module], device: torch.device) -> None:
        self.modules, self.device = modules, device

    def local_amax(self) -> Tensor:
        return torch.empty(0, device=self.device)

    def apply(self, amax: Tensor) -> None:
        pass


class SharedInputs:
    """Finds out which modules are called with the very same input, one after the other (q, k and v; gate and up).

    Listens by hooks until `stop`, so it needs blocks that run eagerly.
    """

    def __init__(self, modules: dict[str, FP8Module]) -> None:
        self.leaders: dict[str, str] = {}
        """For each module seen, the first one with its input, which may be itself."""
        self._last: tuple[Callable[[], Tensor | None], str] = (lambda: None, "")
        self._hooks = [
            module.register_forward_pre_hook(partial(self._see, name)) for name, module in modules.items()
        ]

    def _see(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not args:
            return
        (last, first), input = self._last, args[0]
        if last() is not input:
            self._last, first = (weakref.ref(input), name), name
        self.leaders.setdefault(name, self.leaders.get(first, name))

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()


class ScalingState:
    """The delayed recipe's state of one model: amax history and scales of inputs and output gradients.

    Shapes: `history` (2, modules, history_len) fp32, newest first; row 0 inputs (e4m3), row 1 output
    gradients (e5m2, of experts e4m3). Scales live in the modules, as separate 0-dim buffers (views of one storage
    would alias inside a compiled graph).

    Starts *calibrating*: the first micro-batch uses the exact scales of its own tensors, as the tensorwise recipe
    does, and records them. `end_calibration` then turns to delayed scales.
    """

    def __init__(
        self,
        weights: WeightScales | WeightsInForward,
        config: FP8Config,
        device: torch.device,
        group: Group = None,
    ) -> None:
        self.modules, self.weights, self.config, self.group = weights.modules, weights, config, group
        n = len(self.modules)
        self.history = torch.zeros(2, n, config.amax_history_len, device=device)
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        grads = [torch.finfo(module.gemm_recipe.grad_dtype).max for module in self.modules.values()]
        self.fp8_max = torch.tensor([[torch.finfo(E4M3).max] * n, grads], device=device)
        self.saturated = torch.zeros(2, n, dtype=torch.int32, device=device)  # steps since the last log
        self.excess = torch.zeros(2, n, device=device)  # worst amax * scale / fp8_max since the last log
        # Last step with NaN or Inf, 0 for none.
        self.nonfinite = torch.zeros(2, n, dtype=torch.int64, device=device)
        self.steps_since_log = 0
        for module in self.modules.values():
            module.fp8_input_scale = torch.ones((), device=device)
            module.fp8_grad_scale = torch.ones((), device=device)
            module.fp8_input_amax = torch.zeros((), device=device)
            module.fp8_grad_amax = torch.zeros((), device=device)
        self._leaders = torch.arange(n, device=device).repeat(2, 1)  # of modules that share their scale
        self.on_calibrated: Callable[[], None] | None = None
        self._inputs = SharedInputs(self.modules)
        self._set_calibrating(True)

    # --- once per optimizer step ------------------------------------------------------------------------

    @torch.no_grad()
    def sync(self) -> None:
        """After an optimizer step: share all amaxes (one all-reduce MAX), roll the history, set the scales."""
        weights = self.weights.local_amax()
        with record_function("hf_fp8: amax sync"):
            weights = self._sync(weights)
        self.weights.apply(weights)
        if self.calibrating:
            self._set_calibrating(False)

    def _sync(self, weights: Tensor) -> Tensor:
        """All but the weights, whose amaxes this rank gives and whose shared ones it gets."""
        recorded, weights = self._shared_amaxes(weights)
        torch._foreach_zero_(self._buffers_of("amax"))
        scales = self.scales()
        self._count(recorded, scales)
        # NaN or Inf must not poison the history: the newest finite value stands in.
        finite = torch.where(recorded.isfinite(), recorded, self.history[:, :, 0])
        self.history = torch.cat([finite.unsqueeze(-1), self.history[:, :, :-1]], dim=-1)
        self.step += 1
        self.steps_since_log += 1
        self._set_scales(self.history.amax(-1), scales)
        return weights

    @torch.no_grad()
    def end_calibration(self) -> None:
        """After the first micro-batch's backward: its amaxes become the scales of the next one.

        They stay recorded, so that the optimizer step's `sync` sees the whole window.
        """
        recorded, _ = self._shared_amaxes(None)
        self._share_scales(self._inputs.leaders)
        self._set_scales(recorded.nan_to_num(0.0, posinf=0.0), self.scales())
        self._set_calibrating(False)

    def _shared_amaxes(self, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """(2, modules) recorded amaxes and the weights', both over all ranks that share them."""
        local = torch.stack(self._buffers_of("amax"))
        # MAX keeps or drops a NaN by its position (gloo, NCCL); infinity stands for both.
        local = torch.where(local.isnan(), torch.inf, local)
        weights = local.new_empty(0) if weights is None else weights
        if self.group is not None:
            everything = torch.cat([local, weights])
            dist.all_reduce(everything, op=dist.ReduceOp.MAX, group=self.group)
            local, weights = everything.split([local.numel(), weights.numel()])
        elif self.weights.group is not None:
            dist.all_reduce(weights, op=dist.ReduceOp.MAX, group=self.weights.group)
        return local.view(2, -1), weights

    def _set_scales(self, amax: Tensor, scales: Tensor) -> None:
        amax = torch.zeros_like(amax).scatter_reduce(1, self._leaders, amax, "amax").gather(1, self._leaders)
        fresh = scale_of(amax, self.fp8_max, self.config.amax_margin)
        # A layer that has seen nothing but zeros (or nothing at all) keeps its scale.
        fresh = torch.where(amax > 0, fresh, scales)
        torch._foreach_copy_(self._buffers_of("scale"), list(fresh.view(-1).unbind()))

    def _share_scales(self, leaders: dict[str, str]) -> None:
        """One input scale, the same tensor, for the modules that get the same input: compiled code casts it once.

        It is that of their largest amax, so that it also serves a module whose input is another one later.
        """
        places = {name: index for index, name in enumerate(self.modules)}
        for name, leader in leaders.items():
            self._leaders[0, places[name]] = places[leader]
            self.modules[name].fp8_input_scale = self.modules[leader].fp8_input_scale

    def scales(self) -> Tensor:
        """(2, modules) fp32: the scales in use, inputs first."""
        return torch.stack(self._buffers_of("scale")).view(2, -1)

    def _buffers_of(self, kind: str) -> list[Tensor]:
        """All input buffers, then all gradient buffers."""
        names = (f"fp8_input_{kind}", f"fp8_grad_{kind}")
        return [cast(Tensor, m._buffers[name]) for name in names for m in self.modules.values()]

    def _set_calibrating(self, on: bool) -> None:
        self.calibrating = on
        if not on:
            self._inputs.stop()
            if self.on_calibrated is not None:
                self.on_calibrated()
        for module in self.modules.values():
            module.fp8_calibrating = on

    # --- what is reported -------------------------------------------------------------------------------

    def _count(self, recorded: Tensor, scales: Tensor) -> None:
        excess = recorded * scales / self.fp8_max
        if self.calibrating:  # exact scales: nothing saturated
            excess = torch.zeros_like(excess)
        self.saturated += (excess > 1.0 + 1e-6) & recorded.isfinite()
        self.excess = torch.maximum(self.excess, excess.nan_to_num(0.0, posinf=0.0))
        self.nonfinite = torch.where(recorded.isfinite(), self.nonfinite, self.step + 1)

    def log_values(self) -> dict[str, Any]:
        """Counts since the last call, for a log line; warns about layers at fault. Waits for the device."""
        if not self.steps_since_log:
            return {}
        names = list(self.modules)
        counts = torch.stack([self.saturated.double(), self.excess.double(), self.nonfinite.double()])
        saturated, excess, nonfinite = counts.tolist()  # one wait
        values: dict[str, Any] = {
            "fp8/saturated_layers": sum(bool(i or g) for i, g in zip(*saturated, strict=True)),
        }
        worst, role, index = max((excess[r][i], r, i) for r in (0, 1) for i in range(len(names)))
        if values["fp8/saturated_layers"]:
            values["fp8/worst_layer"] = f"{names[index]} {_ROLES[role]}"
            values["fp8/worst_excess"] = round(worst, 4)
        for role, label in enumerate(_ROLES):
            repeated = [
                n for n, c in zip(names, saturated[role], strict=True) if c > REPEATED * self.steps_since_log
            ]
            if repeated and self.steps_since_log > 1:
                logger.warning(
                    "FP8 %s of %d layers saturated in most of the last %d steps, first %s. "
                    "Raise --fp8_amax_margin by one, or keep these layers out with --fp8_skip.",
                    label,
                    len(repeated),
                    self.steps_since_log,
                    repeated[0],
                )
            for name, step in zip(names, nonfinite[role], strict=True):
                if step:
                    logger.warning(
                        "FP8 %s of %s held NaN or Inf at optimizer step %d.", label, name, int(step)
                    )
        self.saturated.zero_()
        self.excess.zero_()
        self.nonfinite.zero_()
        self.steps_since_log = 0
        return values

    # --- checkpoint -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """History, scales and step. Collective where scales are not shared: each rank's part is kept."""
        history, scales = self.history, self.scales()
        if self.group is None and dist.is_initialized() and dist.get_world_size() > 1:
            history, scales = _all_ranks(history), _all_ranks(scales)
        else:
            history, scales = history[None], scales[None]
        return {
            "modules": list(self.modules),
            "leaders": self._leaders[0].tolist(),
            "history": history.cpu(),
            "scales": scales.cpu(),
            "step": int(self.step),
            "calibrating": self.calibrating,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore; from another number of ranks, their largest values (a smaller scale is always safe).

        Raises:
            ValueError: the state belongs to a model with other converted modules.
        """
        if state["modules"] != list(self.modules):
            differing = sorted(set(state["modules"]) ^ set(self.modules)) or ["their order"]
            raise ValueError(
                f"The FP8 state of the checkpoint is for {len(state['modules'])} modules, this model converts "
                f"{len(self.modules)}; they differ in {differing[0]!r}. Resume with the fp8 flags of the first run."
            )
        names = list(self.modules)
        leaders = state.get("leaders", range(len(names)))  # states of the first versions have none
        self._share_scales({name: names[leader] for name, leader in zip(names, leaders, strict=True)})
        ranks = state["history"].shape[0]
        world = dist.get_world_size() if dist.is_initialized() else 1
        if ranks == world and self.group is None:
            rank = dist.get_rank() if dist.is_initialized() else 0
            history, scales = state["history"][rank], state["scales"][rank]
        else:
            history, scales = state["history"].amax(0), state["scales"].amin(0)
        kept = min(history.shape[-1], self.history.shape[-1])
        self.history.zero_()
        self.history[:, :, :kept] = history[:, :, :kept].to(self.history.device)
        torch._foreach_copy_(
            self._buffers_of("scale"), list(scales.to(self.history.device).view(-1).unbind())
        )
        self.step.fill_(state["step"])
        self._set_calibrating(state["calibrating"])


_ROLES = ("input", "output gradient")


def _all_ranks(value: Tensor) -> Tensor:
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, value.contiguous())
    return torch.stack(parts)
