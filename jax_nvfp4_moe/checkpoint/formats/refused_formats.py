"""The quantization formats that are known and refused, each with one sentence that says why."""

from collections.abc import Mapping

_INT4 = "its weights are 4-bit integers, and every kernel of this package reads 4-bit floats"
_INT8 = "its weights are 8-bit integers, and every kernel of this package reads 4-bit floats"
_MIXED_WIDTHS = (
    "it multiplies 4-bit weights by FP8 activations, and this package has no such scheme"
)
_PACKED = "its codes are packed in a form of its own, and no NVFP4 tensor can hold them"

# The value of ``quant_algo``, ``format`` or ``quant_method`` in a config -> the reason.
REFUSED_FORMATS: Mapping[str, str] = {
    # ModelOpt
    "NVFP4_SVD": "it adds a low-rank product to every linear, which no module here computes",
    "W4A8_NVFP4_FP8": _MIXED_WIDTHS,
    "W4A8_MXFP4_FP8": _MIXED_WIDTHS,
    "W4A16_AWQ": _INT4,
    "W4A8_AWQ": _INT4,
    "W8A16": _INT8,
    "W8A8_SQ_PER_CHANNEL": _INT8,
    # compressed-tensors
    "pack-quantized": _INT4,
    "int-quantized": _INT8,
    "marlin-24": _PACKED,
    # quant_method
    "awq": _INT4,
    "gptq": _INT4,
    "auto-round": _INT4,
    "bitsandbytes": _PACKED,
    "hqq": _PACKED,
}


def why_refused(name: object) -> str:
    """Return ``": "`` and the reason why the format `name` is refused; "" if it is not known."""
    reason = REFUSED_FORMATS.get(name) if isinstance(name, str) else None
    return f": {reason}" if reason else ""
