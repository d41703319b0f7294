"""Test that weights are always prepared for the kernel that runs the call."""

import dataclasses
import logging
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_nvfp4_moe import (
    NoBackendError,
    NVFP4Linear,
    NVFP4MoE,
    Problem,
    Scheme,
    Target,
    explain,
    ops,
    prepare,
    quantize,
)
from jax_nvfp4_moe.backends import resolution
from jax_nvfp4_moe.ops.conversion import forget_reports
from jax_nvfp4_moe.ops.records import RECORDS
from jax_nvfp4_moe.testing import random_moe_params

CPU = Target("cpu")


def cuda(major, minor):
    return Target("cuda", (major, minor))


# Facts that differ from those of bfloat16 calls with few experts and a small top-k.
FACTS = {
    "12.0 in float32": (cuda(12, 0), "float32", 2),
    "12.1 in float32": (cuda(12, 1), "float32", 2),
    "10.0 in float16": (cuda(10, 0), "float16", 2),
    "10.3 in float32": (cuda(10, 3), "float32", 2),
    "a top-k of 40": (cuda(9, 0), "bfloat16", 40),
    "a top-k of 40 on a CPU": (CPU, "bfloat16", 40),
}


def conversions(run, *args, target, caplog):
    """Return what the log says about weights that a call converts, and the lowered program."""
    forget_reports()
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="jax_nvfp4_moe"):
        traced = jax.jit(run).trace(*args)
    text = traced.lower(lowering_platforms=(target.platform,)).as_text()
    return [r.message for r in caplog.records if "converts weights" in r.message], text


@pytest.mark.parametrize(("target", "dtype", "top_k"), FACTS.values(), ids=FACTS)
def test_a_block_is_prepared_for_its_own_calls(target, dtype, top_k, caplog):
    sizes = {"num_experts": 48, "hidden": 64, "intermediate": 32}
    moe = NVFP4MoE(
        **sizes,
        top_k=top_k,
        params=random_moe_params(jax.random.key(0), **sizes),
        checkpoint_scheme="w4a4",
        scheme="w4a4",
        target=target,
        dtype=dtype,
        rngs=nnx.Rngs(0),
    )
    said, text = conversions(
        lambda moe, x: moe(x), moe, jnp.zeros((4, 64)), target=target, caplog=caplog
    )
    assert said == []
    if top_k <= 32:
        assert re.findall(r"nvfp4_moe_\w+", text)


@pytest.mark.parametrize(
    ("target", "dtype"), [(cuda(12, 0), "float32"), (cuda(10, 0), "float16")], ids=str
)
def test_a_linear_is_prepared_for_its_own_calls(target, dtype, caplog):
    linear = NVFP4Linear(
        64,
        32,
        input_scale=jnp.float32(1.0),
        checkpoint_scheme="w4a4",
        target=target,
        dtype=dtype,
        rngs=nnx.Rngs(0),
    )
    said, text = conversions(
        lambda linear, x: linear(x), linear, jnp.zeros((4, 64)), target=target, caplog=caplog
    )
    assert said == []
    assert "nvfp4_grouped_gemm_w4a16_sm80" in text


def test_a_call_follows_the_plan_of_its_module():
    """The plan follows the scheme that the file declares, whatever the weights suggest."""
    params = random_moe_params(jax.random.key(0), num_experts=4, hidden=64, intermediate=32)
    assert params.has_input_scales
    moe = NVFP4MoE(
        4, 64, 32, top_k=2, params=params, target=cuda(12, 0), rngs=nnx.Rngs(0)
    )  # declared w4a16, as in a relabeled file
    plan = moe.experts.plan
    assert (plan.scheme, plan.backend.name, plan.layout) == ("w4a16", "moe_w4a16_sm80", "mma_64x64")
    assert plan.problem == dataclasses.replace(
        explain(moe).problem, unavailable=plan.problem.unavailable
    )
    facts = plan.problem
    assert (facts.num_experts, facts.top_k, facts.hidden, facts.intermediate) == (4, 2, 64, 32)
    assert (facts.dtype, facts.activation) == ("bfloat16", "silu")
    traced = jax.jit(lambda moe, x: moe(x)).trace(moe, jnp.zeros((4, 64)))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "nvfp4_moe_w4a16_sm80" in text


