"""Links to the references of JAX, Flax, NumPy and Python, and between short names of this one.

The documentation builds without a network. It therefore holds the addresses of the names that
docstrings use, in place of the inventories that Sphinx's intersphinx would download.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_JAX = "https://docs.jax.dev/en/latest"
_FLAX = "https://flax.readthedocs.io/en/stable/api_reference/flax.nnx"
_PYTHON = "https://docs.python.org/3/library"
# Address of a page, with {} in place of the name -> the names that it describes.
_PAGES = {
    f"{_JAX}/_autosummary/{{}}.html": (
        "jax.Array",
        "jax.Device",
        "jax.ShapeDtypeStruct",
        "jax.device_put",
        "jax.export.export",
        "jax.export.symbolic_shape",
        "jax.grad",
        "jax.jit",
        "jax.lax.all_to_all",
        "jax.lax.dot_general",
        "jax.lax.psum",
        "jax.lax.ragged_dot",
        "jax.lax.ragged_dot_general",
        "jax.lax.scan",
        "jax.lax.stop_gradient",
        "jax.make_mesh",
        "jax.named_scope",
        "jax.shard_map",
        "jax.vmap",
    ),
    f"{_JAX}/{{}}.html": ("jax.export", "jax.numpy"),
    f"{_JAX}/jax.export.html#{{}}": ("jax.export.Exported",),
    f"{_JAX}/jax.sharding.html#{{}}": (
        "jax.sharding.Mesh",
        "jax.sharding.NamedSharding",
        "jax.sharding.PartitionSpec",
        "jax.sharding.Sharding",
    ),
    f"{_FLAX}/graph.html#{{}}": ("flax.nnx.merge", "flax.nnx.split", "flax.nnx.state"),
    f"{_FLAX}/module.html#{{}}": ("flax.nnx.Module",),
    f"{_FLAX}/nn/linear.html#{{}}": ("flax.nnx.Linear",),
    f"{_FLAX}/nn/lora.html#{{}}": ("flax.nnx.LoRA", "flax.nnx.LoRAParam"),
    f"{_FLAX}/rnglib.html#{{}}": ("flax.nnx.Rngs",),
    f"{_FLAX}/state.html#{{}}": ("flax.nnx.State",),
    f"{_FLAX}/transforms.html#{{}}": (
        "flax.nnx.grad",
        "flax.nnx.jit",
        "flax.nnx.remat",
        "flax.nnx.scan",
        "flax.nnx.shard_map",
        "flax.nnx.vmap",
    ),
    f"{_FLAX}/variables.html#{{}}": ("flax.nnx.Param", "flax.nnx.Variable"),
    "https://numpy.org/doc/stable/reference/generated/{}.html": ("numpy.dtype", "numpy.ndarray"),
    # This page describes all types of arrays.
    "https://docs.kidger.site/jaxtyping/api/array/": (
        "jaxtyping.Bool",
        "jaxtyping.Float",
        "jaxtyping.Int",
        "jaxtyping.Int32",
        "jaxtyping.UInt8",
    ),
    f"{_PYTHON}/collections.abc.html#{{}}": (
        "collections.abc.Callable",
        "collections.abc.Iterable",
        "collections.abc.Iterator",
        "collections.abc.Mapping",
        "collections.abc.Sequence",
    ),
    f"{_PYTHON}/constants.html#{{}}": ("None", "True", "False"),
    f"{_PYTHON}/exceptions.html#{{}}": (
        "FileExistsError",
        "FileNotFoundError",
        "ImportError",
        "KeyError",
        "OSError",
        "RuntimeError",
        "TypeError",
        "ValueError",
    ),
    f"{_PYTHON}/functions.html#{{}}": ("bool", "float", "int", "type"),
    f"{_PYTHON}/pathlib.html#{{}}": ("pathlib.Path",),
    f"{_PYTHON}/stdtypes.html#{{}}": ("bytes", "dict", "list", "str", "tuple"),
    f"{_PYTHON}/typing.html#{{}}": ("typing.Any", "typing.NamedTuple", "typing.Protocol"),
}
# How names begin -> how docstrings and annotations shorten them.
_SHORT = {
    "flax.nnx.": "nnx.",
    "numpy.": "np.",
    "jax.sharding.": "",
    "collections.abc.": "",
    "typing.": "",
}
# Modules that define names which others export -> the name that is described.
_DEFINED = {
    "Array": "jax.Array",
    "jaxlib._jax.Array": "jax.Array",
    "jax._src.mesh.Mesh": "jax.sharding.Mesh",
    "flax.nnx.module.Module": "flax.nnx.Module",
    "flax.nnx.rnglib.Rngs": "flax.nnx.Rngs",
    "flax.nnx.variablelib.Variable": "flax.nnx.Variable",
}


def _spellings(name: str) -> Iterator[str]:
    """Yield a name in full, and as docstrings shorten it."""
    yield name
    yield from (name.replace(long, short, 1) for long, short in _SHORT.items() if long in name)


ADDRESSES = {
    spelled: page.format(name)
    for page, names in _PAGES.items()
    for name in names
    for spelled in _spellings(name)
}
ADDRESSES |= {name: ADDRESSES[described] for name, described in _DEFINED.items()}
# Kinds of objects that a short name may mean. A parameter often has the name of an attribute.
_KINDS = ("class", "data", "exception", "function")


def find_own(objects: Mapping[str, Any], target: str) -> str | None:
    """Return the name of this reference that a short name means; None if none or several match.

    A docstring says `balance_experts` and means
    `jax_nvfp4_moe.parallel.placement.balance_experts`.

    Args:
      objects: name -> what Sphinx knows of it, with its kind and whether it is only an alias.
      target: the short name.
    """
    found = [
        name
        for name, entry in objects.items()
        if name.endswith(f".{target}") and entry.objtype in _KINDS and not entry.aliased
    ]
    return found[0] if len(found) == 1 else None
