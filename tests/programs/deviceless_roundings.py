"""Compile roundings and the casts back for an absent GPU and print one line of JSON.

    python deviceless_roundings.py TARGET.txtpb

For each function below, the line has the number of roundings that the compiled program keeps.
"""

import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from jax_nvfp4_moe.numerics.casts import cast
from jax_nvfp4_moe.numerics.fp8 import fake_round_fp8


def float8_converted(x, scale):
    """Round as `fake_round_fp8` does, but without the barrier that hides a conversion from XLA."""
    return (x / scale).astype(jnp.float8_e4m3fn).astype(jnp.float32) * scale


def float8_rounded(x, scale):
    """Round as attention does."""
    return fake_round_fp8(x, scale, multiply_by_reciprocal=False)


def bfloat16_converted(x, scale):
    """Round a product that is read in float32, by a plain cast."""
    return (x * scale).astype(jnp.bfloat16).astype(jnp.float32) * x


def bfloat16_rounded(x, scale):
    """Round as models do."""
    return cast(x * scale, jnp.bfloat16).astype(jnp.float32) * x


ROUNDING = re.compile(r"(?:f8e4m3fn|bf16)\[[^\]]*\]\S* convert\(| reduce-precision\(")

if __name__ == "__main__":
    topology = topologies.get_topology_desc(
        "described", "cuda", target_config=pathlib.Path(sys.argv[1]).read_text(), topology="1x1x1"
    )
    whole = NamedSharding(jax.sharding.Mesh(topology.devices, ("x",)), PartitionSpec())
    x, scale = (jax.ShapeDtypeStruct(s, jnp.float32, sharding=whole) for s in ((64, 64), ()))
    counts = {}
    for program in (float8_rounded, float8_converted, bfloat16_rounded, bfloat16_converted):
        text = jax.jit(program, out_shardings=whole).lower(x, scale).compile().as_text()
        counts[program.__name__] = len(ROUNDING.findall(text))
    print(json.dumps(counts))
