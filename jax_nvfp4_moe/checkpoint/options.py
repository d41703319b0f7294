"""How a checkpoint is loaded: what the caller of `resolve.load` chooses."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax_nvfp4_moe.checkpoint.plan import InputScales
from jax_nvfp4_moe.scheme import CheckpointScheme

Place = Callable[[str, Any, CheckpointScheme], Any]


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """How to load.

    Attributes:
      dtype: of dense float arrays, None for that in the file.
      place: name, value, declared scheme -> the value on its device. A value is an array, a
        `LinearWeights`, a `MoEParams` or a `DenseExperts` of numpy arrays; called once it is read,
        before the next is. `jax.device_put` where it is None.
      input_scales: "required" takes them from modules that declare W4A4 and fails where there are
        none; "optional" gives None there; "ignored" reads none.
      only: prefix such as "model.layers.3.mlp" of all that is asked for; tensors elsewhere are no
        surplus.
      num_layers: tensors of later layers are no surplus; by the config where it is None.
      progress: whether to draw a bar on standard error; None draws one on a terminal.
      label: of the bar.
      deferred: whether `place` gets `LazyArray` arrays, all but input scales.
    """

    dtype: Any = None
    place: Place | None = None
    input_scales: InputScales = "required"
    only: str | None = None
    num_layers: int | None = None
    progress: bool | None = None
    label: str = "loading"
    deferred: bool = False
