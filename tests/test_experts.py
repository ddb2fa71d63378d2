"""Experts in FP8: numerics for every layout of the interface and any routing, compile, FSDP2, checkpoints, LoRA."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronHConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

import hf_fp8
import models
from gloo import Ranks
from hf_fp8 import FP8Config
from hf_fp8.cost import experts_seconds
from hf_fp8.experts import FP8Experts, convert_experts
from hf_fp8.grouped_gemm import route
from hf_fp8.linear import FP8Linear, fp8_modules
from hf_fp8.scaling import ScalingState, WeightScales
from hf_fp8.selection import convert, judge, select

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"]
EXPERTS, HIDDEN, WIDTH = 6, 64, 96
FSDP1 = {"FSDP_VERSION": "1", "FSDP_USE_ORIG_PARAMS": "true", "FSDP_SHARDING_STRATEGY": "FULL_SHARD"}
SIZES = {**models.SIZES, "num_key_value_heads": 2, "vocab_size": models.VOCABULARY, "initializer_range": 0.1}


class Normed(MixtralExperts):
    """With a norm on each expert's output (`has_post_expert_norm`), as Muse Spark has."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__(config)
        self.has_post_expert_norm = True
        self.post_expert_norm = nn.RMSNorm(HIDDEN, eps=1e-6)


def mixtral_config() -> MixtralConfig:
    return MixtralConfig(hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=EXPERTS)


LAYOUTS: dict[str, tuple[type[nn.Module], Any]] = {
    "gated": (MixtralExperts, mixtral_config),
    "transposed, interleaved, biased": (
        GptOssExperts,
        lambda: GptOssConfig(hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=EXPERTS),
    ),
    "without a gate": (
        NemotronHExperts,
        lambda: NemotronHConfig(
            hidden_size=HIDDEN, moe_intermediate_size=WIDTH, n_routed_experts=EXPERTS, mlp_hidden_act="silu"
        ),
    ),
    "normed": (Normed, mixtral_config),
}
# Tokens of each expert, two experts a token.
ROUTINGS = {
    "uneven": [0, 1, 5, 37, 43, 0],
    "all to two": [0, 0, 0, 29, 29, 0],
    "one token": [1, 0, 0, 0, 0, 1],
    "no token": [0] * EXPERTS,
}


def plain_experts(layout: str = "gated") -> nn.Module:
    cls, config = LAYOUTS[layout]
    settings = config()
    settings._experts_implementation = "eager"
    layer = cls(settings)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    return layer


def fp8_experts(layer: nn.Module, recipe: Any, *, emulate: bool = True) -> ScalingState | None:
    config = FP8Config(recipe=recipe, emulate=emulate)
    convert_experts(layer, config)
    if recipe != "delayed":
        return None
    device = next(layer.parameters()).device
    scales = WeightScales(nn.Sequential(), fp8_modules(layer), device, keep_fp8=fp8_modules(layer))
    state = ScalingState(scales, config, device)
    scales.refresh()
    return state


def choice(counts: list[int]) -> Tensor:
    """(tokens, 2) expert numbers, in which each expert occurs that often, no expert twice in a row."""
    experts = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return experts.view(2, -1).t().contiguous()


def sqnr(found: Tensor, right: Tensor) -> float:
    noise = (found.detach().double().cpu() - right.detach()).norm()
    return (20 * torch.log10(right.detach().norm() / noise)).item() if noise else float("inf")


