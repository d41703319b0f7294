"""Compile the loop of `generate` for an absent GPU and print JSON about one decoding step.

    python deviceless_decode.py TARGET.txtpb BATCH DUMP_FOLDER LINEARS [DRAFT]

LINEARS is the format of the linear layers of the attention: dense, fp8 or nvfp4. With DRAFT, which
is "lookup", steps read three drafts too. The JSON then has the bytes of the caches, and those that
the program copies. The model has the sizes of Qwen3-30B-A3B but fewer layers, and its weights are
shapes without values.
`test_deviceless.py` runs this program in its own process, as it runs `deviceless_compile.py`.
"""

import json
import math
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from support.extensions import cuda_calls

from jax_nvfp4_moe import MoEParams, NVFP4Tensor, Scheme, Target
from jax_nvfp4_moe.checkpoint import LinearWeights, Source
from jax_nvfp4_moe.checkpoint.writing.synthetic import SyntheticSizes
from jax_nvfp4_moe.inference import generation
from jax_nvfp4_moe.inference.drafting import Drafting
from jax_nvfp4_moe.models import qwen3_moe
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.settings import Settings
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor
from jax_nvfp4_moe.scheme import FP8ActivationScaling

LAYERS = (2, 4)  # the difference between the two is due to layers alone
LENGTH, ROOM = 192, 64
DRAFTS = 3
# XLA runs these instructions without a kernel.
FREE = {"get-tuple-element", "tuple", "parameter", "bitcast", "constant"}


class Shapes:
    """Stand in for the `WeightTable` of any checkpoint, and give shapes without values."""

    def __init__(self, linears="dense"):
        self.linears = linears

    def has_under(self, prefix) -> bool:
        return True

    def array(self, name, shape, *, dtype=None, stored=None, keeps_bfloat16=False):
        dtype = jnp.bfloat16 if keeps_bfloat16 else dtype
        return source(name, array(shape, dtype or jnp.bfloat16))

    def linear(self, prefix, n, k, *, bias=False):
        if self.linears == "dense" or prefix == "lm_head":
            return source(prefix, LinearWeights(array((n, k), jnp.bfloat16)))
        if self.linears == "fp8":
            weight = FP8Tensor(array((n, k), jnp.float8_e4m3fn), array((n,), jnp.float32))
            declared = FP8ActivationScaling.STATIC  # which Hopper does not round
            return source(prefix, LinearWeights(weight, checkpoint_scheme=declared), declared)
        weight = tensor((n, k), ())
        return source(prefix, LinearWeights(weight, checkpoint_scheme=Scheme.W4A16), Scheme.W4A16)

    def experts(self, prefix, e, h, i):
        params = MoEParams(tensor((e, 2 * i, h), (e, 2)), tensor((e, h, i), (e,)))
        return source(prefix, params, Scheme.W4A16)


def tensor(shape, scales):
    *lead, k = shape
    return NVFP4Tensor(
        array((*lead, k // 2), jnp.uint8),
        array((*lead, k // 16), jnp.float8_e4m3fn),
        array(scales, jnp.float32),
    )


def array(shape, dtype):
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def source(name, value, scheme=None):
    return Source(name, value, scheme)


def make_model(layers, linears):
    sizes = SyntheticSizes(
        layers=layers,
        num_experts=128,
        top_k=8,
        hidden=2048,
        intermediate=768,
        vocab=151936,
        heads=32,
        kv_heads=4,
        head_dim=128,
    )
    config = qwen3_moe.read_config(sizes.config())
    settings = Settings(Target("cuda", (9, 0)))
    make = Builder(Shapes(linears), qwen3_moe.KEYS, settings)
    return nnx.eval_shape(lambda: qwen3_moe.build_model(config, make))


def compile_loop(model, batch, sharding, draft=None):
    """Return the HLO text of greedy decoding, and the bytes of the caches."""
    sampling = jax.eval_shape(lambda: generation.make_sampling(0.0, None, 1.0, (), None))
    limit = jax.ShapeDtypeStruct((), jnp.int32)
    cache = jax.eval_shape(lambda: model.init_cache(batch, LENGTH))
    state = jax.eval_shape(lambda cache: generation.State.begin(cache, batch, ROOM), cache)
    if draft is not None:
        how = Drafting(draft, DRAFTS, automatic=True)
        ids, lengths = np.zeros((batch, LENGTH - ROOM), np.int32), np.ones(batch, np.int32)
        given = state, ids, lengths, np.int32(ROOM)
        state = generation.begin_from_text.eval_shape(model, *given, drafting=how)
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        (model, sampling, state, limit),
    )
    return generation.decode.lower(*placed).compile().as_text(), count_bytes(cache)


def count_bytes(tree):
    """Return the bytes of all arrays of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def count_copied_bytes(text):
    """Return the bytes of all copies that a program runs, each counted once."""
    shapes = re.findall(r"^ .*? = (\w+)\[([\d,]*)\]\S* (?:copy|copy-start)\(", text, re.M)
    sizes = (math.prod(map(int, filter(None, shape.split(",")))) for _, shape in shapes)
    return sum(4 * size for size in sizes)  # no array of these programs has wider elements


def count_kernels(text):
    """Return how many kernels and FFI calls one iteration of the loop runs."""
    body = re.search(r" while\(.*body=%?([\w.\-]+)", text)
    assert body
    inside = re.search(rf"^%?{re.escape(body[1])} [^\n]*\{{\n(.*?)^\}}", text, re.M | re.S)
    assert inside
    ran = re.findall(r"^ .*?= .*?[\]})] ([a-z][\w\-]*)\(", inside[1], re.M)
    return sum(name not in FREE for name in ran)


def in_one_graph(dump):
    """Return whether the loop is inside a command buffer in all programs of `dump`."""
    texts = [path.read_text() for path in dump.glob("*decode.thunk_sequence_after*")]
    return bool(texts) and all(re.search(r"^\s+\d+: kWhile", text, re.M) for text in texts)


if __name__ == "__main__":
    cuda_calls.register()
    config, dump = (pathlib.Path(sys.argv[i]) for i in (1, 3))
    topology = topologies.get_topology_desc(
        "described", "cuda", target_config=config.read_text(encoding="utf-8"), topology="1x1x1"
    )
    mesh = jax.sharding.Mesh(topology.devices, ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())
    batch, linears, draft = int(sys.argv[2]), sys.argv[4], (*sys.argv[5:], None)[0]
    models = [make_model(layers, linears) for layers in LAYERS]
    (few, _), (many, cache_bytes) = (
        compile_loop(model, batch, sharding, draft) for model in models
    )
    found: dict[str, float | bool] = {"in_one_graph": in_one_graph(dump)}
    if draft is None:
        kernels = count_kernels(many) - count_kernels(few)
        found["kernels_a_layer"] = kernels / (LAYERS[1] - LAYERS[0])
    else:
        found |= {"copied_bytes": count_copied_bytes(many), "cache_bytes": cache_bytes}
    print(json.dumps(found))
