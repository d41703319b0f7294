"""Test the CUDA kernels on a GPU: the suites of all kernels, and tests for these kernels alone.

All tests call the FFI targets directly.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.extensions import cuda_calls
from support.kernels import float64_layer
from support.kernels.axes import axis
from support.kernels.float64_layer import Options
from support.kernels.gpu_suite import (
    GpuLayerSuite,
    GpuProducts,
    TokensAloneSuite,
    assert_graph_follows_the_routing,
)
from support.kernels.kernel_cases import BF16, LAYERS, make_layer, uniform
from support.kernels.kernel_suite import (
    ChunkedProductSuite,
    ProductSuite,
    RoundingSuite,
    UnroundedSuite,
    assert_accurate,
    bits,
    combinations,
)

from jax_nvfp4_moe.backends.launch_facts import workspace_bytes

# tokens, top_k, experts, hidden, intermediate, for which an H100 or H200 has more output tiles of
# GEMM 1, or of GEMM 2, than blocks. An expert has 2.5 or 5.6 rows.
CLAIMED = [(40, 2, 32, 208, 1088), (40, 2, 32, 1648, 208), (90, 2, 32, 208, 1392)]


@pytest.mark.gpu
class TestLayer(GpuLayerSuite, TokensAloneSuite, RoundingSuite, UnroundedSuite):
    suffix = axis(*cuda_calls.MOE_TARGETS)
    many_tokens_numbers = axis(*combinations(("bf16",)))

    def test_few_tokens_beside_others_and_alone(self, run, numbers):
        """A call with few slots may run on another kernel, which sums in another order."""
        call, rows = self.call("several_tiles", numbers, bias=True), slice(77, 80)
        few = call.of_tokens(rows)
        if numbers in ("bf16-none", "f16-none", "bf16-static", "f16-static"):
            assert_accurate(run, few)
        else:
            assert bits(run, few) == np.asarray(run(call))[rows].tobytes()

    @pytest.mark.parametrize("scale", ["none", "static"])
    @pytest.mark.parametrize("case", CLAIMED, ids=str)
    def test_blocks_claim_several_tiles(self, run, case, scale):
        tokens, top_k, experts, *_ = case
        sizes = (*case, uniform(tokens, top_k, experts))
        call = make_layer(sizes, BF16, Options(activation_scale=scale), bias=True)
        assert_accurate(run, call)
        assert len({bits(run, call) for _ in range(5)}) == 1


@pytest.mark.gpu
class TestProduct(GpuProducts, ProductSuite):
    suffix = axis(*cuda_calls.MOE_TARGETS)


@pytest.mark.gpu
class TestChunkedProduct(GpuProducts, ChunkedProductSuite):
    suffix = axis(*cuda_calls.MOE_TARGETS)


@pytest.mark.gpu
def test_graph_replay_follows_the_routing(tmp_path):
    assert_graph_follows_the_routing(tmp_path, "w4a16_sm90", "token")


@pytest.mark.parametrize("k", [64, 2**18])
def test_scratch_memory_of_products_does_not_grow_past_a_chunk(k):
    """The workspace stops growing at 2**18 rows.

    16-bit GEMMs with more rows once ran on the plain kernel, which needs more memory.
    """
    for suffix in ("w4a16_sm80", "w4a16_sm90", "w4a4_sm120"):
        target = f"nvfp4_grouped_gemm_{suffix}"
        sizes = {workspace_bytes(target, rows, 4, 64, k, 2) for rows in (2**18, 2**22)}
        assert len(sizes) == 1


# The errors of a target for wrong operands.

OPERANDS = (
    "x",
    *float64_layer.Layer._fields,
    "expert_ids",
    "expert_weights",
)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERANDS)
@pytest.mark.parametrize("what", ["shape", "dtype"])
def test_wrong_operand_is_named(name, what):
    cuda_calls.register()
    call = make_layer("fills_no_tile", BF16, Options(activation_scale="static"), bias=True)
    layer = jax.tree.map(np.asarray, cuda_calls.prepare(call.layer, gated=True))
    operands = [call.x, *layer, call.ids, call.weights]
    index = OPERANDS.index(name)
    if what == "shape":
        operands[index] = np.repeat(operands[index], 2, axis=-1)
        # The hidden size is read from x, so that a wrong x shows as a wrong gate_up_packed. Wrong
        # expert_ids show as a wrong later operand.
        named = {"x": "gate_up_packed", "expert_ids": "expert_weights|workspace"}.get(name, name)
    else:
        operands[index] = operands[index].view(np.int8)
        named = name
    arrays = [jnp.asarray(operand) for operand in operands]
    prepared, i = float64_layer.Layer(*arrays[1:11]), LAYERS["fills_no_tile"][4]
    with pytest.raises(
        (jax.errors.JaxRuntimeError, ValueError), match=rf"({named}).*expected .*got"
    ):
        cuda_calls.moe_prepared(
            arrays[0], prepared, *arrays[11:], call.options, i
        ).block_until_ready()
