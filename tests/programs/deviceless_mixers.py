"""Compile a mixer of tokens for an absent GPU, and print JSON about the kernels that it runs.

    python deviceless_mixers.py TARGET.txtpb MIXER TOKENS [window]

MIXER is a key of `MIXERS`, or `solver` for a triangular solver alone. With "window", the cache has
a window of states, as decoding with drafts needs it. The mixers have the sizes of published models,
and their weights are shapes without values. `kernels` counts the kernels and library calls of one
call of the mixer. A kernel in the body of a loop counts once for each iteration. `solves` counts
the calls of triangular solvers.
`test_deviceless.py` runs this program in its own process, as it runs `deviceless_compile.py`.
"""

import functools
import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
from deviceless_decode import FREE, Shapes
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from support.extensions import cuda_calls

from jax_nvfp4_moe import Target
from jax_nvfp4_moe.nn.attention.latent_attention import LatentAttention, MLAConfig
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.settings import Settings
from jax_nvfp4_moe.nn.recurrent.gated_delta_net import DeltaSizes, GatedDeltaNet
from jax_nvfp4_moe.nn.recurrent.kimi_delta import KimiDelta, KimiDeltaSizes
from jax_nvfp4_moe.nn.recurrent.mamba2 import Mamba2, Mamba2Config
from jax_nvfp4_moe.numerics.rope import Rope
from jax_nvfp4_moe.ops.state_window import StateWindow

ROOM = 4096  # tokens that a cache has room for


class SeparateProjections(Shapes):
    """Shapes of a checkpoint in which queries, keys and values are not interleaved."""

    def has_under(self, prefix) -> bool:
        return not prefix.endswith(("qkvz", "ba"))


class SameNames(dict):
    """A key table in which the parts of the mixer have the same names in the file."""

    def __missing__(self, path):
        return path


MIXERS = {
    "qwen3.6": (
        GatedDeltaNet,
        DeltaSizes(2048, 16, 32, 128, 128, conv_size=4, eps=1e-6),
    ),
    "kimi-linear": (
        KimiDelta,
        KimiDeltaSizes(2304, 32, 128, conv_size=4, eps=1e-5, low_rank=True),
    ),
    "nemotron-3-nano": (
        Mamba2,
        Mamba2Config(
            2688, 64, 64, 128, 8, 4, "silu_no_mul", False, True, 1e-5, (0.0, float("inf"))
        ),
    ),
    "deepseek-v3": (
        LatentAttention,
        MLAConfig(
            7168,
            num_heads=128,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            interleaved=True,
            bias=False,
            rope=Rope(tuple(1e4 ** (-i / 32) for i in range(32))),
        ),
    ),
}


def compile_mixer(name, tokens, sharding, window=False):
    """Return the HLO text of the mixer for one row of tokens, with a cache."""
    make, sizes = MIXERS[name]
    settings = Settings(Target("cuda", (9, 0)))
    mixer = nnx.eval_shape(
        lambda: make(sizes, Builder(SeparateProjections(), SameNames(), settings), "mixer")
    )
    x = jax.ShapeDtypeStruct((1, tokens, sizes.hidden), mixer.dtype)
    positions = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    cache = jax.eval_shape(lambda: mixer.empty_cache(1, ROOM))
    if window:
        cache = jax.eval_shape(lambda cache: StateWindow.open(cache, mixer.states, tokens), cache)
    operands = mixer, x, positions, cache
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), operands
    )
    run = jax.jit(lambda mixer, *rest: mixer.mix(*rest), donate_argnums=3)
    return run.lower(*placed).compile().as_text()


def compile_solver(tokens, sharding):
    """Return the HLO text of a triangular solver, as a negative control."""
    operand = jax.ShapeDtypeStruct((tokens, 64, 64), jnp.float32, sharding=sharding)
    solve = functools.partial(jax.lax.linalg.triangular_solve, left_side=True, lower=True)
    return jax.jit(solve).lower(operand, operand).compile().as_text()


def count_kernels(text):
    """Return how many kernels and library calls the program `text` runs."""
    bodies = dict(re.findall(r"^%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", text, re.M | re.S))
    (entry,) = re.findall(r"^ENTRY %?[\w.\-]+ [^\n]*\{\n(.*?)^\}", text, re.M | re.S)

    def count(body):
        total = 0
        for line in body.splitlines():
            ran = re.match(r"^ .*? = .*?[\]})] ([a-z][\w\-]*)\(", line)
            if ran is None or ran[1] in FREE:
                continue
            if ran[1] == "while":
                (inside,) = re.findall(r"body=%?([\w.\-]+)", line)
                (trips,) = re.findall(r'"known_trip_count":\{"n":"(\d+)"', line)
                total += int(trips) * count(bodies[inside])
            elif ran[1] == "call":
                (inside,) = re.findall(r"to_apply=%?([\w.\-]+)", line)
                total += count(bodies[inside])
            else:
                total += 1
        return total

    return count(entry)


def count_solves(text):
    """Return how many triangular solvers the program `text` calls, loops aside."""
    return len(re.findall(r'custom_call_target="[^"]*triangular', text, re.IGNORECASE))


if __name__ == "__main__":
    config, name, tokens, *window = sys.argv[1:]
    cuda_calls.register()
    topology = topologies.get_topology_desc(
        "described", "cuda", target_config=pathlib.Path(config).read_text(), topology="1x1x1"
    )
    whole = NamedSharding(jax.sharding.Mesh(topology.devices, ("x",)), PartitionSpec())
    if name == "solver":
        text = compile_solver(int(tokens), whole)
    else:
        text = compile_mixer(name, int(tokens), whole, window == ["window"])
    print(json.dumps({"kernels": count_kernels(text), "solves": count_solves(text)}))
