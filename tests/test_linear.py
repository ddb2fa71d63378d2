"""The FP8 linear: numbers against float64, shapes, autograd, compile, and what conversion leaves alone."""

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

from hf_fp8 import FP8Config
from hf_fp8 import linear as linear_module
from hf_fp8.casts import E5M2, cast_saturating, dithered
from hf_fp8.linear import FP8_BUFFERS, FP8Conv1D, FP8Linear, convert_linear, fp8_modules
from hf_fp8.scaling import ScalingState, WeightScales

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed")
LEADING = {
    "vector": (),
    "1 token": (1,),
    "3x13": (3, 13),
    "16": (16,),
    "no token": (0,),
    "empty batch": (0, 5),
}
SQNR = 20.0  # dB
K, N = 64, 48

Products = dict[str, Tensor | None]


def config_of(recipe: str, *, emulate: bool = True) -> FP8Config:
    return FP8Config(recipe=recipe, emulate=emulate)  # type: ignore[arg-type]


def sqnr(exact: Tensor, seen: Tensor) -> float:
    """Signal to quantization noise, dB."""
    exact = exact.double()
    return float(20 * torch.log10(exact.norm() / (exact - seen.double()).norm()))


def scaling_of(layer: nn.Module, config: FP8Config, *, keep_fp8: bool = False) -> ScalingState:
    """As for a layer inside a model, whose own call refreshes the weight scales."""
    device = next(layer.parameters()).device
    model = nn.Sequential(layer)
    weights = WeightScales(model, fp8_modules(model), device, keep_fp8=fp8_modules(model) if keep_fp8 else ())
    weights.refresh()
    return ScalingState(weights, config, device)


def fp8(
    layer: nn.Module, recipe: str, *, emulate: bool = True, keep_fp8: bool = False, head: bool = False
) -> nn.Module:
    """`layer`, converted. The delayed recipe is calibrated as training does it: on another batch of the same kind."""
    config = config_of(recipe, emulate=emulate)
    convert_linear(layer, config, head=head)
    if recipe == "delayed":
        state = scaling_of(layer, config, keep_fp8=keep_fp8)
        weight = next(layer.parameters())
        x = torch.randn(256, K, device=weight.device, dtype=weight.dtype)
        products(layer, x, torch.randn(256, N, device=weight.device, dtype=weight.dtype))
        state.end_calibration()
        layer.zero_grad()
    return layer


