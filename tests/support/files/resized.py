"""Write given checkpoints at other sizes, with values drawn from the given tensors."""

import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_nvfp4_moe import Target
from jax_nvfp4_moe.checkpoint import LinearWeights, Source, open_checkpoint
from jax_nvfp4_moe.checkpoint.export import write_checkpoint
from jax_nvfp4_moe.checkpoint.folder import merge_text_config
from jax_nvfp4_moe.models.loading import find_architecture
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.settings import Settings
from jax_nvfp4_moe.numerics.tensor import DenseExperts

BLOCK = 16


class Asked:
    """Stand in for a `WeightTable` of dense tensors, and record what was asked for.

    Attributes:
      arrays: name -> shape.
      linears: module -> n and k, for modules that may be quantized.
    """

    def __init__(self, tensors):
        """Make a table that has the tensors of an open checkpoint."""
        self._tensors = tensors
        self.arrays, self.linears = {}, {}

    def has_under(self, prefix):
        # A head is drawn where the config asks for one. Where it is tied, it equals the embedding.
        return prefix == "lm_head." or next(self._tensors.under(prefix), None) is not None

    def checkpoint_scheme(self, module):
        return None

    def ignore(self, prefix, reason):
        pass

    def same(self, module, name):
        return True

    def warn(self, fact):
        """Ignore what the checkpoint stores and the changed config denies: it is written, too."""

    def cache_scales(self, prefix, **heads):
        return None

    def array(self, name, shape, *, dtype=None, stored=None, keeps_bfloat16=False):
        self.arrays[name] = tuple(stored or shape)
        return abstract(name, jax.ShapeDtypeStruct(shape, dtype or jnp.float32))

    def linear(self, prefix, n, k, *, bias=False):
        self.linears[prefix] = n, k
        name = f"{prefix}.bias"
        has_bias = bias or (bias is None and name in self._tensors)
        found = self.array(name, (n,)).value if has_bias else None
        return abstract(prefix, LinearWeights(jax.ShapeDtypeStruct((n, k), jnp.float32), found))

    def experts(
        self, prefix, count, hidden, intermediate, *, gated=True, bias=False, inputs_first=None
    ):
        del inputs_first  # only of stacked experts, and these are written one by one
        assert not bias
        up, down = (intermediate, hidden), (hidden, intermediate)
        shapes = {"gate_proj": up, "up_proj": up, "down_proj": down}
        if not gated:
            del shapes["gate_proj"]
        for expert in range(count):
            for name, shape in shapes.items():
                self.linears[f"{prefix}.{expert}.{name}"] = shape
        rows = (len(shapes) - 1) * intermediate
        params = (count, rows, hidden), (count, *down)
        return abstract(
            prefix, DenseExperts(*(jax.ShapeDtypeStruct(one, jnp.float32) for one in params))
        )


def abstract(name, value):
    """Return a source that has a shape but no values."""
    return Source(name, value)


def write_resized(given, folder, **changes):
    """Write the ModelOpt W4A16 checkpoint `given` to `folder`, with fields of its config replaced.

    Experts that the checkpoint lacks take values of its first expert.
    """
    with open_checkpoint(given) as checkpoint:
        config = merge_text_config(checkpoint.config) | changes
        # text_config is merged already. If it were merged again, it would undo `changes`.
        config.pop("text_config", None)
        row, asked = find_architecture(config), Asked(checkpoint.tensors)
        settings = Settings(Target("cpu"), dtype=jnp.float32)
        make = Builder(asked, row.keys, settings)
        nnx.eval_shape(lambda: row.build_model(row.read_config(config), make))
        source = {name: checkpoint.tensors.read(name).copy() for name in checkpoint.tensors.names()}
    tensors = {name: draw(name, source[name], shape) for name, shape in asked.arrays.items()}
    dense = []
    for module, (n, k) in asked.linears.items():
        like = module if f"{module}.weight" in source else _alike(module, source)
        parts = {"weight": (n, k)}
        if f"{like}.weight_scale" in source:
            parts = {"weight": (n, k // 2), "weight_scale": (n, k // BLOCK), "weight_scale_2": ()}
        else:
            dense.append(module)
        for part, shape in parts.items():
            tensors[f"{module}.{part}"] = draw(f"{module}.{part}", source[f"{like}.{part}"], shape)
    write_checkpoint(folder, tensors, config, algorithm="W4A16_NVFP4", exclude=tuple(dense))


# To draw each of a billion numbers would take most of a test's time. So many of them repeat. The
# number is prime, so that no two rows of a matrix are equal.
_DRAWN = 65521


def draw(name, values, shape):
    """Return random elements of `values`. A name always gives the same elements."""
    values = values.reshape(-1)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return np.resize(values[rng.integers(values.size, size=min(_DRAWN, math.prod(shape)))], shape)


def _alike(module, source):
    """Return the module of `source` that supplies values for `module`, which `source` lacks."""
    if ".experts." in module:
        prefix, _, rest = module.partition(".experts.")
        projection = rest.partition(".")[2]
        found = f"{prefix}.experts.0.{projection}"
        others = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        return found if f"{found}.weight" in source else f"{prefix}.experts.0.{others[projection]}"
    if module == "lm_head":
        return "model.embed_tokens"
    return next(n for n in source if n.endswith(".weight_scale")).removesuffix(".weight_scale")
