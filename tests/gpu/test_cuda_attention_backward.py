"""The backward pass of attention on a GPU, by cuDNN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels import attention_gradient_suite as suite

from jax_nvfp4_moe.ops import attention

pytestmark = pytest.mark.gpu


class TestGradients(suite.AttentionGradientSuite):
    @pytest.fixture
    def run(self):
        return attention


@pytest.mark.parametrize("name", suite.IN_ORDER)
def test_cudnn_runs(name):
    """The compiled program calls cuDNN; one for fewer tokens does not."""
    operands = tuple(map(jnp.asarray, suite.make(name, jnp.dtype("bfloat16"))))

    def compiled(tokens):
        q, k, v, positions, cotangent = operands
        given = q[:, :tokens], k[:, :, :tokens], v[:, :, :tokens]
        options = suite.CASES[name].options

        def gradients(q, k, v, positions, cotangent):
            run = lambda *qkv: attention(*qkv, positions, **options)  # noqa: E731
            return jax.vjp(run, q, k, v)[1](cotangent)

        lowered = jax.jit(gradients).lower(*given, positions[:, :tokens], cotangent[:, :tokens])
        return lowered.compile().as_text()

    assert "__cudnn$fmha" in compiled(None)
    assert "__cudnn$fmha" not in compiled(200)


def test_repeated_gradients_are_equal_where_xla_is_told_so():
    """cuDNN adds up the gradients of queries in any order otherwise."""
    operands = tuple(
        map(jnp.asarray, suite.make("several blocks of queries", jnp.dtype("bfloat16")))
    )

    def gradients(q, k, v, positions, cotangent):
        return jax.vjp(lambda *qkv: attention(*qkv, positions), q, k, v)[1](cotangent)

    options = {"xla_gpu_deterministic_ops": True}
    run = jax.jit(gradients, compiler_options=options)
    first, *others = ([np.asarray(x).tobytes() for x in run(*operands)] for _ in range(5))
    assert all(each == first for each in others)