def normed_exactly(layer: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """What `Normed` computes, expert after expert: its class has no eager forward of its own."""
    rows = []
    for t in range(len(x)):
        parts = [layer._apply_gate(x[t] @ layer.gate_up_proj[e].T) @ layer.down_proj[e].T for e in index[t]]
        rows.append(sum(layer.post_expert_norm(part) * w for part, w in zip(parts, weights[t], strict=True)))
    return torch.stack(rows) if rows else x * 0


def step(layer: Any, x: Tensor, index: Tensor, weights: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The output and all gradients."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    layer.zero_grad(set_to_none=True)
    exact = isinstance(layer, Normed) and not isinstance(layer, FP8Experts)
    y = normed_exactly(layer, x, index, weights) if exact else layer(x, index, weights)
    if y.requires_grad:  # the interface's eager forward returns a constant for no tokens
        y.backward(dy)
    grads = {name: p.grad for name, p in layer.named_parameters()}
    found = {"output": y.detach(), "x": x.grad, "weights": weights.grad, **grads}
    return {name: torch.zeros(()) if value is None else value for name, value in found.items()}


# --- numerics -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_output_and_gradients_agree_with_float64(layout: str, recipe: str) -> None:
    torch.manual_seed(0)
    layer = plain_experts(layout)
    exact = copy.deepcopy(layer).double()
    names = [name for name, _ in layer.named_parameters()]
    parameters = list(layer.parameters())
    state = fp8_experts(layer, recipe)
    assert isinstance(layer, FP8Experts)
    assert [name for name, _ in layer.named_parameters()] == names == list(layer.state_dict())
    assert all(p is q for p, q in zip(layer.parameters(), parameters, strict=True))
    for index in map(choice, ROUTINGS.values()):
        x, dy = torch.randn(2, len(index), HIDDEN)
        weights = torch.rand(len(index), 2)
        right = step(exact, x.double(), index, weights.double(), dy.double())
        found = step(layer, x, index, weights, dy)
        assert found["output"].shape == x.shape and found["output"].dtype == x.dtype
        for name, value in found.items():
            assert value.isfinite().all()
            if not right[name].any():  # no token: an expert's gradient is zero, not missing or left over
                assert not value.any()
            else:
                # Of one token there are few numbers, and the ratio scatters; two products are no sample.
                least = 20 if len(index) > 1 else 17
                assert value.numel() == 2 or sqnr(value, right[name]) > least, name
        unused = torch.bincount(index.view(-1), minlength=EXPERTS) == 0
        assert not found["down_proj"][unused].any()
        if state is not None and state.calibrating and len(index):
            state.end_calibration()  # later routings run with stored scales
            state._set_scales(torch.stack(state._buffers_of("amax")).view(2, -1) * 2, state.scales())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kernel_accepts_the_layouts_and_scales_it_is_given(layout: str, recipe: str) -> None:
    """As far as its checks for tensors without data go: row and column major, alignment, a scale for each row."""
    layer = plain_experts(layout).to(torch.bfloat16)
    state = fp8_experts(layer, recipe, emulate=False)
    if state is not None:
        state._set_calibrating(False)
    index, dy = choice(ROUTINGS["uneven"]), torch.ones(43, HIDDEN, dtype=torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.randn(43, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        weights = torch.rand(43, 2, requires_grad=True)
        y = layer(x, index, weights)
        gradients = torch.autograd.grad(y, [x, weights, *layer.parameters()], dy)
    assert [g.shape for g in gradients] == [t.shape for t in (x, weights, *layer.parameters())]


def test_autocast_and_bf16_keep_the_dtypes_of_the_interface() -> None:
    index, x, weights = choice(ROUTINGS["uneven"]), torch.randn(43, HIDDEN), torch.rand(43, 2)
    for dtype, autocast in ((torch.float32, True), (torch.bfloat16, False)):
        layer = plain_experts().to(dtype)
        exact = copy.deepcopy(layer).double()
        fp8_experts(layer, "tensorwise")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = layer(x.to(dtype), index, weights)
        y.sum().backward()
        assert y.dtype == dtype and all(
            p.grad is not None and p.grad.dtype == dtype for p in layer.parameters()
        )
        assert sqnr(y, exact(x.double(), index, weights.double())) > 20


def test_every_expert_gets_its_tokens_in_groups_of_sixteen_rows() -> None:
    for index in (*map(choice, ROUTINGS.values()), torch.randint(0, EXPERTS, (50, 3))):
        tokens, places, offsets = route(index, EXPERTS)
        assert offsets.dtype == torch.int32 and len(tokens) % 16 == 0 and offsets[-1] == len(tokens)
        bounds = [0, *offsets.tolist()]
        assert all(size >= 16 and size % 16 == 0 for size in torch.tensor(bounds).diff().tolist())
        for token, chosen in enumerate(index.tolist()):
            for k, expert in enumerate(chosen):
                row = int(places[token, k])
                assert bounds[expert] <= row < bounds[expert + 1] and tokens[row] == token
        assert len(places.unique()) == index.numel() == int((tokens < len(index)).sum())


def test_a_number_that_is_no_experts_adds_nothing() -> None:
    """transformers marks the tokens of other expert-parallel ranks so, and gives them weight 0."""
    layer = plain_experts()
    fp8_experts(layer, "tensorwise")
    index, x, weights = choice(ROUTINGS["uneven"]), torch.randn(43, HIDDEN), torch.rand(43, 2)
    weights[3, 1] = 0
    right = layer(x, index, weights)
    index[3, 1] = EXPERTS
    assert torch.equal(layer(x, index, weights), right)


def test_revert_gives_back_the_plain_experts() -> None:
    model = mixtral()
    before = {name: type(module) for name, module in model.named_modules()}
    config = FP8Config(emulate=True)
    convert(model, select(model, config), config)
    assert hf_fp8.revert(model) is model
    assert {name: type(module) for name, module in model.named_modules()} == before


# --- compile --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_one_graph_serves_every_routing_and_computes_what_eager_does(recipe: str) -> None:
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    layer = plain_experts("transposed, interleaved, biased")
    state = fp8_experts(layer, recipe)
    eager = copy.deepcopy(layer)
    layer.compile(backend=backend, fullgraph=True)
    graphs = []
    for tokens in (43, 29, 101, 7):  # the second length makes a dynamic graph
        for index in (torch.tensor([[0, 1]] * tokens), torch.rand(tokens, EXPERTS).topk(2).indices):
            x, dy = torch.randn(2, tokens, HIDDEN)
            arguments = (x, index, torch.rand(tokens, 2), dy)
            found, right = step(layer, *arguments), step(eager, *arguments)
            assert all(torch.equal(found[name], value) for name, value in right.items())
            graphs.append(backend.frame_count)
    assert graphs == [1] * 2 + [2] * 6
    if state is not None:  # amaxes were recorded in the graph
        ours, theirs = ({n: m.fp8_input_amax for n, m in fp8_modules(x).items()} for x in (layer, eager))
        assert ours == theirs and all(ours.values())


# --- selection ------------------------------------------------------------------------------------------------


def mixtral(**changes: Any) -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**{**SIZES, "num_local_experts": 4, **changes}))


def bf16_mixtral() -> MixtralForCausalLM:
    return mixtral().to(torch.bfloat16)


def rows_of(model: nn.Module, tokens: int | None = None, **options: Any) -> dict[str, str]:
    """Reason of every row, empty where it converts."""
    return {row.name: row.reason for row in select(model, FP8Config(**options), tokens).rows}


def test_experts_convert_and_routers_stay_in_every_model_of_the_interface() -> None:
    moe = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
    deepseek = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
    built = [
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **moe, num_experts=8, head_dim=16)),
        GptOssForCausalLM(GptOssConfig(**SIZES, head_dim=16, num_local_experts=4)),
        DeepseekV3ForCausalLM(
            DeepseekV3Config(
                **{**SIZES, "num_key_value_heads": 4},
                **{**moe, **deepseek, "v_head_dim": 16, "n_routed_experts": 8, "n_group": 2, "topk_group": 1},
                first_k_dense_replace=1,
            )
        ),
    ]
    for model in built:
        config = FP8Config(emulate=True)
        report = select(model, config)
        convert(model, report, config)
        layers = [m for m in model.modules() if isinstance(m, FP8Experts)]
        assert len(layers) == (1 if isinstance(model, DeepseekV3ForCausalLM) else 2)
        assert all(row.converted for row in report.rows if row.expert)
        assert any(row.reason == "router" for row in report.rows)
        assert 0 < report.expert_share < 1 and "all in FP8" in str(report)
    shared = built[-1].model.layers[1].mlp.shared_experts
    assert all(isinstance(getattr(shared, f"{name}_proj"), FP8Linear) for name in ("gate", "up", "down"))


