"""How a checkpoint is read: what the caller of `table.WeightTable` chooses."""

import dataclasses
from typing import Any

from jax_nvfp4_moe.checkpoint.plan import InputScales


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """How to load.

    Attributes:
      dtype: of dense float arrays, None for that in the file.
      input_scales: "required" takes them from modules that declare W4A4 and fails where there are
        none; "optional" gives None there; "ignored" reads none.
      only: prefix such as "model.layers.3.mlp" of all that is asked for. Tensors elsewhere are not
        unexpected.
      num_layers: tensors of later layers are not unexpected; by the config where it is None.
    """

    dtype: Any = None
    input_scales: InputScales = "required"
    only: str | None = None
    num_layers: int | None = None