def products(layer: nn.Module, x: Tensor, dy: Tensor, call: Callable[..., Tensor] | None = None) -> Products:
    """Output and gradients. `call`: a compiled form of `layer`."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = (layer if call is None else call)(x)
    y.backward(dy.to(y.dtype))
    gradients = {f"grad_{name}": parameter.grad for name, parameter in layer.named_parameters()}
    return {"output": y.detach(), "grad_input": x.grad, **gradients}


def check_against_float64(
    layer: nn.Module,
    exact: nn.Module,
    leading: tuple[int, ...],
    *,
    autocast: bool = False,
    call: Callable[..., Tensor] | None = None,
) -> None:
    weight = next(layer.parameters())
    x = torch.randn(*leading, K, device=weight.device, dtype=weight.dtype)
    dy = torch.randn(*leading, N, device=weight.device, dtype=weight.dtype)
    with torch.autocast(weight.device.type, torch.bfloat16, enabled=autocast):
        seen = products(layer, x, dy, call)
    expected = products(exact, x.double(), dy.double())
    assert seen.keys() == expected.keys()
    for name, right in expected.items():
        value = seen[name]
        assert value is not None and right is not None and value.shape == right.shape, name
        assert value.dtype == (torch.bfloat16 if autocast and name == "output" else weight.dtype), name
        if right.any():
            assert sqnr(right, value) > SQNR, (name, sqnr(right, value))
        else:
            assert not value.any(), name


def float64_of(layer: nn.Module) -> nn.Module:
    return copy.deepcopy(layer).double()


# --- numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("leading", LEADING.values(), ids=LEADING)
@pytest.mark.parametrize("recipe", RECIPES)
def test_linear_and_its_gradients_agree_with_float64(
    recipe: str, leading: tuple[int, ...], bias: bool, autocast: bool
) -> None:
    layer = nn.Linear(K, N, bias=bias)
    exact = float64_of(layer)
    fp8(layer, recipe)
    assert type(layer) is FP8Linear
    check_against_float64(layer, exact, leading, autocast=autocast)


@pytest.mark.parametrize("leading", LEADING.values(), ids=LEADING)
@pytest.mark.parametrize("recipe", RECIPES)
def test_conv1d_and_its_gradients_agree_with_float64(recipe: str, leading: tuple[int, ...]) -> None:
    layer = Conv1D(N, K)
    nn.init.normal_(layer.weight)
    exact = float64_of(layer)
    fp8(layer, recipe)
    assert type(layer) is FP8Conv1D
    for autocast in (False, True):
        check_against_float64(layer, exact, leading, autocast=autocast)


@pytest.mark.parametrize("recipe", RECIPES)
def test_bf16_weights_agree_with_float64(recipe: str) -> None:
    layer = nn.Linear(K, N, dtype=torch.bfloat16)
    exact = float64_of(layer)
    check_against_float64(fp8(layer, recipe), exact, (3, 13))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_gemm_kernels_of_the_cpu_agree_with_float64(recipe: str, dtype: torch.dtype) -> None:
    """Without emulation: operand layouts and scale shapes as the FP8 kernels want them."""
    layer = nn.Linear(K, N, dtype=dtype)
    exact = float64_of(layer)
    check_against_float64(fp8(layer, recipe, emulate=False), exact, (3, 13))


@pytest.mark.parametrize("magnitude", [1e-6, 1e4])
@pytest.mark.parametrize("recipe", RECIPES)
def test_scales_follow_the_magnitude_of_every_operand(recipe: str, magnitude: float) -> None:
    layer = nn.Linear(K, N, bias=False)
    nn.init.normal_(layer.weight, std=magnitude)
    exact = float64_of(layer)
    convert_linear(layer, config_of(recipe))
    x, dy = magnitude * torch.randn(32, K), magnitude * torch.randn(32, N)
    if recipe == "delayed":
        state = scaling_of(layer, config_of(recipe))
        products(layer, x, dy)
        state.end_calibration()
    seen = products(layer, x, dy)
    for name, right in products(exact, x.double(), dy.double()).items():
        value = seen[name]
        assert value is not None and right is not None and sqnr(right, value) > SQNR, name


@pytest.mark.parametrize("recipe", RECIPES)
def test_values_are_rounded_to_eight_bits(recipe: str) -> None:
    """Not bf16 under another name: the forward shows the noise of three mantissa bits."""
    layer = nn.Linear(K, N, bias=False)
    exact = float64_of(layer)
    fp8(layer, recipe)
    x = torch.randn(64, K)
    assert sqnr(exact(x.double()).detach(), layer(x).detach()) < 35


@pytest.mark.parametrize("make", [lambda: nn.Linear(K, N), lambda: Conv1D(N, K)], ids=["linear", "conv1d"])
def test_weight_copy_kept_for_a_step_gives_the_same_numbers(make: Callable[[], nn.Module]) -> None:
    layer = make()
    other = copy.deepcopy(layer)
    state = torch.get_rng_state()
    fp8(layer, "delayed", keep_fp8=False)
    torch.set_rng_state(state)
    fp8(other, "delayed", keep_fp8=True)
    assert other.fp8_weight is not None and layer.fp8_weight is None
    x, dy = torch.randn(39, K), torch.randn(39, N)
    seen = products(other, x, dy)
    for name, right in products(layer, x, dy).items():
        torch.testing.assert_close(seen[name], right, rtol=0, atol=0)


# --- autograd -------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    a: Tensor
    b: Tensor
    fast: bool


def gemm_calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The operands of every FP8 GEMM from here on."""
    calls: list[Call] = []
    gemm = linear_module.gemm

    def spy(a: Any, b: Any, out_dtype: torch.dtype, *, fast: bool, emulate: bool) -> Tensor:
        calls.append(Call(a.data, b.data, fast))
        return gemm(a, b, out_dtype, fast=fast, emulate=emulate)

    monkeypatch.setattr(linear_module, "gemm", spy)
    return calls


