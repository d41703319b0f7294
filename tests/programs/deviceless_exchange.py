"""Compile an expert block for four absent GPUs and print one line of JSON about its schedule.

    python deviceless_exchange.py TARGET.txtpb EXCHANGE TOKENS [joined] [hide]

`joined` removes the barrier of `NVFP4MoE`. `hide` compiles with XLA's latency hiding scheduler. The
block has a shared expert. `test_deviceless_exchange.py` runs this program in its own process, as
`deviceless_compile.py` is run. No kernel runs, so that any handler can stand for those of the
kernels.
"""

import json
import pathlib
import re
import sys
import unittest.mock

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.backends import _ffi
from jax_nvfp4_moe.nn.linear.dense_linear import DenseLinear

DEVICES, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 4, 64, 4, 7168, 1024
KERNELS = (
    "nvfp4_route_cuda",
    "nvfp4_moe_w4a16_sm90",
    "nvfp4_dense_few_cuda",
    "nvfp4_activate_cuda",
    "nvfp4_add_gated_cuda",
)
HIDE = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_analytical_sol_latency_estimator": False,
}
# XLA runs these instructions without a kernel.
FREE = {"get-tuple-element", "tuple", "parameter", "bitcast", "constant", "partition-id"}
# One that is asynchronous, and in jax 0.10 any other one too, has a start and an end.
COLLECTIVE = re.compile(r"(all-(?:to-all|reduce|gather)|ragged-all-to-all)(-start)?$")
LINE = re.compile(r"^ +(?:ROOT )?%?([\w.\-]+) = .*?[\]})] ([a-z][\w\-]*)\(")


def register():
    """Make XLA accept the calls of the CUDA extension, whether it is built or not."""
    handler = next(iter(_ffi._module("_nvfp4_cpu").registrations().values()))
    for name in KERNELS:
        jax.ffi.register_ffi_target(name, handler, platform="CUDA")


class SharedExpert(nnx.Module):
    """A gated MLP with two GEMMs."""

    def __init__(self):
        self.first = DenseLinear(jnp.zeros((2 * INTERMEDIATE, HIDDEN), jnp.bfloat16))
        self.second = DenseLinear(jnp.zeros((HIDDEN, INTERMEDIATE), jnp.bfloat16))

    def __call__(self, x):
        gate, up = jnp.split(self.first(x), 2, axis=-1)
        return self.second(jax.nn.silu(gate) * up)


def compile_block(target_config: str, dispatch: str, tokens: int, options: dict) -> str:
    """Return the scheduled program as text."""
    topology = topologies.get_topology_desc(
        "described", "cuda", target_config=target_config, topology=f"1x1x{DEVICES}"
    )
    mesh = jax.sharding.Mesh(topology.devices, ("expert",), axis_types=(AxisType.Auto,))

    def make():
        return nvfp4.NVFP4MoE(
            EXPERTS,
            HIDDEN,
            INTERMEDIATE,
            top_k=TOP_K,
            target=nvfp4.Target("cuda", (9, 0)),
            shared_experts=SharedExpert(),
            mesh=mesh,
            dispatch=dispatch,
            rngs=nnx.Rngs(0),
        )

    def place(path, leaf):
        divided = "experts.params" in jax.tree_util.keystr(path)
        spec = PartitionSpec("expert") if divided else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    with unittest.mock.patch.object(_ffi, "missing", return_value=()):
        block = jax.tree_util.tree_map_with_path(place, nnx.eval_shape(make))
        cut = NamedSharding(mesh, PartitionSpec(None if dispatch == "psum" else "expert"))
        x = jax.ShapeDtypeStruct((tokens, HIDDEN), jnp.bfloat16, sharding=cut)
        run = jax.jit(lambda block, x: block(x), out_shardings=cut, compiler_options=options)
        text = run.lower(block, x).compile().as_text()
        assert text
        return text


def report(text: str) -> dict:
    """Return the operations in the order of their starts, and what overlaps with a collective.

    Returns:
      collectives: pairs of a name and whether it is asynchronous.
      shared: how many GEMMs of the shared expert are scheduled between the start and the end of the
        last collective, and how many there are.
      sending: number of kernels from the router to the first collective, and from there to the
        experts.
      order: names of all operations.
    """
    entry = re.search(r"^ENTRY.*?^\}", text, re.M | re.S)
    assert entry
    found = [(LINE.match(line), line) for line in entry[0].splitlines()]
    ran = [(m[1], m[2], line) for m, line in found if m and m[2] not in FREE]
    # XLA may name a fusion after the last instruction in it, so that a name tells only that the
    # operation is a GEMM, not whose GEMM it is.
    products = [i for i, (name, _, _) in enumerate(ran) if re.match(r"gemm|dot|cublas", name)]
    calls = [i for i, (_, _, line) in enumerate(ran) if 'custom_call_target="nvfp4' in line]
    starts = [i for i, (_, op, _) in enumerate(ran) if COLLECTIVE.match(op)]
    ends = [i for i, (_, op, _) in enumerate(ran) if op.endswith("-done")]
    *_, route, experts = calls  # few tokens have a call before, for the router's logits
    first = next((i for i in starts if i < experts), experts)
    received = [i for i in range(first + 1, experts) if i not in ends]
    return {
        "collectives": [
            [
                ran[i][1].removesuffix("-start"),
                ran[i][1].endswith("-start") and '"is_sync":true' not in ran[i][2],
            ]
            for i in starts
        ],
        "shared": [sum(starts[-1] < i < ends[-1] for i in products), 2],
        "sending": [first - route - 1, len(received)],
        "order": [name for name, _, _ in ran],
    }


if __name__ == "__main__":
    register()
    config, dispatch, tokens = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    words = sys.argv[4:]
    options = HIDE if "hide" in words else {}
    if "joined" in words:
        jax.lax.optimization_barrier = lambda operands: operands
    print(json.dumps(report(compile_block(config.read_text(), dispatch, tokens, options))))
