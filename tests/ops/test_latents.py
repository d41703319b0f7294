"""Test `ops.prepare_latents` off GPUs: its definition, errors, choice and derivative."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels.axes import axis
from support.kernels.latents_suite import CASES, PAIRS, LatentsSuite, make

from jax_nvfp4_moe import Problem, Target, explain, ops
from jax_nvfp4_moe.numerics.rope import Rope

GPU = Target("cuda", (9, 0))


def prepare(call, down=None, **options):
    """Call the op on the operands of `latents_suite.Call`."""
    first, positions, cache, q_weight, kv_weight = jax.tree.map(jnp.asarray, call.operands)
    return ops.prepare_latents(
        first if down is None else down,
        positions,
        cache,
        q_weight=q_weight,
        kv_weight=kv_weight,
        eps=call.options.eps,
        rope=call.options.rope,
        interleaved=call.options.interleaved,
        **options,
    )


class TestReference(LatentsSuite):
    """The reference passes its own bound; the suite checks what it leaves alone, and padding."""

    case = axis(*CASES)
    pair = axis(PAIRS[0])

    @pytest.fixture
    def run(self):
        return prepare


def test_gpus_run_the_kernel_and_others_the_reference():
    problem = Problem(
        "prepare_latents",
        None,
        GPU,
        sizes={"query latent": 1536, "latent": 512, "rotated width": 64},
    )
    assert explain(problem).backend == "latents_cuda"
    for facts, why in (
        ({"dtype": "float32"}, "needs bfloat16 or float16"),
        (
            {"sizes": {"query latent": 1536, "latent": 512, "rotated width": 260}},
            "rotated width from 4 to 256 in multiples of 4; got 260",
        ),
        (
            {"sizes": {"query latent": 1538, "latent": 512, "rotated width": 64}},
            "query latent from 4 to 262144 in multiples of 4; got 1538",
        ),
        ({"target": Target("cpu")}, "needs cuda"),
    ):
        found = explain(Problem(**{**vars(problem), **facts}))
        assert found.backend == "reference"
        assert why in found.reasons["latents_cuda"]


@pytest.mark.parametrize("case", ["deepseek", "kimi"])
def test_the_op_is_one_call_on_a_gpu(case):
    call = make(case, PAIRS[0])
    traced = jax.jit(lambda down: prepare(call, down, target=GPU)).trace(call.down)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"custom_call @(\w+)", text) == ["nvfp4_prepare_latents_cuda"]
    assert not re.search(r"stablehlo\.(cosine|rsqrt|scatter)", text)


def test_the_op_is_differentiated_around_its_call_on_a_gpu():
    call = make("deepseek", PAIRS[0])

    def loss(down):
        results = prepare(call, down, target=GPU)
        return sum(jnp.sum(result.astype(jnp.float32) ** 2) for result in results)

    text = jax.jit(jax.grad(loss)).trace(call.down).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@nvfp4_prepare_latents_cuda") == 1
    assert "stablehlo.cosine" in text


def test_no_tokens_have_a_derivative_on_a_gpu():
    """No kernel runs, and the results have the structure of those of the definition."""
    down = jnp.zeros((1, 0, 28), jnp.bfloat16)
    cache, positions = jnp.zeros((1, 1, 8, 12), jnp.bfloat16), jnp.zeros((1, 0), jnp.int32)

    def loss(down):
        weights = {"kv_weight": jnp.ones(8), "q_weight": jnp.ones(16)}
        q, written = ops.prepare_latents(down, positions, cache, **weights, target=GPU)
        return q.astype(jnp.float32).sum() + written.astype(jnp.float32).sum()

    assert jax.grad(loss)(down).shape == down.shape


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"down": np.ones((2, 28), np.float32)}, "down: expected"),
        ({"down": np.ones((2, 1, 12), np.float32)}, "down: expected more than the 12 channels"),
        ({"cache": np.ones((2, 2, 8, 12), np.float32)}, r"cache: expected float32 \[2, 1, s"),
        ({"cache": np.ones((2, 1, 8, 12), np.float16)}, "cache: expected float32"),
        ({"kv_weight": np.ones(12, np.float32)}, "kv_weight: expected"),
        ({"q_weight": np.ones(12, np.float32)}, r"q_weight: expected \(16,\), got \(12,\)"),
        ({"positions": np.ones((2, 1), np.float32)}, "positions: expected integers"),
        ({"rope": Rope((1.0,))}, "rope: expected 2 frequencies for a key of 4 channels, got 1"),
    ],
)
def test_errors_name_the_argument(changed, words):
    given = {
        "down": np.ones((2, 1, 28), np.float32),
        "positions": np.zeros((2, 1), np.int32),
        "cache": np.ones((2, 1, 8, 12), np.float32),
        "kv_weight": np.ones(8, np.float32),
        "q_weight": np.ones(16, np.float32),
    }
    with pytest.raises(ValueError, match=words):
        ops.prepare_latents(**{**given, **changed})