@pytest.mark.parametrize("recipe", RECIPES)
def test_frozen_weight_costs_no_weight_gradient(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, dy = torch.randn(32, K), torch.randn(32, N)
    counts, flops = {}, {}
    for trains in (True, False):
        layer = fp8(nn.Linear(K, N, bias=False), recipe)
        layer.weight.requires_grad_(trains)
        with monkeypatch.context() as patch, FlopCounterMode(display=False) as counter:
            calls = gemm_calls(patch)
            seen = products(layer, x, dy)
        counts[trains], flops[trains] = len(calls), counter.get_total_flops()
        assert (seen["grad_weight"] is not None) == trains and seen["grad_input"] is not None
    one = 2 * 32 * K * N
    assert flops == {True: 3 * one, False: 2 * one}
    assert counts == {True: 2 if recipe == "rowwise_with_gw_hp" else 3, False: 2}


@pytest.mark.parametrize("recipe", RECIPES)
def test_input_without_gradient_costs_no_input_gradient(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = fp8(nn.Linear(K, N), recipe)
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(32, K)).sum().backward()
    assert layer.weight.grad is not None
    assert counter.get_total_flops() == 2 * 2 * 32 * K * N


@pytest.mark.parametrize("leading", LEADING.values(), ids=LEADING)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_contracted_axis_is_a_multiple_of_16(
    recipe: str, leading: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = fp8(nn.Linear(K, N), recipe)
    calls = gemm_calls(monkeypatch)
    products(layer, torch.randn(*leading, K), torch.randn(*leading, N))
    tokens = {0: 16, 1: 16, 16: 16, 39: 48}[torch.Size(leading).numel()]
    expected = [K, N] if recipe == "rowwise_with_gw_hp" else [K, N, tokens]
    assert [call.a.shape[1] for call in calls] == [call.b.shape[0] for call in calls] == expected
    assert all(size % 16 == 0 for size in expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_formats_and_accumulation_of_the_three_gemms(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """e4m3 for inputs and weights, e5m2 for the gradient of a whole-tensor scale; fast accumulation in forward only."""
    layer = fp8(nn.Linear(K, N), recipe)
    calls = gemm_calls(monkeypatch)
    products(layer, torch.randn(16, K), torch.randn(16, N))
    e4m3, gradient = torch.float8_e4m3fn, torch.float8_e4m3fn if "rowwise" in recipe else torch.float8_e5m2
    expected = [(e4m3, e4m3, True), (gradient, e4m3, False), (gradient, e4m3, False)]
    assert [(call.a.dtype, call.b.dtype, call.fast) for call in calls] == expected[: len(calls)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_accumulate_over_micro_batches(recipe: str) -> None:
    layer = fp8(nn.Linear(K, N), recipe)
    batches = [(torch.randn(8, K), torch.randn(8, N)) for _ in range(3)]
    separate = [products(layer, x, dy)["grad_weight"].clone() for x, dy in batches]  # type: ignore[union-attr]
    layer.zero_grad()
    for x, dy in batches:
        layer(x).backward(dy)
    torch.testing.assert_close(layer.weight.grad, sum(separate))


# --- what conversion leaves alone -----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: nn.Linear(K, N), lambda: Conv1D(N, K)], ids=["linear", "conv1d"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_conversion_keeps_the_module_its_parameters_and_its_hooks(
    recipe: str, make: Callable[[], nn.Module]
) -> None:
    model = nn.Sequential(make())
    layer = model[0]
    before = list(layer.parameters())
    pointers = [p.data_ptr() for p in before]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fired: list[str] = []
    layer.register_forward_pre_hook(lambda *_: fired.append("pre"))
    layer.register_forward_hook(lambda *_: fired.append("forward"))
    layer.register_full_backward_hook(lambda *_: fired.append("backward"))
    layer.weight.register_post_accumulate_grad_hook(lambda _: fired.append("weight"))
    fp8(layer, recipe)
    fired.clear()

    assert model[0] is layer and isinstance(layer, (nn.Linear, Conv1D))
    after = list(layer.parameters())
    assert all(p is q for p, q in zip(before, after, strict=True))
    assert all(type(p) is nn.Parameter for p in after)
    assert [p.data_ptr() for p in after] == pointers
    old = layer.weight.detach().clone()
    model(torch.randn(4, K, requires_grad=True)).sum().backward()
    optimizer.step()
    assert sorted(fired) == ["backward", "forward", "pre", "weight"]
    assert not torch.equal(layer.weight, old)


@pytest.mark.parametrize("recipe", RECIPES)
def test_state_dict_is_the_unconverted_one(recipe: str) -> None:
    layer = nn.Linear(K, N)
    plain = copy.deepcopy(layer)
    fp8(layer, recipe, keep_fp8=True)
    assert all(name in layer._buffers for name in FP8_BUFFERS)
    state = layer.state_dict()
    assert list(state) == list(plain.state_dict()) == ["weight", "bias"]
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    assert all(type(value) is Tensor for value in state.values())
    layer.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(state, strict=True)


@pytest.mark.parametrize("cast", ["bfloat16", "half", "double"])
def test_casting_the_model_leaves_the_fp8_state_alone(cast: str) -> None:
    layer = fp8(nn.Linear(K, N), "delayed", keep_fp8=True)
    before = {name: layer.get_buffer(name) for name in FP8_BUFFERS}
    values = {name: buffer.float().clone() for name, buffer in before.items()}
    getattr(nn.Sequential(layer), cast)()
    assert (
        layer.weight.dtype == {"bfloat16": torch.bfloat16, "half": torch.half, "double": torch.double}[cast]
    )
    for name in FP8_BUFFERS:
        expected = torch.float8_e4m3fn if name == "fp8_weight" else torch.float32
        assert layer.get_buffer(name).dtype == expected
        assert torch.equal(layer.get_buffer(name).float(), values[name])


def test_moving_the_model_moves_the_fp8_state() -> None:
    layer = fp8(nn.Linear(K, N), "delayed", keep_fp8=True)
    nn.Sequential(layer).to("meta")
    assert {layer.get_buffer(name).device.type for name in FP8_BUFFERS} == {"meta"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_printed_layer_tells_what_it_is(recipe: str) -> None:
    shown = repr(fp8(nn.Linear(K, N), recipe))
    assert f"fp8={'rowwise' if 'rowwise' in recipe else recipe}" in shown and "emulated" in shown


class SpecialLinear(nn.Linear):
    """As a quantized layer is: an `nn.Linear` to isinstance."""


@pytest.mark.parametrize("layer", [SpecialLinear(K, N), nn.Bilinear(K, K, N), nn.Conv1d(K, N, 1)])
def test_other_classes_are_not_converted(layer: nn.Module) -> None:
    kind = type(layer)
    with pytest.raises(TypeError, match=f"only nn.Linear and Conv1D.*{kind.__name__}"):
        convert_linear(layer, FP8Config(recipe="tensorwise", emulate=True))
    assert type(layer) is kind


# --- logits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_dithered_values_are_right_on_average(dtype: torch.dtype) -> None:
    """Each is one of the two numbers around it, and neither rows nor columns share an error."""
    torch.manual_seed(0)
    values = torch.rand(50) * torch.tensor([-1.0, 1.0]).repeat(25) + 1.0
    for value in (*values.tolist(), -448.0, 0.0):
        same = torch.full((512, 768), value)
        rounded = dithered(same, dtype)
        assert torch.equal(rounded, rounded.to(dtype).float()) and rounded.unique().numel() <= 2
        step = 2.0 ** math.floor(math.log2(abs(value) or 1.0)) * torch.finfo(dtype).eps
        assert (rounded - value).abs().max() < step
        deviation = step / 2  # the largest there is, of a value in the middle
        assert abs(rounded.double().mean() - value) < 5 * deviation / same.numel() ** 0.5
        assert (rounded.mean(0) - value).abs().max() < 6 * deviation / 512**0.5
        assert (rounded.mean(1) - value).abs().max() < 6 * deviation / 768**0.5


def test_dithered_values_below_the_normal_numbers_are_right_on_average() -> None:
    step = 2.0**-9  # of e4m3 there
    for steps in (0.3, -0.45, 1.3, -2.6, 7.9, 8.3):
        same = torch.full((512, 768), steps * step)
        rounded = cast_saturating(same, torch.ones(()), torch.float8_e4m3fn, dither=True).double() / step
        assert abs(rounded.mean() - steps) < 0.005 and rounded.unique().numel() == 2


def test_dithering_leaves_alone_what_is_not_finite_and_what_fits() -> None:
    special = torch.tensor([[math.inf, -math.inf, math.nan, 0.0, -0.0, 57344.0, 0.25]])
    assert torch.equal(dithered(special, torch.float8_e5m2).view(torch.int32), special.view(torch.int32))
    assert cast_saturating(torch.tensor([[6e4]]), torch.ones(()), E5M2, dither=True).float() == 57344.0


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_a_head_have_no_error_in_common(recipe: str) -> None:
    """Output gradients that are the same for every token: rounded to nearest, the error of all tokens is the same."""
    torch.manual_seed(0)
    tokens = 4096
    x, dy = torch.ones(tokens, K), (torch.rand(N) + 0.5).expand(tokens, N) / tokens
    exact = dy.sum(0).unsqueeze(1).expand(N, K)
    errors = {}
    for head in (False, True):
        layer = fp8(nn.Linear(K, N, bias=False), recipe, head=head)
        if recipe == "delayed":
            layer.fp8_input_scale.fill_(1.0)  # type: ignore[operator,union-attr] # x has no error then
        grad_weight = products(layer, x, dy)["grad_weight"]
        assert grad_weight is not None
        errors[head] = float(((grad_weight - exact) / exact).abs().max())
    assert errors[True] < 0.01
    assert errors[True] < errors[False] / 3 or recipe == "rowwise_with_gw_hp"  # which does not round here


# --- compile --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [False, True], ids=["layer", "head"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_equals_eager_bit_for_bit(recipe: str, head: bool) -> None:
    torch._dynamo.reset()
    layer = fp8(nn.Linear(K, N), recipe, head=head)
    compiled = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True)
    x, dy = torch.randn(3, 13, K), torch.randn(3, 13, N)
    seen = products(compiled._orig_mod, x, dy, compiled)
    for name, right in products(layer, x, dy).items():
        torch.testing.assert_close(seen[name], right, rtol=0, atol=0)
    for name in FP8_BUFFERS:
        torch.testing.assert_close(getattr(compiled, name), getattr(layer, name), rtol=0, atol=0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_dynamic_graph_serves_every_number_of_tokens(recipe: str) -> None:
    torch._dynamo.reset()
    layer = fp8(nn.Linear(K, N), recipe)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    lengths = [13, 16, 7, 24, 32, 33, 48, 100, 64, 3, 19, 8, 128, 50]
    assert len(set(lengths)) == 14
    for length in lengths:
        x, dy = torch.randn(2, length, K), torch.randn(2, length, N)
        seen = products(layer, x, dy, compiled)
        for name, right in products(layer, x, dy).items():
            torch.testing.assert_close(seen[name], right)
    assert counter.frame_count <= 2


# --- on FP8 hardware ------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fp32", "fp32 autocast", "bf16"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_hardware_agrees_with_float64(recipe: str, compiled: bool, mode: str) -> None:
    torch._dynamo.reset()
    dtype = torch.bfloat16 if mode == "bf16" else torch.float32
    layer = nn.Linear(K, N, device="cuda", dtype=dtype)
    exact = float64_of(layer)
    fp8(layer, recipe, emulate=False)
    call = torch.compile(layer, fullgraph=True) if compiled else layer
    for leading in ((1,), (3, 13), (16,), (0,), (4, 256)):
        check_against_float64(layer, exact, leading, autocast=mode == "fp32 autocast", call=call)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_head_on_hardware_agrees_with_float64(recipe: str) -> None:
    torch._dynamo.reset()
    layer = nn.Linear(K, N, device="cuda", dtype=torch.bfloat16)
    exact = float64_of(layer)
    fp8(layer, recipe, emulate=False, head=True)
    check_against_float64(layer, exact, (4, 256), call=torch.compile(layer, fullgraph=True))
    values = torch.randn(300, 500, device="cuda")
    assert torch.equal(torch.compile(dithered)(values, E5M2), dithered(values, E5M2))
    assert torch.equal(dithered(values, E5M2).cpu(), dithered(values.cpu(), E5M2))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_conv1d_on_hardware_agrees_with_float64(recipe: str) -> None:
    layer = Conv1D(N, K).cuda()
    nn.init.normal_(layer.weight)
    exact = float64_of(layer)
    fp8(layer, recipe, emulate=False)
    for leading in ((1,), (3, 13), (0,)):
        check_against_float64(layer, exact, leading, autocast=True)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_emulation_predicts_the_hardware(recipe: str) -> None:
    layer = nn.Linear(K, N, device="cuda", dtype=torch.bfloat16)
    emulated = copy.deepcopy(layer)
    state = torch.cuda.get_rng_state()
    fp8(layer, recipe, emulate=False)
    torch.cuda.set_rng_state(state)
    fp8(emulated, recipe, emulate=True)
    x = torch.randn(512, K, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(512, N, device="cuda", dtype=torch.bfloat16)
    right = products(emulated, x, dy)
    for name, seen in products(layer, x, dy).items():
        predicted = right[name]
        assert seen is not None and predicted is not None
        assert sqnr(predicted, seen) > 40, name  # what rounding to bf16 allows; FP8 itself is near 28


@pytest.mark.gpu
def test_compiled_on_hardware_records_the_amax_of_eager() -> None:
    torch._dynamo.reset()
    layer = fp8(nn.Linear(K, N, device="cuda", dtype=torch.bfloat16), "delayed", emulate=False)
    x = 3 * torch.randn(4, 33, K, device="cuda", dtype=torch.bfloat16)
    dy = 5 * torch.randn(4, 33, N, device="cuda", dtype=torch.bfloat16)
    recorded = {}
    for name, call in (("eager", layer), ("compiled", torch.compile(layer, fullgraph=True))):
        layer.fp8_input_amax.zero_()
        layer.fp8_grad_amax.zero_()
        products(layer, x, dy, call)
        recorded[name] = float(layer.fp8_input_amax), float(layer.fp8_grad_amax)
    assert recorded["compiled"] == recorded["eager"] == (float(x.abs().max()), float(dy.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_inductor_graph_serves_every_number_of_tokens(recipe: str) -> None:
    torch._dynamo.reset()
    layer = nn.Linear(K, N, device="cuda", dtype=torch.bfloat16)
    exact = float64_of(layer)
    fp8(layer, recipe, emulate=False)
    counter = CompileCounterWithBackend("inductor")
    call = torch.compile(layer, backend=counter, fullgraph=True)
    for length in (13, 16, 7, 24, 33, 100, 64, 3):
        check_against_float64(layer, exact, (2, length), call=call)
    assert counter.frame_count <= 2
