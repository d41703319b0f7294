"""The head with which drafting layers propose tokens: a rounded copy of the model's head.

Each draft reads the whole head. That of a large vocabulary takes longer to read than a drafting
layer. A copy in 4 or 8 bits has 0.28 or 0.5 times the bytes of 16 bits. Only drafts are made with
it. The step that verifies them reads the head as it is, so that the copy changes no token.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jax_nvfp4_moe.nn.building.settings import Settings
from jax_nvfp4_moe.nn.linear.dense_linear import DenseLinear
from jax_nvfp4_moe.nn.linear.fp8_linear import FP8Linear
from jax_nvfp4_moe.nn.linear.nvfp4_linear import NVFP4Linear
from jax_nvfp4_moe.nn.variables import DerivedParam
from jax_nvfp4_moe.numerics import nvfp4
from jax_nvfp4_moe.numerics.fp8 import FP8Tensor, dynamic_scale, round_fp8
from jax_nvfp4_moe.numerics.tensor import NVFP4Tensor, quantize
from jax_nvfp4_moe.parallel.expert_mesh import TENSOR
from jax_nvfp4_moe.parallel.partition_specs import note_shardings
from jax_nvfp4_moe.parallel.shard_spec import axis_spec
from jax_nvfp4_moe.parallel.sharded_variable import find_layout, mark, sharded_axes
from jax_nvfp4_moe.scheme import CHECKPOINT, NoBackendError, Scheme

_LOG = logging.getLogger("jax_nvfp4_moe")
EXACT = "exact"
# By default, heads of fewer rows are not copied: they take little time, and the drafts of small
# models stay as they are.
LEAST_ROWS = 1 << 15
_ROWS = 1 << 13  # rows that are rounded at once, which bounds the memory that rounding needs


class _Format(NamedTuple):
    """A format of the copy.

    Attributes:
      make: takes the numbers of outputs and inputs and the settings, and returns the linear with
        weights of zeros.
      round_rows: takes rows ``[r, k]`` and the global scale of the whole head, and returns them in
        the format.
    """

    make: Callable[[int, int, Settings], Any]
    round_rows: Callable[[jax.Array, jax.Array], Any]


def _make_nvfp4(n, k, settings):
    """Return a linear that does not round what enters it, whatever the model does."""
    weight = quantize(jnp.zeros((n, k), settings.dtype))
    how = settings.module_arguments() | {"scheme": CHECKPOINT}
    return NVFP4Linear(k, n, weight=weight, checkpoint_scheme=Scheme.W4A16, **how)


def _make_fp8(n, k, settings):
    weight = FP8Tensor(jnp.zeros((n, k), jnp.float8_e4m3fn), jnp.zeros(n, jnp.float32))
    return FP8Linear(weight, target=settings.target, dtype=settings.dtype)


def _round_nvfp4(rows, global_scale):
    packed, block_scale, _ = nvfp4.quantize(rows, global_scale)
    return NVFP4Tensor.from_packed(packed, block_scale, global_scale)


def _round_fp8(rows, global_scale):
    del global_scale
    scale = dynamic_scale(rows, -1)
    return FP8Tensor(round_fp8(rows, scale, multiply_by_reciprocal=False), scale[:, 0])


_FORMATS: Mapping[str, _Format] = {
    "nvfp4": _Format(_make_nvfp4, _round_nvfp4),
    "fp8": _Format(_make_fp8, _round_fp8),
}
DRAFT_HEADS = EXACT, *_FORMATS


def check_draft_head(draft_head: Any, draft: str | None) -> None:
    """Check the argument `draft_head` of `load_model`.

    Raises:
      ValueError: it has another value, or nothing drafts.
    """
    if draft_head is not None and (
        not isinstance(draft_head, str) or draft_head not in DRAFT_HEADS
    ):
        listed = ", ".join(f"'{name}'" for name in DRAFT_HEADS)
        raise ValueError(f"draft_head: expected None or one of {listed}; got {draft_head!r:.80}")
    if draft_head is not None and draft is None:
        raise ValueError(
            f"draft_head: expected None without drafting layers, got {draft_head!r}; load them "
            "with draft='mtp', or leave draft_head out"
        )


def set_draft_head(model: Any, draft_head: str | None, settings: Settings) -> None:
    """Set the head with which the drafting layers of a model propose tokens.

    Args:
      model: a `Decoder` with drafting layers and weights.
      draft_head: as for `load_model`.
      settings: the settings of the model's modules.

    Raises:
      ValueError: the head cannot be rounded as asked.
      NoBackendError: no backend can run the copy that was asked for.
      MemoryError: the device has too little memory for the copy.
    """
    model.drafter.rounded_head = _make(model, draft_head, settings)
    if model.drafter.rounded_head is None:
        return
    try:
        round_head(model)
        jax.block_until_ready(model.drafter.rounded_head.weight.get_value())
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryError(
            f"out of memory on {settings.target}: the copy of the head for drafts could not be "
            "allocated. Load with draft_head='exact', which makes no copy"
        ) from error
    if settings.expert_mesh is not None:
        note_shardings(model.drafter.rounded_head, settings.expert_mesh)


def _make(model, draft_head, settings):
    """Return the abstract linear that holds the copy, or None for no copy."""
    if draft_head == EXACT:
        return None
    weight = _find_weight(model)
    if draft_head is None and not _is_large(weight):
        return None
    weight = _check_weight(weight, draft_head)
    (n, k), layout = weight.shape, find_layout(weight)
    own, form = n // (layout.shards if layout else 1), _FORMATS[draft_head or "nvfp4"]
    try:
        made = nnx.eval_shape(lambda: form.make(own, k, settings))
    except NoBackendError as error:
        if draft_head is not None:
            raise
        _LOG.info("no copy of the head for drafts, because no backend runs it: %s", error)
        return None
    if draft_head is None and made.plan.problem.op in made.plan.backend.slow:
        return None
    made.weight = mark(DerivedParam(made.weight.get_value()), layout)
    return made


def _find_weight(model) -> nnx.Variable | None:
    """Return the weights of the head of drafts ``[v, h]``; None if they are quantized already."""
    head = model.head if model.drafter.head is None else model.drafter.head
    if head is None:
        return model.embedding
    return head.weight if isinstance(head, DenseLinear) and head.bias is None else None


def _is_large(weight):
    """Return whether a copy of a head is made by default, if a kernel runs it."""
    return (
        weight is not None and weight.shape[0] >= LEAST_ROWS and weight.shape[1] % nvfp4.BLOCK == 0
    )


def _check_weight(weight: nnx.Variable | None, draft_head) -> nnx.Variable:
    """Return the weights of a head, after checking that they can be rounded as asked."""
    if weight is None:
        raise ValueError(
            f"draft_head: expected None or 'exact', because the head of this checkpoint is "
            f"quantized already; got {draft_head!r}"
        )
    if draft_head == "nvfp4" and weight.shape[1] % nvfp4.BLOCK:
        raise ValueError(
            f"draft_head: 'nvfp4' needs a hidden size that is a multiple of {nvfp4.BLOCK}, got "
            f"{weight.shape[1]}; use 'fp8' or 'exact'"
        )
    return weight


def round_head(model: Any) -> None:
    """Round the head of a model into `Drafter.rounded_head`, whose weights are replaced.

    Args:
      model: a `Decoder` whose drafter has a rounded head, with or without values.
    """
    linear, weight = model.drafter.rounded_head, _find_weight(model)
    assert weight is not None
    form = _FORMATS["nvfp4" if isinstance(linear, NVFP4Linear) else "fp8"]
    plan = getattr(linear, "plan", None)
    how = form.round_rows, None if plan is None else plan.layout, find_layout(weight)
    linear.weight = linear.weight.replace(_round(weight.get_value(), *how, model.expert_mesh))


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _round(weight, round_rows, layout, shards, expert_mesh):
    """Return the weights of a head ``[v, h]`` in a format.

    Args:
      weight: the head, whose rows are sharded as `shards` says.
      round_rows: as in `_Format`. The global scale is one for the whole head.
      layout: name of the layout of NVFP4 weights; None for another format.
      shards: `ShardLayout` of the rows; None if they are not sharded.
      expert_mesh: the mesh of the shards.
    """

    def run(rows, global_scale):
        return _round_part(rows, global_scale, round_rows, layout)

    # The largest magnitudes are exact in the dtype of the weight.
    scale = nvfp4.global_scale_of(jnp.abs(weight).max(axis=0, keepdims=True))
    if shards is None:
        return run(weight, scale)
    own = jax.ShapeDtypeStruct((weight.shape[0] // shards.shards, weight.shape[1]), weight.dtype)
    made = jax.eval_shape(run, own, scale)
    axes = sharded_axes(mark(DerivedParam(made), shards))
    leaves = expert_mesh.shard_map(
        lambda *part: jax.tree.leaves(run(*part)),
        (expert_mesh.spec(TENSOR), expert_mesh.spec()),
        [axis_spec(expert_mesh, axis) for axis in axes],
    )(weight, scale)
    return jax.tree.unflatten(jax.tree.structure(made), leaves)


def _round_part(weight, global_scale, round_rows, layout):
    """Round rows, a few at a time: the steps of rounding take several times their memory.

    The loop reads and writes integers, because XLA's CPU compiler converts a whole array of
    bfloat16 or FP8 in a loop to a wider type.
    """
    words, size = _bits(weight), min(_ROWS, weight.shape[0])

    def run(start):
        rows = lax.dynamic_slice_in_dim(words, start, size)
        rows = lax.bitcast_convert_type(rows, weight.dtype)
        return jax.tree.map(_bits, round_rows(rows, global_scale))

    def step(index, made):
        start = jnp.minimum(index * size, len(weight) - size)  # the last parts may overlap

        def write(whole, part):
            if part.ndim == 0:
                return part
            return lax.dynamic_update_slice_in_dim(whole, part, start, axis=0)

        return jax.tree.map(write, made, run(start))

    shapes = jax.eval_shape(round_rows, weight, global_scale)
    made = jax.tree.map(lambda leaf: _bits(jnp.zeros(leaf.shape, leaf.dtype)), shapes)
    made = lax.fori_loop(0, -(-len(weight) // size), step, made)
    made = jax.tree.map(lambda leaf, to: lax.bitcast_convert_type(leaf, to.dtype), made, shapes)
    return made if layout is None else made.to_layout(layout)


def _bits(array):
    """Return the bits of an array as integers."""
    return lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))