def test_a_call_that_the_planned_kernel_cannot_run_is_refused():
    params = random_moe_params(jax.random.key(0), num_experts=48, hidden=64, intermediate=32)
    moe = NVFP4MoE(48, 64, 32, top_k=2, params=params, target=cuda(9, 0), rngs=nnx.Rngs(0))
    x, ids = jnp.zeros((1, 64)), jnp.zeros((1, 33), jnp.int32)
    with pytest.raises(NoBackendError, match=r"'moe_w4a16_sm90', which cannot run .*top_k of at m"):
        jax.eval_shape(lambda: moe.experts(x, ids, jnp.ones((1, 33))))
    plan = moe.experts.plan
    with pytest.raises(NoBackendError, match="at most 512 experts"):
        plan.check(num_experts=513)
    plan.check(num_experts=512, top_k=32, dtype="float32")


@pytest.mark.parametrize("layout", ["canonical", "mma_64x64", "fp4_64x64"])
def test_weights_in_any_layout_are_prepared_for_the_plan(layout):
    params = random_moe_params(jax.random.key(0), num_experts=4, hidden=64, intermediate=64)
    moe = NVFP4MoE(
        4, 64, 64, top_k=2, params=params.to_layout(layout), target=cuda(9, 0), rngs=nnx.Rngs(0)
    )
    stored = moe.experts.params.get_value()
    assert stored.layout == moe.experts.plan.layout == "mma_64x64"
    same = stored.gate_up.dequantize() == params.gate_up.dequantize()
    assert bool(same.all())


def test_prepare_takes_the_facts_of_the_calls():
    params = random_moe_params(jax.random.key(0), num_experts=4, hidden=64, intermediate=64)
    how = {"scheme": "w4a4", "target": cuda(12, 0)}
    assert prepare(params, **how).layout == "fp4_64x64"
    assert prepare(params, **how, dtype=jnp.float32).layout == "mma_64x64"
    assert prepare(params, **how, top_k=33).layout == "canonical"


@pytest.mark.parametrize(
    ("backend", "dtype", "want"),
    [
        ("reference", "bfloat16", "reference"),
        (["reference", "moe_w4a4_sm120"], "bfloat16", "reference"),
        (("moe_w4a4_sm120", "moe_w4a16_sm80"), "bfloat16", "moe_w4a4_sm120"),
        (("moe_w4a4_sm120", "moe_w4a16_sm80"), "float32", "moe_w4a16_sm80"),
        (["moe_w4a16_cpu", "reference"], "bfloat16", "reference"),
    ],
)
def test_backends_are_tried_in_the_order_of_their_names(backend, dtype, want):
    params = random_moe_params(jax.random.key(0), num_experts=4, hidden=64, intermediate=32)
    how = {"scheme": "w4a4", "target": cuda(12, 0), "backend": backend}
    given = {"params": params, "checkpoint_scheme": "w4a4", "dtype": dtype}
    moe = NVFP4MoE(4, 64, 32, top_k=2, **given, **how, rngs=nnx.Rngs(0))
    assert explain(moe).backend == want
    x, ids = jnp.zeros((3, 64), dtype), jnp.zeros((3, 2), jnp.int32)
    args = moe.experts.params.get_value(), ids, jnp.ones((3, 2))
    op = jax.jit(lambda x, *args: ops.moe_mlp(x, *args, **how)).trace(x, *args)
    product = jax.jit(lambda x: ops.linear(x, quantize(jnp.ones((32, 64))), **how | NO_SCALES))
    stem = want.removeprefix("moe_")
    for traced, target in ((op, f"nvfp4_{want}"), (product.trace(x), f"nvfp4_grouped_gemm_{stem}")):
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert re.findall(r"nvfp4_\w+", text)[:1] == ([] if want == "reference" else [target])


