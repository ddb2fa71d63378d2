"""`FP8Plugin`: the life of a model, in order. Trainer and plain Accelerate loops run the same code.

plugin = FP8Plugin(FP8Config(recipe="tensorwise"))
accelerator = Accelerator(**plugin.accelerator_kwargs(), fsdp_plugin=...)
model, optimizer, loader = plugin.prepare(accelerator, model, optimizer, loader)
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_fp8.accelerator import FP8Accelerator, check_launch
from hf_fp8.adam import OnePass, step_in_one_pass
from hf_fp8.adapters import follow_adapters
from hf_fp8.checkpoint import refuse_sharded_save
from hf_fp8.config import FP8Config, keep_accelerate_from_converting, launch_mixed_precision
from hf_fp8.fsdp1 import (
    TO_FSDP2,
    check_compiled_fsdp1,
    check_fsdp1,
    free_gathered,
    is_fsdp1,
    set_fsdp1_options,
    wrap_adapters,
)
from hf_fp8.gathering import WeightGather, shard_group
from hf_fp8.generation import let_generate
from hf_fp8.grad_unroll import unroll_gradients
from hf_fp8.head import CompiledHead, compile_head
from hf_fp8.linear import FP8_BUFFERS, FP8Linear, FP8Module, fp8_modules
from hf_fp8.offload import check_offload, offloads_parameters, prepare_cpu_step
from hf_fp8.regions import (
    Blocks,
    checkpoint_activations,
    compile_model,
    find_blocks,
    recompute_blocks,
    without_cache,
)
from hf_fp8.report import ConversionReport
from hf_fp8.roles import forward_is_replaced
from hf_fp8.scaling import ScalingState, WeightScales, WeightsInForward
from hf_fp8.selection import convert, select
from hf_fp8.sharding import (
    check_optimizer,
    named_parameter_objects,
    remap_optimizer,
    reshard,
    set_forward_modes,
    set_mixed_precision_policy,
    shard_model,
    upcast_masters,
)

logger = logging.getLogger(__name__)


class FP8Plugin:
    """Converts, checkpoints, compiles and shards one model for FP8 training.

    Args:
        config: what to do; None takes what `accelerate launch` passed (`FP8Config.from_launch()`).
        tokens: rows of a micro-batch (batch size x sequence length), for the choice of layers; None assumes 8192.
        torch_compile_regional: compile block by block where the launch config or `TorchDynamoPlugin` asks for compile;
            False compiles the whole model.
    """

    def __init__(
        self,
        config: FP8Config | None = None,
        *,
        tokens: int | None = None,
        torch_compile_regional: bool = True,
    ) -> None:
        self.config = FP8Config.from_launch() if config is None else config
        self.tokens = tokens
        self.accumulation = 1
        """Micro-batches in a step where Accelerate does not count them: Trainer does so itself."""
        self.torch_compile_regional = torch_compile_regional
        self.report: ConversionReport | None = None
        self.weights: WeightScales | None = None
        """Once-per-step weight scales, where the recipe or FP8 gather needs them."""
        self.scaling: ScalingState | None = None
        """The delayed recipe's state."""
        self.one_pass: OnePass | None = None
        """The optimizer, if it is one whose step also clips and measures (`adam.py`)."""
        self.head: CompiledHead | None = None
        """Head and loss of a causal LM as one region, where blocks are compiled."""
        self._model: nn.Module | None = None
        self._wrapped: nn.Module | None = None  # FSDP1's wrapper of the model
        self._in_window = False  # micro-batches have been accumulated that no optimizer step has used yet
        self._blocks: Blocks = []
        self._compiled = False
        self._finished = False
        if self.config.enabled and launch_mixed_precision() == "fp16":
            raise ValueError(
                "mixed_precision: fp16 in the launch config contradicts FP8 training, which computes in bf16 around "
                "the FP8 GEMMs. Set mixed_precision: fp8 (or bf16), or FP8Config(enabled=False)."
            )

    # --- what a user calls ------------------------------------------------------------------------------

    def accelerator_kwargs(self) -> dict[str, Any]:
        """Arguments for `Accelerator(...)`: bf16 compute around the FP8 GEMMs, nothing converted by Accelerate."""
        keep_accelerate_from_converting()
        if self.config.enabled or launch_mixed_precision() == "fp8":
            return {"mixed_precision": "bf16"}
        return {}

    def prepare(self, accelerator: Accelerator, model: nn.Module, *others: Any) -> Any:
        """`accelerator.prepare(model, *others)` with FP8. Optimizers, schedulers and loaders in any order.

        Returns what `accelerator.prepare` returns, in the order given.

        Raises:
            ValueError: see `select`; also for an optimizer that does not hold the model's parameters.
            RuntimeError: the device has no FP8 and `emulate` is off.
        """
        optimizers = [o for o in others if isinstance(o, torch.optim.Optimizer)]
        self.prepare_model(accelerator, model, *optimizers)
        before = named_parameter_objects(model)
        prepared = accelerator.prepare(model, *others)
        for optimizer in optimizers:
            if self._wrapped is not None:  # parameters on the meta device were replaced
                remap_optimizer(optimizer, before, self._wrapped)
            self.check(optimizer)
            if offloads_parameters(accelerator):
                prepare_cpu_step(optimizer)
        for optimizer in optimizers[-1:]:  # several step one after the other: the last ends the step
            optimizer.register_step_post_hook(lambda *_: self.after_optimizer_step())
        if self.scaling is not None:
            accelerator.register_for_checkpointing(self.scaling)
        self.begin_calibration()
        return prepared

    # --- the order --------------------------------------------------------------------------------------

    def prepare_model(
        self, accelerator: Accelerator, model: nn.Module, *optimizers: torch.optim.Optimizer
    ) -> None:
        """Everything up to, not including, `accelerator.prepare`. A second call for the same model does nothing."""
        self.convert(accelerator, model)
        self.finish(accelerator, model, *optimizers)

    def convert(self, accelerator: Accelerator, model: nn.Module) -> None:
        """Masters, selection and conversion, activation checkpointing: what needs no optimizer and no mesh."""
        if self._model is model:
            return
        self.adopt(accelerator)
        self.config.check_hardware(accelerator.device)
        self._model, self._wrapped, self._finished = model, None, False
        self.weights = self.scaling = self.head = self.one_pass = None
        self._blocks = find_blocks(model)
        notes = []
        if accelerator.is_fsdp2:
            notes.append(upcast_masters(model))
        if is_fsdp1(accelerator):
            notes.append("FSDP1: Accelerate wraps the blocks, and keeps trainable parameters in float32")
        if self.config.enabled:
            report = select(model, self.config, self.tokens)
            convert(model, report, self.config)
            follow_adapters(model, lambda: self.weights.refresh() if self.weights else None)
        else:
            report = ConversionReport([], "off")
        report.notes += [*notes, *self._options()]
        self.report = report
        without_cache(model)

    def finish(self, accelerator: Accelerator, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """Activation checkpointing, compile, sharding, gather; then the report is complete and logged on rank 0."""
        if self._finished:
            return
        if self.report is None or self._model is not model:
            raise RuntimeError("finish() needs the model that convert() was called with")
        notes = self.report.notes
        fsdp = accelerator.state.fsdp_plugin if accelerator.distributed_type == DistributedType.FSDP else None
        if fsdp is not None and fsdp.activation_checkpointing:
            checkpoint_activations(model, self._blocks, offload=fsdp.activation_checkpointing_offload)
            # Done: Accelerate must not do it once more.
            fsdp.activation_checkpointing = fsdp.activation_checkpointing_offload = False
            notes.append("activation checkpointing on every block")
        self._compile(accelerator, model)
        if is_fsdp1(accelerator):
            wrap_adapters(accelerator, model)
        if accelerator.is_fsdp2:
            before = named_parameter_objects(model)
            notes.append(shard_model(model, accelerator, tail=self._calls_its_head(model)))
            set_forward_modes(model, accelerator)
            for optimizer in optimizers:
                remap_optimizer(optimizer, before, model)
        elif self.config.enabled and self.config.all_gather == "on":
            raise ValueError(
                "fp8_all_gather=on, but nothing is gathered: the run is not FSDP2. Start it with "
                "accelerate_configs/fsdp2.yaml, or use fp8_all_gather=auto."
            )
        if fsdp is not None:
            refuse_sharded_save(model)
        if self.config.enabled:
            self._scale_once_per_step(accelerator, model)
        if accelerator.is_fsdp2:
            let_generate(model, lambda: self.weights.refresh_if_changed() if self.weights else None)
        self._finished = True
        if accelerator.is_main_process:
            logger.info("%s", self.report)

    def _calls_its_head(self, model: nn.Module) -> bool:
        """Whether the head runs as a module. A forward that was put on the model (TRL's) may only read its weight."""
        return self.head is not None or not forward_is_replaced(model)

    def _compile(self, accelerator: Accelerator, model: nn.Module) -> None:
        assert self.report is not None
        dynamo = accelerator.state.dynamo_plugin
        if dynamo.backend == DynamoBackend.NO:
            if self.config.enabled and not self.config.emulate:
                logger.warning(
                    "FP8 without torch.compile is slower than bf16: the casts run as separate kernels. "
                    "Pass --torch_compile true."
                )
            return
        if is_fsdp1(accelerator):
            check_compiled_fsdp1(accelerator)
        options = dynamo.to_kwargs() | {"backend": dynamo.backend.value.lower()}
        # The launcher always exports USE_DYNAMIC=False, which would recompile for every new length and fall back to
        # eager after eight: None lets torch make a second, dynamic graph.
        options["dynamic"] = dynamo.dynamic or None
        checkpointed = any(vars(m).get("gradient_checkpointing") for m in model.modules())
        note = compile_model(
            model,
            self._blocks,
            regional=self.torch_compile_regional,
            checkpointed=checkpointed,
            config=self.config,
            eager=self._is_calibrating,
            **options,
        )
        dynamo.backend = DynamoBackend.NO  # done: Accelerate must not compile on top
        self.report.notes.append(note)
        self._compiled = True
        # FSDP1 puts gathered weights where only the head itself finds them.
        if self.torch_compile_regional and not is_fsdp1(accelerator):
            self.head = compile_head(model, self._is_calibrating, {**options, "fullgraph": False})
            if self.head is not None:
                self.report.notes.append("head and loss compiled as one region")

    def _scale_once_per_step(self, accelerator: Accelerator, model: nn.Module) -> None:
        """Gather hooks, weight scales and the delayed recipe's state."""
        assert self.report is not None
        delayed = self.config.recipe == "delayed"
        modules = fp8_modules(model)
        gather = None
        if accelerator.is_fsdp2:
            gather = WeightGather(model, self.config, offload=offloads_parameters(accelerator))
            self.report.notes.append(gather.note)
        scaled = modules if delayed else gather.modules if gather else {}
        if not scaled:
            return
        if is_fsdp1(accelerator) or offloads_parameters(accelerator):
            self._delay(accelerator, model, WeightsInForward(modules, accelerator.device), cached=())
            return
        kept = self._kept_copies(accelerator, model, gather.modules if gather else modules)
        self.weights = WeightScales(
            model,
            scaled,
            accelerator.device,
            shard_group(model) if gather else None,
            keep_fp8=kept,
            on_change=gather.attach if gather else None,
        )
        if delayed:
            self._delay(accelerator, model, self.weights, cached=() if gather else kept)

    def _kept_copies(
        self, accelerator: Accelerator, model: nn.Module, modules: dict[str, FP8Module]
    ) -> list[str]:
        """Names of the modules whose weight is cast once per optimizer step, not whenever it is read."""
        if self.config.weight_cache == "off":
            return []
        read_often = (
            self.config.weight_cache == "on"
            or accelerator.is_fsdp2
            or max(accelerator.gradient_accumulation_steps, self.accumulation) > 1
            or any(vars(m).get("gradient_checkpointing") for m in model.modules())
        )
        # A frozen weight is cast but once. Experts were not timed without copies.
        return [
            name
            for name, module in modules.items()
            if read_often or not module.weight.requires_grad or not isinstance(module, FP8Linear)
        ]

    def _delay(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        weights: WeightScales | WeightsInForward,
        *,
        cached: Collection[str],
    ) -> None:
        assert self.report is not None
        shared = dist.group.WORLD if self.config.amax_sync and accelerator.num_processes > 1 else None
        self.scaling = ScalingState(weights, self.config, accelerator.device, shared)
        self.report.notes.append(
            self._delayed_note(weights.modules, cached=cached, shared=shared is not None)
        )
        # DDP would copy rank 0's buffers over everybody's before each forward.
        buffers = [f"{name}.{buffer}" for name in weights.modules for buffer in FP8_BUFFERS]
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, buffers)

    def _delayed_note(self, modules: dict[str, FP8Module], *, cached: Collection[str], shared: bool) -> str:
        note = f"delayed scaling: history {self.config.amax_history_len}, margin {self.config.amax_margin}"
        if shared:
            note += ", amax shared over all ranks"
        if cached:
            size = sum(modules[name].weight.numel() for name in cached) / 2**20
            note += f"; FP8 weight copies {size:,.0f} MiB (fp8_weight_cache)"
        return note

    # --- in training ------------------------------------------------------------------------------------

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Every trainable parameter is in `optimizer` exactly once (RuntimeError). It steps in one pass if it can."""
        assert self._model is not None
        check_optimizer(optimizer, self._wrapped or self._model)
        if self.config.enabled and self._wrapped is None:
            self.one_pass = step_in_one_pass(optimizer, self.weights)

    def wrapped(self, model: nn.Module) -> None:
        """Called with FSDP1's wrapper of the model."""
        self._wrapped = model

    def begin_calibration(self) -> None:
        """The delayed recipe's first micro-batch runs with exact scales, and eagerly: not worth a graph.

        Eager blocks keep more activations than compiled ones, so they are recomputed meanwhile.
        """
        if self.scaling is not None and self.scaling.calibrating and self._compiled:
            self.scaling.on_calibrated = recompute_blocks(self._blocks).close

    def _is_calibrating(self) -> bool:
        return self.scaling is not None and self.scaling.calibrating

    def after_backward(self) -> None:
        """Called after each micro-batch's backward: ends the calibration."""
        self._in_window = True
        if self.scaling is not None and self.scaling.calibrating:
            self.scaling.end_calibration()

    def after_optimizer_step(self) -> None:
        """The one collective of the step: new weight scales, and the delayed recipe's amax sync."""
        self._in_window = False
        # A forward between backward and step left weights gathered, which are old now.
        if self._wrapped is not None:
            free_gathered(self._wrapped)
        elif isinstance(self._model, FSDPModule):
            reshard(self._model)
        if self.scaling is not None:
            self.scaling.sync()
        elif self.weights is not None:
            self.weights.refresh_after_step()

    def begin_window(self) -> None:
        """Called before the first forward of each optimizer step: FSDP1's stale gradients go (`grad_unroll.py`)."""
        self._in_window = False
        if self._wrapped is not None:
            unroll_gradients(self._wrapped)

    def begin_evaluation(self) -> None:
        """The same before a forward in evaluation.

        Raises:
            RuntimeError: under FSDP1, gradients of micro-batches still wait for their optimizer step.
        """
        if self._wrapped is None:
            return
        if self._in_window:
            raise RuntimeError(
                "FSDP1 cannot evaluate between backward and optimizer step: the gradients accumulated so far would be "
                f"lost. Evaluate after the step (on_step_end in a TrainerCallback). {TO_FSDP2}"
            )
        unroll_gradients(self._wrapped)

    def adopt(self, accelerator: Accelerator) -> None:
        """Make `accelerator` leave alone what this plugin does.

        Raises:
            ValueError: a launch config that this package cannot honour.
        """
        if isinstance(accelerator, FP8Accelerator):
            return
        keep_accelerate_from_converting()
        check_launch(accelerator, self.config)
        if is_fsdp1(accelerator):
            check_fsdp1(accelerator)
            set_fsdp1_options(accelerator)
        accelerator.__class__ = FP8Accelerator
        cast(FP8Accelerator, accelerator).fp8_plugin = self
        if accelerator.is_fsdp2:
            check_offload(accelerator)
            set_mixed_precision_policy(accelerator)

    def _options(self) -> list[str]:
        config = self.config
        if not config.enabled:
            return ["FP8 is off: nothing converted"]
        notes = []
        if config.emulate:
            notes.append("emulated FP8: same numerics, no speed; the speed rule for small layers is off")
        elif not config.convert_small:
            source = "" if self.tokens else " (assumed)"
            notes.append(f"speed rule for {self.tokens or 8192} tokens a micro-batch{source}")
        return notes
