"""Options for reading a checkpoint through `table.WeightTable`."""

import dataclasses
from typing import Any

from jax_nvfp4_moe.checkpoint.weights.finder import InputScales


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """How to read a checkpoint.

    Attributes:
      dtype: the dtype of dense float arrays. None keeps the dtype of the file.
      input_scales: whether to read the input scales of modules that declare W4A4 or static FP8.
        "required" reports a module without them as a problem, "optional" gives None for that
        module, and "ignored" reads none.
      only: the prefix of all tensors that are asked for, such as "model.layers.3.mlp". Tensors
        elsewhere are not reported as unexpected. None means the whole checkpoint.
      num_layers: tensors of layers from this number on are not reported as unexpected. None takes
        the number from the config.
    """

    dtype: Any = None
    input_scales: InputScales = "required"
    only: str | None = None
    num_layers: int | None = None
