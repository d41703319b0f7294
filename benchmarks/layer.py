"""Time our expert layer, after the ceilings of the device. `moe.py` starts this program.

python -m layer --case qwen3-30b-a3b --tokens 1 16 [--backend moe_w4a16_sm90] [--scheme w4a4]
"""

import functools
import math

import contestant
import jax
import jax.numpy as jnp
from moe_cases import Case, calls_of, draw_ids

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.backends import _ffi
from jax_nvfp4_moe.cli.timing import measure_ceilings, time_program
from jax_nvfp4_moe.ops.preparation import prepare_donated
from jax_nvfp4_moe.scheme import Problem, Scheme

# Kernels that newer devices can run, but do not choose by default.
_OLDER_TARGETS = {"moe_w4a16_sm80": nvfp4.Target("cuda", (8, 0))}
_LOWEST_SCALE, _HIGHEST_SCALE = 0x30, 0x50  # e4m3 bytes of 0.5 and 8
_RMS = 9.9  # root mean square of random codes times such scales
_LARGEST_INPUT = 8.0  # W4A4 rounds up to here without clamping: 8 standard deviations


def random_params(case: Case, seed: int = 0) -> nvfp4.MoEParams:
    """Return canonical weights of random bytes, made on the device, which keep values near 1."""
    keys = jax.random.split(jax.random.key(seed))
    scales = (case.experts, 2) if case.gated else (case.experts,)
    input_scales = [jnp.full(case.experts, _LARGEST_INPUT / 2688, jnp.float32) for _ in range(2)]
    return nvfp4.MoEParams(
        _random_tensor(keys[0], case.experts, case.gate_up_rows, case.hidden, scales),
        _random_tensor(keys[1], case.experts, case.hidden, case.intermediate, (case.experts,)),
        gate_up_input_scale=input_scales[0],
        down_input_scale=input_scales[1],
    )


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _random_tensor(key, experts, n, k, scales):
    of_codes, of_scales = jax.random.split(key)
    spread = _HIGHEST_SCALE - _LOWEST_SCALE + 1
    block_scale = _random_bytes(of_scales, experts, n, k // 16) % spread + _LOWEST_SCALE
    return nvfp4.NVFP4Tensor(
        _random_bytes(of_codes, experts, n, k // 2),
        jax.lax.bitcast_convert_type(block_scale, jnp.float8_e4m3fn),
        jnp.full(scales, 1 / (_RMS * math.sqrt(k)), jnp.float32),
    )


def _random_bytes(key, experts, n, width):
    """Draw one expert at a time: the generator needs several times the memory of its result."""

    def draw(key):
        words = jax.random.bits(key, (-(-n * width // 4),), jnp.uint32)
        return jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)[: n * width]

    drawn = jax.lax.map(draw, jax.random.split(key, experts))
    return drawn.reshape(experts, n, width)


def layer_program(case: Case, arguments: dict):
    """Return the jitted program of several calls: ``(outputs, params, xs, ids, weights)``."""

    @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
    def program(outputs, params, xs, ids, weights):
        del outputs  # donated: the new outputs take their memory
        return [
            nvfp4.ops.moe_mlp(x, params, chosen, weights, activation=case.activation, **arguments)
            for x, chosen in zip(xs, ids, strict=True)
        ]

    return program


PER_CALL = ("us", "low", "high")


def make_layer(backend: str, scheme: Scheme, target: nvfp4.Target, case: Case):
    """Prepare the weights of `case` and return a function from a number of tokens to figures."""
    arguments = {"scheme": scheme, "target": target, "backend": backend}
    params = jax.block_until_ready(prepare_donated(random_params(case), **arguments))

    program = layer_program(case, arguments)

    def time_tokens(tokens):
        xs, ids, weights = call_operands(case, tokens)
        last = []

        def step(outputs):
            last[:] = program(outputs, params, xs, ids, weights)
            return list(last)

        figures = time_program(step, [jnp.zeros_like(x) for x in xs])
        figures |= {name: figures[name] / len(xs) for name in PER_CALL}
        rms = jnp.sqrt(jnp.mean(jnp.square(last[0].astype(jnp.float32))))
        return figures | {"output_rms": float(rms)}

    return time_tokens


def call_operands(case: Case, tokens: int):
    """Return the tokens and expert ids of each call, and the weights that all calls share."""
    keys = jax.random.split(jax.random.key(tokens), calls_of(tokens))
    xs = [jax.random.normal(key, (tokens, case.hidden), jnp.bfloat16) for key in keys]
    ids = [jnp.asarray(call) for call in draw_ids(case, tokens)]
    return xs, ids, jnp.full((tokens, case.top_k), 1 / case.top_k, jnp.float32)


def choose_backend(scheme: Scheme, target: nvfp4.Target) -> str:
    """Return the backend that a user gets by default."""
    return nvfp4.explain(Problem("moe_mlp", scheme, target)).backend


def name_contestant(backend: str, scheme: Scheme) -> str:
    """Return the name in the table: the backend and, unless it is w4a16, the scheme."""
    return backend if scheme is Scheme.W4A16 else f"{backend} {scheme}"


def main():
    parser = contestant.parser(__doc__)
    parser.add_argument(
        "--backend", nargs="*", default=[], help="default: the backend for this device"
    )
    parser.add_argument(
        "--scheme", nargs="+", default=[Scheme.W4A16], type=Scheme, choices=list(Scheme)
    )
    parser.add_argument(
        "--small-ceilings", action="store_true", help="measure ceilings quickly, with wrong results"
    )
    arguments = parser.parse_args()
    here = nvfp4.Target.current()
    _ffi.load("_nvfp4_cuda" if here.platform == "cuda" else "_nvfp4_cpu")
    sizes = {"gibibytes": 1 / 64, "side": 256} if arguments.small_ceilings else {}
    contestant.emit(
        device=jax.devices()[0].device_kind,
        ceilings=measure_ceilings(**sizes),
    )
    for scheme in arguments.scheme:
        for backend in arguments.backend or [choose_backend(scheme, here)]:
            make = functools.partial(make_layer, backend, scheme, _OLDER_TARGETS.get(backend, here))
            name = name_contestant(backend, scheme)
            contestant.time_cells(name, arguments.case, arguments.tokens, make)


if __name__ == "__main__":
    main()
