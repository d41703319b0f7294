"""Layers for the W4A4 kernels of compute capability 10.x, and what they must give.

Sums leave a product in bfloat16, as they do in plain XLA. After that rounding an activation may
take the next FP4 code, so the truth of a layer rounds the sums of its first product, too: then both
multiply the same codes in the second one. With scales that are powers of two it does not matter
whether sums are rounded before or after they are scaled.
"""

import dataclasses

import float64_layer
import ml_dtypes
import numpy as np
import test_cuda_kernel as gpu

BF16 = ml_dtypes.bfloat16
CASES = {
    **gpu.CASES,
    "odd_sizes": (37, 3, 5, 320, 112, gpu.uniform(37, 3, 5)),
    "two_scale_tiles": (300, 2, 3, 144, 48, gpu.uniform(300, 2, 3)),
    "no_tokens": (0, 2, 4, 64, 48, gpu.uniform(0, 2, 4)),
}
MODES = ("static", "token")


def _power_of_two(scale):
    return np.exp2(np.round(np.log2(scale))).astype(np.float32)


def make(case, options, bias=False):
    """A call in which every scale that a kernel can meet before the last product is 2^n."""
    call = gpu.make(CASES.get(case, case), BF16, options, bias=bias)
    scales = call.layer._asdict().items()
    ends = "global_scale", "input_scale"
    changed = {name: _power_of_two(scale) for name, scale in scales if name.endswith(ends)}
    largest = 2688 * 2.0**-10  # of each row, so that its own scale is 2^-10
    x = np.clip(call.x.astype(np.float32), -largest, largest).astype(BF16)
    x[:, 0] = largest
    layer, weights = call.layer._replace(**changed), _power_of_two(call.weights)
    return dataclasses.replace(call, x=x, layer=layer, weights=weights)


def truth(call, products=1):
    """The layer in float64, but for the rounding of the sums of its first `products`."""
    first = call.layer.gate_up_packed.shape[1], call.x.shape[1]

    def product(x, w):
        sums = float64_layer.exact(x, w)
        rounded = products == 2 or w.shape == first
        return sums.astype(BF16).astype(np.float64) if rounded else sums

    operands = (call.x, call.layer, call.ids, call.weights, call.options)
    return float64_layer.moe(*operands, matmul=product)


def make_exact():
    """A call whose sums are exact in float32 in any order: block scales lie within a factor of 4.

    Tokens have one expert and the activation is a square, so `truth(call, 2)` has its bits.
    """
    options = float64_layer.Options(activation="relu2", activation_scale="static")
    call = make((45, 1, 3, 208, 80, gpu.uniform(45, 1, 3)), options)
    rng = np.random.default_rng(3)

    def scales(old):
        return rng.choice([0.5, 1.0, 2.0], old.shape).astype(old.dtype)

    layer = call.layer._replace(
        gate_up_block_scale=scales(call.layer.gate_up_block_scale),
        down_block_scale=scales(call.layer.down_block_scale),
    )
    return dataclasses.replace(call, layer=layer, weights=np.ones_like(call.weights))


def make_exact_product():
    """The operands of a grouped product whose sums are exact; rows are scaled by 2^n."""
    call = make_exact()
    layer, empty = call.layer, np.zeros((0, 0), np.float32)
    sizes = np.array([20, 0, 22], np.int32)
    weight = layer.gate_up_packed, layer.gate_up_block_scale, layer.gate_up_global_scale
    return (call.x, *weight, layer.gate_up_input_scale, empty, sizes)