def test_experts_outside_the_interface_stay_with_the_reason() -> None:
    settings = {**SIZES, "num_local_experts": 4, "head_dim": 16, "intermediate_size_mlp": 128}
    model = Llama4ForCausalLM(Llama4TextConfig(**settings))
    reasons = {r for name, r in rows_of(model, emulate=True).items() if ".experts." in name}
    assert reasons == {"experts are not on transformers' experts interface"}
    with pytest.raises(ValueError, match=r"fp8_experts=on.*not on transformers' experts interface"):
        rows_of(model, emulate=True, experts="on")


def test_experts_convert_together_and_layer_by_layer() -> None:
    skipped = rows_of(mixtral(), emulate=True, skip=("model.layers.1.*.down_proj",))
    experts = {name.removeprefix("model.layers."): why for name, why in skipped.items() if "experts" in name}
    assert experts == {
        **{f"0.mlp.experts.{name}": "" for name in ("gate_up_proj", "down_proj")},
        **{f"1.mlp.experts.{name}": "fp8_skip" for name in ("gate_up_proj", "down_proj")},
    }


def meta(config: Any, cls: Any) -> nn.Module:
    with torch.device("meta"):
        return cls(config)


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    messages: list[str] = []
    monkeypatch.setattr("hf_fp8.selection.logger.warning", lambda text, *args: messages.append(text % args))
    return messages


