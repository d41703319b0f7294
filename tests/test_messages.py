"""Test that wrong arguments of public functions give errors that name the argument."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe import ops

X = np.ones((5, 64), np.float32)
IDS, WEIGHTS = np.zeros((5, 2), np.int32), np.ones((5, 2), np.float32)


@functools.cache
def moe():
    return nvfp4.NVFP4MoE(8, 64, 32, top_k=2, rngs=nnx.Rngs(0))


@functools.cache
def linear():
    return nvfp4.NVFP4Linear(64, 32, rngs=nnx.Rngs(0))


@functools.cache
def matrix(*shape):
    return nvfp4.quantize(np.ones(shape or (32, 64), np.float32))


@functools.cache
def params():
    shapes = ((4, 32, 64), (4, 32, 64), (4, 64, 32))
    return nvfp4.quantize_experts(*(np.ones(shape, np.float32) for shape in shapes))


def block(num_experts=8, hidden=64, intermediate=32, **options):
    options = {"top_k": 2, "rngs": nnx.Rngs(0)} | options
    return nvfp4.NVFP4MoE(num_experts, hidden, intermediate, **options)


def layer(in_features=64, out_features=32, **options):
    return nvfp4.NVFP4Linear(in_features, out_features, **{"rngs": nnx.Rngs(0)} | options)


def on_cpus():
    mesh = jax.make_mesh((1,), ("expert",), devices=jax.devices("cpu")[:1])
    return block(mesh=mesh, dispatch="ragged")


ARRAY = r"an array of float32 \(32, 64\)"
WRONG = {
    # Blocks.
    "width": (
        lambda: moe()(X[:, :32]),
        ValueError,
        r"^x: expected shape \[\.\.\., 64\].*\(5, 32\)",
    ),
    "routed width": (lambda: moe().route(X[:, :32]), ValueError, r"^x: expected .*64"),
    "width of experts": (
        lambda: moe().experts(X[:, :32], IDS, WEIGHTS),
        ValueError,
        r"^x: expected .*64",
    ),
    "scalar": (lambda: moe()(jnp.float32(1)), ValueError, r"^x: expected .*got \(\)"),
    "list": (lambda: moe()(X.tolist()), TypeError, "^x: expected an array .*got list"),
    "ids that are weights": (
        lambda: moe().experts(X, WEIGHTS, IDS),
        TypeError,
        "^expert_ids: expected integers, got float32",
    ),
    "ids of few tokens": (
        lambda: moe().experts(X, IDS[:3], WEIGHTS[:3]),
        ValueError,
        r"^expert_ids: expected shape \[5, k\].*got \(3, 2\)",
    ),
    "weights of few experts": (
        lambda: moe().experts(X, IDS, WEIGHTS[:, :1]),
        ValueError,
        r"^expert_weights: expected shape \(5, 2\).*got \(5, 1\)",
    ),
    "top_k": (
        lambda: block(top_k=9),
        ValueError,
        "^top_k: expected at most num_experts = 8, got 9",
    ),
    "top_k of a router": (lambda: block(top_k=None, router=nvfp4.Router(9)), ValueError, "^top_k"),
    "top_k of 0": (lambda: block(top_k=0), ValueError, "^top_k: expected at least 1, got 0"),
    "top_k of a half": (lambda: block(top_k=1.5), TypeError, "^top_k: expected an integer"),
    "top_k of text": (lambda: nvfp4.Router("2"), TypeError, "^top_k: expected an integer"),
    "router": (lambda: block(top_k=None, router=2), TypeError, "^router: expected a Router"),
    "hidden": (lambda: block(hidden=100), ValueError, "^hidden: .*multiple of 16.*got 100"),
    "hidden of 0": (lambda: block(hidden=0), ValueError, "^hidden: .*got 0"),
    "hidden below 0": (lambda: block(hidden=-16), ValueError, "^hidden: .*got -16"),
    "hidden of a float": (lambda: block(hidden=64.0), TypeError, "^hidden: expected an integer"),
    "intermediate": (lambda: block(intermediate=100), ValueError, "^intermediate: .*got 100"),
    "no experts": (lambda: block(num_experts=0), ValueError, "^num_experts: .*got 0"),
    "weights of a block": (lambda: block(params=X), TypeError, "^params: expected MoEParams or"),
    "seed": (lambda: block(rngs=0), TypeError, "^rngs: expected an nnx.Rngs.*got int"),
    "target": (lambda: block(target="cpu"), TypeError, "^target: expected a Target or None"),
    "ragged": (on_cpus, ValueError, "^dispatch: expected GPUs for 'ragged', got CPUs"),
    # Linear layers.
    "inputs": (lambda: linear()(X[:, :32]), ValueError, r"^x: expected shape \[\.\.\., 64\]"),
    "list of inputs": (lambda: linear()(X.tolist()), TypeError, "^x: expected an array"),
    "in_features": (lambda: layer(100), ValueError, "^in_features: .*multiple of 16.*got 100"),
    "out_features": (lambda: layer(64, 0), ValueError, "^out_features: .*got 0"),
    "weight": (
        lambda: layer(weight=jnp.ones((32, 64))),
        TypeError,
        f"^weight: expected an NVFP4Tensor, got {ARRAY}; `nvfp4.quantize`",
    ),
    "bias": (lambda: layer(bias=[0.0] * 32), TypeError, "^bias: expected an array"),
    "dtype": (lambda: layer(dtype="float9"), ValueError, "^dtype: expected bfloat16 .*'float9'"),
    "declared": (
        lambda: layer(checkpoint_scheme="w3"),
        ValueError,
        "^checkpoint_scheme: expected one of .*w4a16.*got 'w3'",
    ),
    "backend": (
        lambda: layer(backend="marlin"),
        ValueError,
        r"^backend: expected one of \['moe_w4a4_sm120'.*\], got 'marlin'",
    ),
    "seed of a layer": (lambda: layer(rngs=0), TypeError, "^rngs: expected an nnx.Rngs"),
    "kernel": (
        lambda: nvfp4.NVFP4Linear.from_dense(np.ones((100, 32))),
        ValueError,
        "^kernel: .*multiple of 16.*got 100",
    ),
    # Ops.
    "array for a weight": (
        lambda: ops.linear(X, jnp.ones((32, 64))),
        TypeError,
        f"^weight: expected an NVFP4Tensor, got {ARRAY}; `nvfp4.quantize`",
    ),
    "experts for a weight": (lambda: ops.linear(X, params()), TypeError, "^weight: .*MoEParams"),
    "list for x": (lambda: ops.linear(X.tolist(), matrix()), TypeError, "^x: .*got list"),
    "None for x": (lambda: ops.linear(None, matrix()), TypeError, "^x: .*got None"),
    "scales of a linear": (
        lambda: ops.linear(X, matrix(), input_scale=np.ones(3), scheme="w4a4"),
        ValueError,
        r"^input_scale: expected one number, got shape \(3,\)",
    ),
    "scales of groups": (
        lambda: ops.grouped_gemm(
            X, matrix(2, 32, 64), IDS[:2, 0], input_scale=np.ones(5), scheme="w4a4"
        ),
        ValueError,
        r"^input_scale: expected one number or shape \(2,\), got shape \(5,\)",
    ),
    "list of groups": (
        lambda: ops.grouped_gemm(X, matrix(2, 32, 64), [2, 3]),
        TypeError,
        "^group_sizes: expected an array",
    ),
    "matrix for experts": (
        lambda: ops.moe_mlp(X, matrix(), IDS, WEIGHTS),
        TypeError,
        "^params: expected MoEParams, got NVFP4Tensor; `nvfp4.quantize_experts`",
    ),
    "module for experts": (
        lambda: ops.moe_mlp(X, moe(), IDS, WEIGHTS),
        TypeError,
        "^params: expected MoEParams, got NVFP4MoE",
    ),
    "name of a target": (
        lambda: ops.moe_mlp(X, params(), IDS, WEIGHTS, target="cuda"),
        TypeError,
        r"^target: expected a Target or None, got str; for example nvfp4\.Target",
    ),
    "router of an op": (lambda: ops.route(2, X), TypeError, "^router: expected a Router"),
    # Weights.
    "quantize text": (lambda: nvfp4.quantize("a"), TypeError, "^x: expected an array .*got str"),
    "quantize twice": (lambda: nvfp4.quantize(matrix()), TypeError, "^x: .*got NVFP4Tensor"),
    "scales of quantize": (
        lambda: nvfp4.quantize(X, np.ones(3, np.float32)),
        ValueError,
        r"^global_scale: expected a shape that broadcasts to \(\).*got \(3,\)",
    ),
    "no up": (lambda: nvfp4.quantize_experts(None, None, X), ValueError, "^up: .*got None"),
    "down of two axes": (
        lambda: nvfp4.quantize_experts(None, X, X),
        ValueError,
        "^down: expected three axes",
    ),
    "no scales": (
        lambda: nvfp4.NVFP4Tensor.from_packed(np.ones((4, 8), np.uint8), None, 1.0),
        TypeError,
        "^block_scale: expected an array",
    ),
    "capability": (lambda: nvfp4.Target("cuda", (9,)), ValueError, "^compute_capability: .*pair"),
    "capability text": (lambda: nvfp4.Target("cuda", "9.0"), ValueError, "^compute_capability"),
    # Files.
    "no folder": (
        lambda: nvfp4.restore("/nonexist", moe()),
        nvfp4.CheckpointError,
        "^/nonexist is not a folder that exists",
    ),
    "folder None": (lambda: nvfp4.restore(None, moe()), TypeError, "^path: expected a str"),
    "no program": (lambda: nvfp4.load_exported(b"abc"), ValueError, "^serialized: expected the"),
    "text program": (lambda: nvfp4.load_exported("abc"), TypeError, "^serialized: expected bytes"),
    # Choices.
    "op": (
        lambda: nvfp4.explain(nvfp4.Problem("moe", None, nvfp4.Target("cpu"))),
        nvfp4.NoBackendError,
        "^op: expected one of .*moe_mlp.*got 'moe'",
    ),
    "target of explain": (lambda: nvfp4.explain(moe(), target="cuda"), TypeError, "^target: "),
}


@pytest.mark.parametrize(("call", "kind", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("name", sorted(set(ops.__all__) - {"chain_calls", "prepare"}))
def test_each_op_names_an_argument_of_a_wrong_type(name):
    """Each argument in turn is a list, and the others are what they may be."""
    op = getattr(ops, name)
    parameters = list(inspect.signature(op).parameters.values())
    required = [one for one in parameters if one.default is one.empty]
    arrays = [one.name for one in required if "jaxtyping" in str(one.annotation)]
    assert arrays
    for wrong in arrays:
        given = {
            one.name: object.__new__(nvfp4.Router) if one.annotation is nvfp4.Router else X
            for one in required
        }
        given |= {one.name: matrix() for one in required if one.annotation is nvfp4.NVFP4Tensor} | {
            one.name: params() for one in required if one.annotation is nvfp4.MoEParams
        }
        given[wrong] = [[1.0]]
        positional = [given[one.name] for one in required if one.kind is not one.KEYWORD_ONLY]
        named = {one.name: given[one.name] for one in required if one.kind is one.KEYWORD_ONLY}
        with pytest.raises(TypeError, match=f"^{wrong}: expected an array .*got list"):
            op(*positional, **named)


def test_tables_leave_out_backends_of_other_ops():
    choice = nvfp4.explain(moe())
    assert "attention" not in str(choice)
    # A notebook shows the repr of the last line of a cell.
    for text in (str(choice), repr(choice)):
        assert "moe_w4a16_sm90" in text
        assert "does not implement moe_mlp" not in text
    assert [name for name in choice.reasons if not name.startswith("moe_")] == []
    assert "not moe_w4a16_sm90: needs cuda" in str(nvfp4.explain(moe(), target=nvfp4.Target("cpu")))
    with pytest.raises(nvfp4.NoBackendError) as caught:
        ops.moe_mlp(X, params(), IDS, WEIGHTS, backend="attention_cpu")
    lines = str(caught.value).splitlines()[1:]
    assert [line for line in lines if "does not implement" in line] == [
        "  attention_cpu: does not implement moe_mlp"
    ]


def test_explain_speaks_of_no_checkpoint_that_there_is_not():
    made = nvfp4.NVFP4Linear.from_dense(np.ones((64, 32), np.float32))
    for target in (nvfp4.Target("cpu"), nvfp4.Target("cuda", (10, 0))):
        assert "checkpoint" not in str(nvfp4.explain(made, target=target))


def frozen(w):
    return jax.lax.stop_gradient(w)


GRADIENTS = {
    "quantize": lambda w: nvfp4.quantize(w).dequantize(),
    "quantize_nvfp4": lambda w: ops.quantize_nvfp4(w).dequantize(),
    "from_dense": lambda w: nvfp4.NVFP4Linear.from_dense(w)(jnp.ones((1, 64))),
    "jit": jax.jit(lambda w: nvfp4.quantize(w).dequantize()),
}


@pytest.mark.parametrize("function", GRADIENTS.values(), ids=GRADIENTS)
def test_a_gradient_through_codes_is_refused(function):
    w = jax.random.normal(jax.random.key(0), (64, 64))
    with pytest.raises(ValueError, match=r"quantize\w* has no derivative.*straight-through") as e:
        jax.grad(lambda w: function(w).astype(jnp.float32).sum())(w)
    lines = re.search(r"write: (.*?)\. If", str(e.value))
    assert lines

    def loss(w):
        scope = {"w": w, "jax": jax, "nvfp4": nvfp4}
        exec(lines[1].replace("; ", "\n"), scope)
        return (3 * scope["w"]).sum()

    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(w), np.full(w.shape, 3, np.float32))


def test_constants_may_be_quantized_inside_a_gradient():
    w = jax.random.normal(jax.random.key(0), (32, 64))

    def loss(x, w):
        return nvfp4.quantize(w).dequantize().sum() * x.sum()

    for run in (loss, jax.jit(loss)):
        assert jax.grad(run)(X, w)[0, 0] != 0
    gradient = jax.grad(lambda w: (nvfp4.quantize(frozen(w)).dequantize() * w).sum())(w)
    np.testing.assert_array_equal(gradient, nvfp4.quantize(w).dequantize())
