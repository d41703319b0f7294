"""Compile roundings to FP8 and back for an absent GPU and print one line of JSON.

    python deviceless_float8.py TARGET.txtpb

The line counts the conversions to float8_e4m3fn that the compiled program keeps: `rounded` for
`fp8.fake_round_fp8`, and `converted` for a plain `astype`.
"""

import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from jax_nvfp4_moe.numerics.fp8 import fake_round_fp8


def converted(x, scale):
    """Round as `fake_round_fp8` does, but without the barrier that hides a conversion from XLA."""
    return (x / scale).astype(jnp.float8_e4m3fn).astype(jnp.float32) * scale


def rounded(x, scale):
    """Round as attention does."""
    return fake_round_fp8(x, scale, multiply_by_reciprocal=False)


if __name__ == "__main__":
    topology = topologies.get_topology_desc(
        "described", "cuda", target_config=pathlib.Path(sys.argv[1]).read_text(), topology="1x1x1"
    )
    whole = NamedSharding(jax.sharding.Mesh(topology.devices, ("x",)), PartitionSpec())
    x, scale = (jax.ShapeDtypeStruct(s, jnp.float32, sharding=whole) for s in ((64, 64), ()))
    counts = {}
    for program in (rounded, converted):
        text = jax.jit(program, out_shardings=whole).lower(x, scale).compile().as_text()
        counts[program.__name__] = len(re.findall(r"f8e4m3fn\[[^\]]*\]\S* convert", text))
    print(json.dumps(counts))