NO_SCALES = {"scheme": "w4a4_unit_scale"}


@pytest.mark.parametrize(
    ("backend", "error", "message"),
    [
        ("marlin", ValueError, "backend: expected one of .*got 'marlin'"),
        (["reference", "marlin"], ValueError, "backend: expected one of .*got 'marlin'"),
        ([], ValueError, r"backend: expected a name or a sequence of names, got \[\]"),
        ([None], ValueError, r"backend: expected a name or a sequence of names, got \[None\]"),
        (
            ("moe_w4a16_cpu", "moe_w4a16_sm90"),
            NoBackendError,
            "backend 'moe_w4a16_cpu' or 'moe_w4a16_sm90' cannot run",
        ),
    ],
)
def test_backends_that_cannot_be(backend, error, message):
    problem = Problem("moe_mlp", Scheme.W4A16, cuda(12, 0))
    with pytest.raises(error, match=message):
        resolution.resolve(problem, RECORDS, backend=backend)


def test_explain_decides_again_for_another_device():
    params = random_moe_params(jax.random.key(0), num_experts=4, hidden=64, intermediate=32)
    given = {"params": params, "checkpoint_scheme": "w4a4", "target": cuda(9, 0)}
    moe = NVFP4MoE(4, 64, 32, top_k=2, **given, rngs=nnx.Rngs(0))
    assert (explain(moe).scheme, explain(moe).backend) == ("w4a16", "moe_w4a16_sm90")
    there = explain(moe, target=cuda(10, 0))
    assert (there.scheme, there.backend) == ("w4a4", "moe_w4a4_sm100")
    assert there.problem.target == cuda(10, 0)


def test_explain_looks_into_any_flax_module():
    class Model(nnx.Module):
        def __init__(self):
            self.first = NVFP4Linear(64, 32, target=cuda(9, 0), rngs=nnx.Rngs(0))

    assert explain(Model()).backend == "moe_w4a16_sm90"
    with pytest.raises(ValueError, match="Linear contains none"):
        explain(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


def test_other_weights_are_planned_for_their_number():
    """A kernel accepts at most 512 experts. 600 copies run on the reference, in its layout."""
    params = random_moe_params(jax.random.key(0), num_experts=500, hidden=16, intermediate=16)
    moe = NVFP4MoE(500, 16, 16, top_k=2, params=params, target=cuda(9, 0), rngs=nnx.Rngs(0))
    assert moe.experts.plan.backend.name == "moe_w4a16_sm90"
    stored = moe.experts.params.get_value()
    index = np.arange(600) % 500
    moe.experts.replace_params(
        jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[index]), stored)
    )
    assert moe.experts.plan.backend.name == "reference"
    assert moe.experts.params.get_value().layout == "canonical"


def test_tokens_pass_the_module_the_op_and_the_lowering_alone():
    """Besides checks, no wrapper and no second choice are on the way to the FFI call."""
    params = random_moe_params(jax.random.key(0), num_experts=4, hidden=64, intermediate=32)
    moe = NVFP4MoE(4, 64, 32, top_k=2, params=params, target=cuda(9, 0), rngs=nnx.Rngs(0))
    passed = []

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and "jax_nvfp4_moe" in code.co_filename:
            given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            shapes = [getattr(frame.f_locals.get(name), "shape", None) for name in given]
            if (5, 64) in shapes:
                passed.append(code.co_qualname)

    x, ids = jnp.zeros((5, 64), jnp.bfloat16), jnp.zeros((5, 2), jnp.int32)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        jax.jit(lambda moe, x, ids: moe.experts(x, ids, jnp.ones((5, 2)))).trace(moe, x, ids)
    finally:
        sys.setprofile(before)
    checks = "check_routing", "check_tokens", "check_kind", "check_call", "check_floats"
    typed = "_is_of", "is_array", "vary_like"  # parts of checks, and of types in `shard_map`
    assert [name for name in passed if name not in (*checks, *typed)] == [
        "RoutedExperts.__call__",
        "moe_mlp",
        "lower_moe",
    ]