def test_experts_stay_in_bf16_on_a_gpu_until_they_are_proven() -> None:
    model = mixtral(hidden_size=512, intermediate_size=2048)
    rows = judge(model, FP8Config(), 65536)
    assert {row.reason for row in rows if row.expert} == {"experts stay in bf16 (fp8_experts=auto)"}
    with pytest.raises(ValueError, match=r"fp8_experts=on: on a GPU.*Use fp8_experts=auto"):
        rows_of(model, 65536, experts="on", convert_small=True)


def test_auto_takes_the_faster_one_and_on_warns_with_the_numbers(
    warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_fp8.cost.EXPERTS_PROVEN", True)
    shapes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 1, "vocab_size": 128}
    wide = meta(MixtralConfig(**shapes), MixtralForCausalLM)
    assert {row.reason for row in judge(wide, FP8Config(), 16384) if row.expert} == {""}
    slow = "FP8 would be slower (fp8_experts=auto)"
    assert {row.reason for row in judge(wide, FP8Config(), 16) if row.expert} == {slow}
    assert not warned
    bf16, fp8 = experts_seconds([(8, 2 * 14336, 4096), (8, 4096, 14336)], 2 * 16, "delayed")
    assert fp8 > bf16
    assert not any(why for name, why in rows_of(wide, 16, experts="on").items() if ".experts." in name)
    (message,) = warned
    assert f"about {fp8 * 1e3:.2f} ms" in message and f"against {bf16 * 1e3:.2f} ms" in message
    assert "fp8_experts=auto" in message and "16 tokens" in message
    rows_of(wide, 16384, experts="on")
    assert len(warned) == 1


# --- training -------------------------------------------------------------------------------------------------


