"""Round activations, keys and values as the tools do: torch functions of float32 tensors."""

from collections.abc import Callable

import torch

Rounding = Callable[[torch.Tensor], torch.Tensor]

BLOCK = 16
E4M3_MAX = 448.0
SMALLEST_SCALE = 1e-5  # modelopt's kernel replaces smaller scales of blocks by one


def e2m1(magnitude: torch.Tensor) -> torch.Tensor:
    """Return the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6; ties go to the even code."""
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    code = torch.bucketize(magnitude, bounds)  # a bound itself belongs to the code below it
    tie_to_even = (magnitude == 0.75) | (magnitude == 1.75) | (magnitude == 3.5)
    return values[code + tie_to_even.long()]


def modelopt_nvfp4(input_scale: torch.Tensor) -> Rounding:
    """Return modelopt's NVFP4 rounding of activations, with g = `input_scale`.

    x' = e2m1(|x| / s) s with the sign of x, where s = e4m3(min(amax / (6 g), 448)) g.

    Source: modelopt's Triton kernel `fp4_fake_quant_kernel`, step by step. That kernel needs a GPU.
    """

    def round_activations(x: torch.Tensor) -> torch.Tensor:
        blocks = x.float().unflatten(-1, (-1, BLOCK))
        largest = blocks.abs().amax(-1, keepdim=True)
        small = torch.clamp(largest / (6.0 * input_scale), max=E4M3_MAX)
        scale = small.to(torch.float8_e4m3fn).float() * input_scale
        scale = torch.where(scale >= SMALLEST_SCALE, scale, torch.ones_like(scale))
        y = e2m1(blocks.abs() / scale) * scale
        return torch.where(blocks >= 0, y, -y).flatten(-2)

    return round_activations


def after_scaling(channel_scale: torch.Tensor, activation: Rounding | None) -> Rounding:
    """Return a rounding of the input times `channel_scale`, as modelopt's `TensorQuantizer`."""
    scale = channel_scale.float()
    return lambda x: activation(x * scale) if activation else x * scale


def modelopt_fp8(scale: torch.Tensor) -> Rounding:
    """Return modelopt's FP8 rounding by its own function.

    x' = e4m3(x 448 / a) a / 448, where a is 448 `scale`, rounded to bfloat16 if the scale can be
    recovered from that.
    """
    from modelopt.torch.quantization.tensor_quant import fp8_eager

    amax = (scale * E4M3_MAX).to(torch.bfloat16).float()
    if not torch.equal(amax / E4M3_MAX, scale.float()):
        amax = scale * E4M3_MAX
    return lambda x: fp8_eager(x, amax)


def compressed_tensors_dynamic(args: dict, global_scale: torch.Tensor | None) -> Rounding:
    """Return compressed-tensors' rounding by its own functions, with scales by block or token.

    All tokens are passed as one row, because the library takes one scale for all of a 2-D input.
    """
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    known = QuantizationArgs(**args)
    nothing = torch.nn.Module()

    def round_activations(x: torch.Tensor) -> torch.Tensor:
        row = x.reshape(1, -1, x.shape[-1])
        scale, zero = compute_dynamic_scales_and_zp(row, known, nothing, global_scale)
        return fake_quantize(row, scale, zero, known, global_scale).reshape(x.shape)

    return round_activations


def compressed_tensors_static(args: dict, scale: torch.Tensor) -> Rounding:
    """Return compressed-tensors' rounding by its own function, with a stored scale."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    known = QuantizationArgs(**args)
    zero = torch.zeros_like(scale, dtype=torch.float32)
    return lambda x: fake_quantize(x, scale.float(), zero, known)
