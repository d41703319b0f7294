"""Tests of GPU kernels besides `kernel_suite`: equal bits, many tokens, and CUDA graphs."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.extensions import cuda_calls
from support.files.given import PROGRAMS
from support.kernels.axes import axis
from support.kernels.kernel_cases import uniform
from support.kernels.kernel_suite import LayerSuite, bits


def run_layer(suffix, call):
    """Run a `kernel_cases.LayerCall` on the target `suffix`."""
    program = jax.jit(lambda *operands: cuda_calls.moe(*operands, call.options, suffix))
    return program(*jax.tree.map(jnp.asarray, call.operands[:-1]))


def run_product(suffix, call):
    """Run a `kernel_cases.ProductCall` on the target `suffix`."""
    program = jax.jit(lambda *operands: cuda_calls.grouped_gemm(*operands, call.mode, suffix))
    return program(*map(jnp.asarray, call.operands))


# Tokens at which chunks end. A chunk has 32768 or 65536 slots, and a token has two or three. Up to
# 32 slots, outputs of experts are not rounded before they are combined; the last chunk has more.
CHUNK_ENDS = (10922, 16384, 21845, 32768, 43690)
MANY_TOKENS, FEW_TOKENS = 65600, 32


def assert_graph_follows_the_routing(tmp_path, suffix, mode):
    """Assert that one compiled program inside a CUDA graph follows routing that changes."""
    environment = dict(
        os.environ,
        XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} "
        "--xla_gpu_enable_command_buffer=CUSTOM_CALL "
        f"--xla_gpu_graph_min_graph_size=1 --xla_dump_to={tmp_path}",
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
    )
    process = subprocess.run(
        [sys.executable, PROGRAMS / "replay_cuda_graph.py", suffix, mode],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    calls = json.loads(process.stdout.splitlines()[-1])
    assert calls["different_outputs"] == calls["calls"]
    assert calls["wrong"] == 0
    assert cuda_calls.graphs_hold_custom_call(tmp_path)


class GpuLayerSuite(LayerSuite):
    """Test expert layers on the targets `suffix`.

    `many_tokens_numbers` are the dtypes and activation scales for calls with many tokens.
    """

    many_tokens_numbers = axis("bf16-static", "bf16-token")

    @pytest.fixture
    def run(self, suffix):
        cuda_calls.register()
        return lambda call: run_layer(suffix, call)

    def test_same_bits_twice(self, run, numbers):
        call = self.call("several_tiles", numbers, bias=True)
        assert bits(run, call) == bits(run, call)

    @pytest.mark.slow
    @pytest.mark.parametrize("top_k", [2, 3])
    def test_many_tokens_equal_few(self, run, top_k, many_tokens_numbers):
        """Many tokens run in chunks, and each token's output equals that of a short call."""
        case = (MANY_TOKENS, top_k, 8, 64, 32, uniform(MANY_TOKENS, top_k, 8))
        call = self.call(case, many_tokens_numbers)
        actual = np.asarray(run(call))
        half = FEW_TOKENS // 2
        for middle in (half, *CHUNK_ENDS, MANY_TOKENS - half):
            rows = slice(middle - half, middle + half)
            assert bits(run, call.of_tokens(rows)) == actual[rows].tobytes()


class TokensAloneSuite:
    """Add to `GpuLayerSuite` for kernels in which a sum does not depend on the other tokens."""

    def test_tokens_have_the_bits_that_they_have_alone(self, run, numbers):
        call, rows = self.call("several_tiles", numbers, bias=True), slice(77, 97)
        assert bits(run, call.of_tokens(rows)) == np.asarray(run(call))[rows].tobytes()


class GpuProducts:
    """Run grouped GEMMs on the targets `suffix`."""

    @pytest.fixture
    def run(self, suffix):
        cuda_calls.register()
        return lambda call: run_product(suffix, call)
