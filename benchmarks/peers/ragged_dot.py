"""Time `jax.lax.ragged_dot` in an expert layer. `moe.py` starts this program.

It is timed on bfloat16 weights, which are four times larger than NVFP4, and on packed weights that
jnp dequantizes in each call.
"""

import functools

import contestant
import jax
import jax.numpy as jnp
from moe_cases import Case
from peers.ragged_layer import TOKENS, random_weights, time_layer

# XLA multiplies every row by every expert. With more FLOPs, a cell takes minutes.
MOST_FLOPS = 1e14
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


def random_packed(case: Case):
    """Return pairs of codes ``[e, k/2, n]`` and scales ``[e, k/16, n]`` for both GEMMs."""
    h, i = case.hidden, case.intermediate
    keys = jax.random.split(jax.random.key(0))
    return [
        _packed(key, case.experts, k, n)
        for key, (k, n) in zip(keys, ((h, case.gate_up_rows), (i, h)), strict=True)
    ]


def _packed(key, experts, k, n):
    words = jax.random.bits(key, (experts, k // 2, n // 4), jnp.uint32)
    codes = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(experts, k // 2, n)
    return codes, jnp.full((experts, k // 16, n), 0.02, jnp.float8_e4m3fn)


def dequantize(packed, scale):
    """Return the weights ``[e, k, n]`` in bfloat16."""
    table = jnp.array(E2M1, jnp.bfloat16)
    e, half_k, n = packed.shape
    values = jnp.stack([table[packed & 15], table[packed >> 4]], axis=2).reshape(e, 2 * half_k, n)
    return values * jnp.repeat(scale.astype(jnp.bfloat16), 16, axis=1)


def dequantized_dot(rows, weight, sizes):
    return jax.lax.ragged_dot(rows, dequantize(*weight), sizes)


def make_layer(make_weights, dot, case: Case):
    weights = make_weights(case)

    def time_tokens(tokens):
        if case.flops(tokens) * case.experts > MOST_FLOPS:
            raise ValueError("left out: it multiplies every token by every expert")
        return time_layer(case, dot, weights, tokens)

    return time_tokens


def main():
    arguments = contestant.parser(__doc__).parse_args()
    tokens = [count for count in arguments.tokens if count in TOKENS]
    for name, make_weights, dot in (
        ("ragged_dot_bf16", random_weights, jax.lax.ragged_dot),
        ("ragged_dot_dequantized", random_packed, dequantized_dot),
    ):
        make = functools.partial(make_layer, make_weights, dot)
        contestant.time_cells(name, arguments.case, tokens, make)


if __name__ == "__main__":
    main()
