"""Compare `ops.route`, its CUDA kernel and its derivative with `routing.route`.

`test_routing` compares `routing.route` with plain numpy.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.extensions import cuda_calls
from support.kernels.axes import axis
from support.kernels.router_suite import (
    FORMS,
    RouterSuite,
    assert_routes_alike,
    exact_weights,
    with_experts,
)
from support.ops.routers import FAMILIES, inputs

from jax_nvfp4_moe import Target, ops
from jax_nvfp4_moe.numerics.routing import Router, route
from jax_nvfp4_moe.testing import assert_as_accurate_as

forms = pytest.mark.parametrize("form", FORMS)


def on_cuda(router, logits, bias=None):
    """Run the kernel, and move its results to the host."""
    cuda_calls.register()
    target = Target("cuda", (9, 0))  # any target with the kernel gives the same program
    call = jax.jit(lambda *operands: ops.route(router, *operands, target=target))
    return tuple(map(np.asarray, call(logits, bias)))


@pytest.mark.gpu
class TestRouter(RouterSuite):
    experts = axis(1, 8, 60, 128, 256, 512)
    top_k = axis(1, 8, 32)

    @pytest.fixture
    def run(self):
        return on_cuda


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_kernel_routes_as_the_families(family):
    expected, router, biased = FAMILIES[family]
    logits, bias = inputs()
    ids, weights = on_cuda(router, logits, bias if biased else None)
    true_ids, true_weights = expected(np.asarray(logits, np.float64), np.asarray(bias, np.float64))
    np.testing.assert_array_equal(ids, true_ids)
    yardstick = route(router, logits, bias if biased else None)[1]
    assert_as_accurate_as(weights, yardstick, true_weights)


@pytest.mark.gpu
@forms
@pytest.mark.parametrize("tokens", [0, 1])
def test_kernel_on_few_tokens(form, tokens):
    router = with_experts(FORMS[form], 128, 8)
    logits, bias = inputs(tokens, 128)
    assert_routes_alike(router, logits, bias, on_cuda(router, logits, bias))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("experts", "groups", "kept"), [(1024, 8, 4), (1024, 256, 32), (96, 48, 9)]
)
def test_kernel_on_many_groups(experts, groups, kept):
    router = Router(9, score="sigmoid", num_groups=groups, groups_kept=kept)
    logits, bias = inputs(70, experts)
    assert_routes_alike(router, logits, bias, on_cuda(router, logits, bias))


@pytest.mark.gpu
@forms
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_kernel_keeps_non_finite_tokens_alone(form, value):
    router = with_experts(FORMS[form], 60, 8)
    logits, bias = inputs(9, 60)
    clean = on_cuda(router, logits, bias)
    spoiled = logits.copy()
    spoiled[4, 33] = spoiled[5] = value
    ids, weights = on_cuda(router, spoiled, bias)
    assert ((ids >= 0) & (ids < 60)).all()
    assert all(len(set(row)) == 8 for row in ids)
    others = [0, 1, 2, 3, 6, 7, 8]
    np.testing.assert_array_equal(ids[others], clean[0][others])
    np.testing.assert_array_equal(weights[others], clean[1][others])
    if np.isnan(value) and router.select == "logits":
        assert ids[4, 0] == 33
        np.testing.assert_array_equal(ids[5], np.arange(8))


@pytest.mark.gpu
@forms
def test_kernel_gives_the_same_bits_twice_and_alone(form):
    router = with_experts(FORMS[form], 256, 8)
    logits, bias = inputs(70, 256)
    first, second = on_cuda(router, logits, bias), on_cuda(router, logits, bias)
    alone = on_cuda(router, logits[41:43], bias)
    for one, two, few in zip(first, second, alone, strict=True):
        assert one.tobytes() == two.tobytes()
        assert few.tobytes() == one[41:43].tobytes()


def test_bounds_catch_a_wrong_choice_and_a_wrong_weight():
    """The bounds catch one expert that is not the best, and one weight that is off by 1e-5."""
    logits, _ = inputs(70, 128)
    ids, weights = map(np.asarray, route(Router(8), logits))
    assert_routes_alike(Router(8), logits, None, (ids, weights))
    with pytest.raises(AssertionError, match="more than rounding"):
        assert_routes_alike(Router(8), logits, None, (ids[:, ::-1], weights[:, ::-1]))
    swapped = ids.copy()
    swapped[7, 7] = route(Router(9), logits)[0][7, 8]
    honest = exact_weights(Router(8), logits, swapped).astype(np.float32)
    with pytest.raises(AssertionError):
        assert_routes_alike(Router(8), logits, None, (swapped, honest))
    wrong = weights.copy()
    wrong[7, 0] *= 1 + 1e-5
    with pytest.raises(AssertionError, match=r"over 2\.0 x the"):
        assert_routes_alike(Router(8), logits, None, (ids, wrong))


def test_the_op_checks_shapes_and_runs_the_reference_on_a_cpu():
    logits, bias = inputs(5, 16)
    cpu = Target("cpu")
    got = ops.route(Router(4), logits, bias, target=cpu)
    for one, two in zip(got, route(Router(4), logits, bias), strict=True):
        np.testing.assert_array_equal(one, two)
    with pytest.raises(ValueError, match=r"bias: expected shape \(16,\)"):
        ops.route(Router(4), logits, bias[:3], target=cpu)
    with pytest.raises(ValueError, match=r"logits: expected shape \[t, e\]"):
        ops.route(Router(4), logits[0], target=cpu)
    with pytest.raises(ValueError, match="top_k: expected at most 16"):
        ops.route(Router(17), logits, target=cpu)


@forms
def test_the_op_is_one_call_on_a_gpu(form):
    router = with_experts(FORMS[form], 16, 4)
    traced = jax.jit(lambda *o: ops.route(router, *o, target=Target("cuda", (9, 0))))
    text = traced.trace(*inputs(5)).lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"custom_call @(\S+?)\(", text) == ["nvfp4_route_cuda"]


def mix_of(logits):
    return jax.random.normal(jax.random.key(9), (logits.shape[0], 4))


def gradients(routing, logits, bias):
    """Return derivatives of a mix of the weights, by logits and by the correction bias."""
    mix = mix_of(logits)
    return jax.jit(jax.grad(lambda *o: (routing(*o)[1] * mix).sum(), (0, 1)))(logits, bias)


def exact_gradient(router, logits, ids):
    """Return the derivative by logits in float64: central differences, with an error of 1e-9."""
    logits, mix = np.asarray(logits, np.float64), np.asarray(mix_of(logits), np.float64)
    step = 1e-4
    columns = []
    for expert in range(logits.shape[1]):
        moved = step * (np.arange(logits.shape[1]) == expert)[None]
        ahead, behind = (exact_weights(router, logits + sign * moved, ids) for sign in (1, -1))
        columns.append(((ahead - behind) * mix).sum(-1) / (2 * step))
    return np.stack(columns, -1)


def assert_gradients_alike(router, got, logits, bias):
    """Assert at most twice the worst error that `routing.route` has in float32."""
    yardstick = gradients(lambda *o: route(router, *o), logits, bias)[0]
    truth = exact_gradient(router, logits, np.asarray(route(router, logits, bias)[0]))
    assert_as_accurate_as(got[0], yardstick, truth)
    np.testing.assert_array_equal(got[1], jnp.zeros_like(bias))  # the bias moves only the choice


@forms
def test_bound_catches_a_wrong_derivative(form):
    router, operands = with_experts(FORMS[form], 16, 4), inputs(5)
    by_logits, by_bias = gradients(lambda *o: route(router, *o), *operands)
    worst = np.unravel_index(np.abs(np.asarray(by_logits)).argmax(), by_logits.shape)
    wrong = by_logits.at[worst].multiply(1 + 1e-4)
    with pytest.raises(AssertionError, match=r"over 2\.0 x the"):
        assert_gradients_alike(router, (wrong, by_bias), *operands)


@forms
def test_the_derivative_of_the_op_is_that_of_the_definition(form):
    router, operands = with_experts(FORMS[form], 16, 4), inputs(5)
    got = gradients(lambda *o: ops.route(router, *o, backend="reference"), *operands)
    assert_gradients_alike(router, got, *operands)


@forms
def test_the_op_is_differentiated_around_its_call_on_a_gpu(form):
    router = with_experts(FORMS[form], 16, 4)

    def weights(*operands):
        return ops.route(router, *operands, target=Target("cuda", (9, 0)))[1].sum()

    traced = jax.jit(jax.grad(weights, argnums=(0, 1))).trace(*inputs(5))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"custom_call @(nvfp4\S+?)\(", text) == ["nvfp4_route_cuda"]


@pytest.mark.gpu
@forms
def test_kernel_has_the_derivative_of_the_definition(form):
    router, operands = with_experts(FORMS[form], 16, 4), inputs(5)
    got = gradients(lambda *o: ops.route(router, *o, backend="route_cuda"), *operands)
    assert_gradients_alike(router, got, *operands)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": jnp.zeros((3, 8), jnp.int32)}, "logits: expected float32, got int32"),
        ({"logits": jnp.zeros((4, 8))}, r"expert_ids \[t, k\]: expected \[4, 2\], got \[3, 2\]"),
        ({"bias": jnp.zeros(7)}, r"bias \[e\]: expected \[8\], got \[7\]"),
        ({"score": "tanh"}, "score: expected one of softmax, sigmoid, sqrt_softplus, got tanh"),
        ({"num_groups": np.int32(3)}, r"e \(logits\): expected a positive multiple of 3, got 8"),
        ({"groups_kept": np.int32(9)}, "groups_kept: expected at most 8, got 9"),
        ({"num_groups": np.int32(8)}, r"k \(expert_ids\): expected at most 1, got 2"),
    ],
)
def test_kernel_names_a_wrong_operand(changes, message):
    cuda_calls.register()
    good = {"logits": jnp.zeros((3, 8)), "bias": jnp.zeros(0)}
    options = {
        "score": "softmax",
        "select_logits": False,
        "renormalize": True,
        "num_groups": np.int32(1),
        "groups_kept": np.int32(1),
        "scaling": np.float32(1),
    }
    if "groups_kept" in changes:
        options["num_groups"] = np.int32(8)
    operands = good | {name: changes[name] for name in good if name in changes}
    options |= {name: changes[name] for name in options if name in changes}
    shapes = [jax.ShapeDtypeStruct((3, 2), dtype) for dtype in (jnp.int32, jnp.float32)]
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=message):
        jax.block_until_ready(
            jax.ffi.ffi_call("nvfp4_route_cuda", shapes)(*operands.values(), **options)
        )
