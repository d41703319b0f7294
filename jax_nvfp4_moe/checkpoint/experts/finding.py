"""Find the experts of one layer, stored as one tensor per projection or all in one tensor.

Stacked matrices are ``[e, n, k]``, or ``[e, k, n]`` as Llama 4 and gpt-oss store them. In gpt-oss,
gate and up rows alternate as well.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.checkpoint.formats.rules import Decision
from jax_nvfp4_moe.checkpoint.names import CHANNEL_SCALE, FP8_INPUT_SCALE, SCALE_NAMES
from jax_nvfp4_moe.checkpoint.safetensors import STORED_TYPES
from jax_nvfp4_moe.checkpoint.weights.by_format import find_bias, find_weight
from jax_nvfp4_moe.checkpoint.weights.finder import Finder
from jax_nvfp4_moe.checkpoint.weights.mxfp4 import check_mxfp4, find_mxfp4, is_mxfp4
from jax_nvfp4_moe.checkpoint.weights.projections import Product, expert_products
from jax_nvfp4_moe.checkpoint.weights.requests import ExpertSizes
from jax_nvfp4_moe.checkpoint.weights.stored_forms import FLOATS, Weight, find_forms
from jax_nvfp4_moe.numerics.fp8_blocks import BlockFP8
from jax_nvfp4_moe.numerics.tensor import DenseExperts, MoEParams
from jax_nvfp4_moe.scheme import CheckpointScheme, FP8ActivationScaling, Scheme

Products = tuple[Product, Product]


class FoundExperts(NamedTuple):
    """The experts of one layer, as `Unread` leaves, and the scheme that the file has for them."""

    value: MoEParams | DenseExperts
    checkpoint_scheme: CheckpointScheme


def find_experts(finder: Finder, prefix: str, sizes: ExpertSizes, dtype: Any) -> FoundExperts:
    """Find the experts of one layer in the format in which the file stores them.

    Missing or wrong tensors become problems of `finder`. The leaves have the right shapes in any
    case, so that later steps can find more problems.

    Args:
      finder: looks tensors up, and collects problems.
      prefix: the module of the experts, such as "model.layers.0.mlp.experts".
      sizes: the sizes of the layer.
      dtype: the dtype of experts that are not quantized. None keeps the dtype of the file.
    """
    products = expert_products(finder, prefix, sizes)
    if next(finder.tensors.under(f"{prefix}."), None) is None:
        finder.problems.append(
            f"{quoted(prefix)}: the file has no experts there; expected tensors such as "
            f"{prefix}.0.down_proj.weight or {prefix}.down_proj"
        )
        return _assemble(finder, _without_tensors(products), sizes, Scheme.W4A16, dtype)
    if is_mxfp4(finder, products):
        _decide_mxfp4(finder, prefix, products)
        check_mxfp4(finder, prefix, hidden=sizes.hidden, intermediate=sizes.intermediate)
        return _assemble(finder, products, sizes, Scheme.W4A16, dtype, mxfp4=True)
    before, weight = len(finder.problems), _first_weight(finder, products)
    scheme, stored = _decide(finder, prefix, products, find_forms(weight)), weight.values
    if stored is not None and stored.dtype in FLOATS:
        kept = STORED_TYPES[stored.dtype].numpy
        return _assemble(finder, products, sizes, None, dtype or kept)
    if scheme is None:
        if len(finder.problems) == before:
            source = finder.decisions[f"{prefix}.*"].source
            finder.problems.append(
                f"{quoted(prefix)}: experts are declared dense ({source}) but stored as "
                f"{stored and stored.dtype}, without the scales of a quantized form"
            )
        finder.taken.update(finder.tensors.under(f"{prefix}."))
        return _assemble(finder, _without_tensors(products), sizes, Scheme.W4A16, dtype)
    products = _refuse(finder, prefix, products, sizes, scheme)
    return _assemble(finder, products, sizes, scheme, dtype)


def _assemble(finder, products: Products, sizes, scheme, dtype, *, mxfp4=False) -> FoundExperts:
    """Find the tensors of both products, and return the value that a model gets."""
    bias_dtype = np.float32 if scheme is not None else dtype or np.float32
    fields: dict[str, Any] = {}
    for name, product in zip(("gate_up", "down"), products, strict=True):
        weight, input_scale = (
            (find_mxfp4(finder, product), None)
            if mxfp4
            else find_weight(finder, product, scheme, dtype)
        )
        bias = find_bias(finder, product, bias_dtype) if sizes.bias else None
        fields |= {name: weight, f"{name}_input_scale": input_scale, f"{name}_bias": bias}
    if isinstance(scheme, Scheme):
        return FoundExperts(MoEParams(**fields), scheme)
    by_factor = finder.names.fp8_by_factor
    kept = scheme if isinstance(scheme, FP8ActivationScaling) else None
    return FoundExperts(DenseExperts(**fields, multiply_by_reciprocal=by_factor), kept)


def _without_tensors(products: Products) -> Products:
    """Return products of which nothing is stored, to find further problems with their shapes."""
    first, second = (product._replace(projections=()) for product in products)
    return first, second


def _refuse(finder, prefix, products: Products, sizes, scheme) -> Products:
    """Add a problem for what is not supported in a scheme, and return what is to be found."""
    if isinstance(scheme, Scheme):
        finder.check_blocks(quoted(prefix), hidden=sizes.hidden, intermediate=sizes.intermediate)
        _refuse_channel_scales(finder, prefix)
    elif scheme is FP8ActivationScaling.TENSOR:
        finder.problems.append(
            f"{quoted(prefix)}: dynamic activations with strategy tensor are not supported for "
            "experts, because the scale would depend on which tokens are in the batch; supported: "
            "strategy token, or static scales"
        )
    stacked = products[0].projections[0].experts is not None
    if isinstance(scheme, BlockFP8) and (stacked or sizes.bias):
        found = "all experts in one tensor" if stacked else "experts with biases"
        finder.problems.append(
            f"{quoted(prefix)}: {scheme} weights of {found} are not supported; expected one tensor "
            "for each expert, without biases"
        )
        finder.taken.update(finder.tensors.under(f"{prefix}."))
        return _without_tensors(products)
    return products


def _refuse_channel_scales(finder, prefix):
    """Add a problem if an expert has scales of its input channels."""
    found = [name for name in finder.tensors.under(f"{prefix}.") if name.endswith(CHANNEL_SCALE)]
    if found:
        finder.taken.update(found)
        finder.problems.append(
            f"{quoted(finder.spell(found[0]))}: scales of the input channels of routed experts are "
            "not supported, because one kernel runs all experts on the same inputs; quantize the "
            "experts with NVFP4 in place of NVFP4_AWQ"
        )


def _first_weight(finder, products: Products) -> Weight:
    """Return the stored weight of the first expert's down projection, or of all experts'."""
    packed, stem = products[1].projections[0].names(finder, finder.names.packed)
    found = (finder.find(stem + name) for name in (finder.names.block_scale, *SCALE_NAMES))
    values = finder.find(packed) or finder.find(f"{stem}weight")
    return Weight(values, next(filter(None, found), None))


def _decide(finder, prefix, products: Products, forms) -> CheckpointScheme:
    """Return the scheme of the experts; a layer whose experts differ is a problem.

    Args:
      finder: as for `find_experts`.
      prefix: as for `find_experts`.
      products: name the projections of the experts.
      forms: the forms that the stored weights may have.
    """
    before = len(finder.problems)
    scales = (finder.names.input_global, FP8_INPUT_SCALE)
    calibrated = functools.cache(
        lambda: any(name.endswith(scales) for name in finder.tensors.under(f"{prefix}."))
    )
    decisions = {}  # scheme -> the first module that has it, and its decision
    for module in (finder.spell(one.stem) for each in products for one in each.projections):
        decision = finder.decide(module, forms, calibrated)
        decisions.setdefault(decision.scheme, (module, decision))
    if len(finder.problems) > before:
        return None
    if len(decisions) > 1:
        said = ", ".join(f"{quoted(m)} {s or 'dense'}" for s, (m, _) in decisions.items())
        finder.problems.append(
            f"{quoted(prefix)}: all experts of a layer must have one scheme, but they differ: "
            f"{said}"
        )
        return None
    scheme, (_, decision) = next(iter(decisions.items()))
    finder.decisions[f"{prefix}.*"] = decision
    return scheme


def _decide_mxfp4(finder, prefix, products: Products) -> None:
    """Record how experts in MXFP4 are declared; they become NVFP4 without rounded activations."""
    scheme, format, key = (
        _decide(finder, prefix, products, ()),
        finder.quant.format,
        f"{prefix}.*",
    )
    if key not in finder.decisions or scheme is Scheme.W4A16:
        return
    source, said = finder.decisions[key].source, scheme or "dense"
    # DeepSeek-V4 declares FP8 for all modules, and its experts are MXFP4.
    if format is None or not format.mx_experts or not isinstance(scheme, BlockFP8):
        finder.warn(
            f"stored in MXFP4, declared {said}",
            prefix,
            f"{quoted(prefix)}: experts are stored in MXFP4 but declared {said} ({source}): "
            "what is stored decides, and they are cast to NVFP4, w4a16",
        )
    source = f"stored in MXFP4, though declared {said} ({source})"
    finder.decisions[key] = Decision(Scheme.W4A16, source)