class GroupedGemms(TorchDispatchMode):
    """Counts the grouped GEMMs: weight gradients, and all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_gradients = self.all = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.hf_fp8.grouped_mm_emulated.default:
            self.all += 1
            self.weight_gradients += args[1].ndim == 2
        return func(*args, **(kwargs or {}))


def lora(**options: Any) -> Any:
    settings = {"r": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **options}
    return get_peft_model(bf16_mixtral(), LoraConfig(init_lora_weights=False, **settings))


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_lora_trains_beside_frozen_fp8_experts_without_their_weight_gradients(
    tmp_path: Path, recipe: str
) -> None:
    model = lora()
    before = models.whole(model)
    trainer = models.trainer(str(tmp_path), model, fp8_recipe=recipe, max_steps=2)
    with GroupedGemms() as gemms:
        trainer.train()
    assert sum(isinstance(m, FP8Experts) for m in model.modules()) == 2
    # Two micro-batches, two layers, two weights; the first layer's input needs a gradient for its own adapters.
    assert gemms.all == 2 * 2 * 2 * 2 and gemms.weight_gradients == 0
    after = models.whole(model)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed and all("lora_" in name for name in changed)
    merged = model.merge_and_unload()
    assert not fp8_modules(merged) and type(merged.model.layers[0].mlp.experts) is MixtralExperts


def test_experts_that_adapters_change_stay_in_bf16() -> None:
    model = lora(target_parameters=["mlp.experts.gate_up_proj"])
    reasons = {why for name, why in rows_of(model, emulate=True).items() if ".experts." in name}
    assert reasons - {"adapter"} == {"adapters change the expert weights"}


def train(folder: str, flags: dict[str, Any], resume: str | None = None) -> dict[str, Any]:
    model = bf16_mixtral()
    flags = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2, **flags}
    trainer = models.trainer(folder, model, **flags)
    trainer.train(resume_from_checkpoint=resume)
    weights = models.whole(trainer.model)
    trainer.save_model(f"{folder}/final")
    return {
        "sharded": isinstance(model, FSDPModule) and all(isinstance(p, DTensor) for p in model.parameters()),
        "local": {type(p.to_local()) for p in model.parameters() if isinstance(p, DTensor)},
        "experts": sum(isinstance(m, FP8Experts) for m in model.modules()),
        "notes": "\n".join(trainer.fp8_report.notes),
        "losses": models.losses(trainer),
        "weights": weights,
        "gradients": trainer.state.log_history[0]["grad_norm"],
    }


def train_sharded(folder: str) -> dict[str, dict[str, Any]]:
    """Gathered as FP8, resumed, gathered as bf16, and recomputed."""
    flags = {"fp8_recipe": "delayed"}
    first = train(f"{folder}/fp8", flags)
    return {
        "fp8": first,
        "resumed": train(f"{folder}/resumed", flags, f"{folder}/fp8/checkpoint-2"),
        "bf16": train(f"{folder}/bf16", {**flags, "fp8_all_gather": "off"}),
        "recomputed": train(f"{folder}/recomputed", {**flags, "gradient_checkpointing": True}),
    }


def test_sharded_experts_gather_as_fp8_resume_bit_for_bit_and_are_saved_plainly(
    ranks: Ranks, tmp_path: Path
) -> None:
    results = ranks(train_sharded, str(tmp_path), fsdp=True)
    for rank in results:
        for each in rank.values():
            assert each["sharded"] and each["local"] == {Tensor} and each["experts"] == 2
            assert torch.tensor(each["losses"]).isfinite().all()
        assert "FP8 all-gather: all 13 converted weights" in rank["fp8"]["notes"]  # 9 linears, 4 of experts
        assert rank["resumed"]["losses"][-1] == rank["fp8"]["losses"][-1]
        weights = rank["fp8"]["weights"]
        assert all(torch.equal(rank["resumed"]["weights"][n], w) for n, w in weights.items())
        assert rank["recomputed"]["losses"] == rank["fp8"]["losses"]
        # Cast to bf16 on the way, a weight is rounded twice.
        assert rank["bf16"]["losses"][0] == pytest.approx(rank["fp8"]["losses"][0], rel=1e-3)
        assert rank["bf16"]["gradients"] == pytest.approx(rank["fp8"]["gradients"], rel=2e-2)
        assert rank["fp8"]["losses"] == results[0]["fp8"]["losses"]
    opened, info = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8/final", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    state = opened.state_dict()
    for name, weight in results[0]["fp8"]["weights"].items():
        assert torch.equal(state[name], weight.to(torch.bfloat16)), name
    assert type(opened.model.layers[0].mlp.experts) is MixtralExperts


def train_unsharded(folder: str) -> dict[str, Any]:
    return train(folder, {"fp8_recipe": "delayed", "save_strategy": "no", "max_steps": 2})


def test_ddp_and_fsdp1_train_experts_alike(ranks: Ranks, tmp_path: Path) -> None:
    ddp = ranks(train_unsharded, str(tmp_path / "ddp"))
    flat = ranks(train_unsharded, str(tmp_path / "fsdp1"), fsdp=True, env=FSDP1)
    for each in (*ddp, *flat):
        assert each["experts"] == 2 and not each["sharded"]
        assert each["losses"][0] == pytest.approx(ddp[0]["losses"][0], rel=1e-3)
        assert each["gradients"] == pytest.approx(ddp[0]["gradients"], rel=3e-2)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_compiled_blocks_do_not_break_and_learn_what_eager_ones_do(tmp_path: Path, recipe: str) -> None:
    found = {}
    for backend in (None, "aot_eager"):
        torch._dynamo.reset()
        counters.clear()
        compiled = {"torch_compile": True, "torch_compile_backend": backend} if backend else {}
        trainer = models.trainer(str(tmp_path), mixtral(), fp8_recipe=recipe, **compiled)
        trainer.train()
        found[backend] = models.losses(trainer)
        assert not backend or (counters["stats"]["unique_graphs"] and not counters["graph_break"])
    assert found[None] == pytest.approx(found["aot_eager"], rel=1e-4)


# --- on FP8 hardware ------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_hardware_agrees_with_float64(recipe: str, compiled: bool) -> None:
    torch.manual_seed(0)
    for layout in LAYOUTS:
        torch._dynamo.reset()  # all layouts share one forward, and the compiler counts its graphs
        layer = plain_experts(layout)
        exact = copy.deepcopy(layer).double()
        layer = layer.to("cuda", torch.bfloat16)
        fp8_experts(layer, recipe, emulate=False)
        if compiled:
            layer.compile(fullgraph=True)
        for index in map(choice, ROUTINGS.values()):
            x, dy = torch.randn(2, len(index), HIDDEN)
            weights = torch.rand(len(index), 2)
            right = step(exact, x.double(), index, weights.double(), dy.double())
            low = (t.to("cuda", torch.bfloat16) for t in (weights, dy))
            found = step(layer, x.to("cuda", torch.bfloat16), index.cuda(), *low)
            for name, value in found.items():
                least = 20 if len(index) > 1 else 17  # as above
                assert value.numel() == 2 or sqnr(value, right[name]) > least, (layout, len(index), name)


def test_hidden_states_of_another_size_are_refused() -> None:
    layer = plain_experts()
    fp8_experts(layer, "tensorwise")
    index = choice(ROUTINGS["uneven"])
    with pytest.raises(ValueError, match=rf"Pass \(tokens, {HIDDEN}\)"):
        layer(torch.ones(len(index), 2 * HIDDEN), index, torch.ones(index.shape))
