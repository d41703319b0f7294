"""The two decisions about an op: the scheme (which numbers) and the backend (which kernel).

The scheme changes the results. The backend must not change them beyond rounding. Both decisions are
pure functions of static facts. `choose_scheme` decides the scheme from the checkpoint, the request
of the user and the device:

| checkpoint | requested | device | scheme |
|---|---|---|---|
| weights only | nothing | any | w4a16; input scales in the file are ignored with a note |
| w4a4 | nothing | with FP4 tensor cores (10.x, 12.x) | w4a4 |
| w4a4 | nothing | any other | w4a16, which is at least as accurate and faster there |
| any | checkpoint | any | as the file declares, module by module |
| w4a4 | w4a16 or w4a4 | any | as requested |
| weights only | w4a16 | any | w4a16 |
| weights only | w4a4 | any | error: there are no input scales |
| any | w4a4_unit_scale | any | activations rounded to FP4 with global scales of 1 |
| any | w4a4_token_scale | any | activations rounded to FP4 with one global scale per token |

`backends.resolution.resolve` decides the backend: the first record of an ordered tuple that accepts
the problem. A `backends.plan.Plan` holds both decisions.
"""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

import jax

from jax_nvfp4_moe.numerics.fp8_blocks import BlockFP8

ComputeCapability = tuple[int, int]


class Scheme(enum.StrEnum):
    """How activations enter the GEMMs; the weights are NVFP4 in all schemes.

    Every function that takes a scheme also takes its string.

    Attributes:
      W4A16: "w4a16". Activations stay in bfloat16, float16 or float32.
      W4A4: "w4a4". Activations are rounded to NVFP4 with calibrated input scales.
      W4A4_UNIT_SCALE: "w4a4_unit_scale". Activations are rounded to NVFP4 with a global scale of 1.
      W4A4_TOKEN_SCALE: "w4a4_token_scale". Activations are rounded to NVFP4, each row with its own
        global scale ``amax / 2688``.

    Example:
      >>> import jax_nvfp4_moe as nvfp4
      >>> nvfp4.Scheme("w4a4") is nvfp4.Scheme.W4A4
      True

    Source: vLLM and compressed-tensors use the names "w4a16" and "w4a4".
    """

    W4A16 = "w4a16"
    W4A4 = "w4a4"
    W4A4_UNIT_SCALE = "w4a4_unit_scale"
    W4A4_TOKEN_SCALE = "w4a4_token_scale"


class FP8ActivationScaling(enum.StrEnum):
    """How activations enter the GEMMs with matrices in FP8 (E4M3).

    Attributes:
      STATIC: activations are rounded to E4M3 with one calibrated scale.
      TOKEN: activations are rounded to E4M3, each row with its own scale ``amax / 448``.
      TENSOR: activations are rounded to E4M3 with one scale ``amax / 448`` for all rows.
      WEIGHTS: activations are not rounded.
    """

    STATIC = "fp8"
    TOKEN = "fp8_token"
    TENSOR = "fp8_tensor"
    WEIGHTS = "fp8_weights"


# Compute capability -> the largest number of bytes of shared memory that a thread block may use
# ("maximum amount of shared memory per thread block" in the CUDA C++ Programming Guide). For a GPU
# that is not listed, the smallest value is assumed.
_SHARED_BYTES = {
    (8, 0): 163 << 10,
    (8, 6): 99 << 10,
    (8, 7): 163 << 10,
    (8, 9): 99 << 10,
    (9, 0): 227 << 10,
    (10, 0): 227 << 10,
    (10, 3): 227 << 10,
    (11, 0): 227 << 10,
    (12, 0): 99 << 10,
    (12, 1): 99 << 10,
}

# Schemes that compute their scales at run time, from at least a whole row of activations.
DYNAMIC = frozenset(
    {Scheme.W4A4_TOKEN_SCALE, FP8ActivationScaling.TOKEN, FP8ActivationScaling.TENSOR}
)
# What a checkpoint declares for one module. None means that the module is not quantized.
CheckpointScheme = Scheme | FP8ActivationScaling | BlockFP8 | None

CHECKPOINT = "checkpoint"  # requests the scheme that the file declares
W4A4_SCHEMES = frozenset(Scheme) - {Scheme.W4A16}
NEEDS_INPUT_SCALES = (
    "w4a4 needs input scales, and these weights have none. To calibrate a checkpoint, run "
    "`jax-nvfp4-moe quantize SOURCE DESTINATION --text FILE`. For your own model, make it without "
    "a scheme, and run `nvfp4.calibrate(model, batches, scheme='w4a4')`. Or pass your own scales "
    "(float32, amax / 2688 of the activations that enter each GEMM): gate_up_input_scale and "
    "down_input_scale of MoEParams, or input_scale of NVFP4Linear, together with scheme='w4a4' or "
    "checkpoint_scheme='w4a4'. The schemes w4a4_unit_scale and w4a4_token_scale need no input "
    "scales"
)


@dataclasses.dataclass(frozen=True)
class Target:
    """The device for which a program is lowered; the machine need not have it.

    Attributes:
      platform: "cpu", "cuda", or another platform of XLA such as "tpu" or "rocm", where every op
        runs the reference.
      compute_capability: pair such as ``(9, 0)`` for a CUDA device; None (default) for any other
        platform.

    Raises:
      ValueError: if `platform` is empty, a CUDA target has no compute capability, or another target
        has one.

    Example:
      >>> import jax_nvfp4_moe as nvfp4
      >>> hopper = nvfp4.Target("cuda", (9, 0))
      >>> print(hopper, hopper.has_fp4_tensor_cores)
      cuda 9.0 False
    """

    platform: str
    compute_capability: ComputeCapability | None = None

    def __post_init__(self):
        """Check that the platform and the compute capability belong together."""
        if not self.platform:
            raise ValueError(f"platform: expected a name such as 'cpu', got {self.platform!r}")
        if (self.platform == "cuda") != (self.compute_capability is not None):
            raise ValueError(
                "compute_capability: expected a pair such as (9, 0) with platform 'cuda' and None "
                f"with any other; got {self.compute_capability} with {self.platform!r}"
            )
        pair = self.compute_capability
        if pair is not None and not (
            isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(n, int) for n in pair)
        ):
            raise ValueError(
                f"compute_capability: expected a pair of integers such as (9, 0), got {pair!r}"
            )

    @classmethod
    def current(cls) -> "Target":
        """Return the target of JAX's default device.

        Only this method and `of` look at a device; everything else reads the static fields.
        """
        default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
        device = default or jax.devices()[0]
        return cls.of(jax.devices(device)[0] if isinstance(device, str) else device)

    @classmethod
    def of(cls, device: Any) -> "Target":
        """Return the target of a `jax.Device`."""
        if device.platform not in ("gpu", "cuda", "rocm"):
            return cls(device.platform.lower())
        # JAX calls every GPU "gpu". The compute capability of an NVIDIA GPU is a version such as
        # "9.0". That of an AMD GPU is the name of an architecture such as "gfx942".
        major, dot, minor = str(device.compute_capability).partition(".")
        return cls("cuda", (int(major), int(minor))) if dot else cls("rocm")

    @property
    def has_fp4_tensor_cores(self) -> bool:
        """Whether the device multiplies FP4 by FP4 natively: compute capability 10.x and 12.x."""
        return self.compute_capability is not None and self.compute_capability[0] in (10, 12)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a thread block may use; 0 without a compute capability."""
        if self.compute_capability is None:
            return 0
        return _SHARED_BYTES.get(self.compute_capability, min(_SHARED_BYTES.values()))

    def __str__(self) -> str:
        """Return the platform and, if there is one, the compute capability: "cuda 9.0"."""
        if self.compute_capability is None:
            return self.platform
        return f"{self.platform} {self.compute_capability[0]}.{self.compute_capability[1]}"


def choose_scheme(
    checkpoint_scheme: Scheme | str, requested_scheme: Scheme | str | None, target: Target
) -> tuple[Scheme, str]:
    """Choose the scheme of one module, by the table at the top of `scheme`.

    Args:
      checkpoint_scheme: what the checkpoint declares for the module, "w4a16" or "w4a4".
      requested_scheme: None, "checkpoint" or a `Scheme`.
      target: the device.

    Returns:
      A tuple of the scheme and of the reason, in words for a user.

    Raises:
      ValueError: if `requested_scheme` is unknown, or is "w4a4" and the checkpoint has no input
        scales.
    """
    checkpoint_scheme = find_scheme("checkpoint_scheme", checkpoint_scheme)
    if requested_scheme == CHECKPOINT:
        return checkpoint_scheme, f"the weights are declared {checkpoint_scheme}"
    if requested_scheme is not None:
        return _as_asked(checkpoint_scheme, requested_scheme)
    if checkpoint_scheme is Scheme.W4A16:
        return Scheme.W4A16, "only the weights are quantized, and not the activations"
    if target.has_fp4_tensor_cores:
        return Scheme.W4A4, f"the weights are declared w4a4 and {target} has FP4 tensor cores"
    return Scheme.W4A16, (
        f"{target} has no FP4 tensor cores, so weight-only is at least as accurate and faster; "
        "ask for scheme='w4a4' or 'checkpoint' to round activations to FP4"
    )


def find_scheme(name: str, value: Scheme | str) -> Scheme:
    """Return the `Scheme` of an argument that is called `name`.

    Raises:
      ValueError: there is no such scheme.
    """
    if value not in list(Scheme):
        raise ValueError(f"{name}: expected one of {[str(one) for one in Scheme]}, got {value!r}")
    return Scheme(value)


def rounds_to_fp8(requested_scheme: Scheme | str | None, target: Target) -> bool:
    """Whether activations, keys and values that a checkpoint declares as FP8 are rounded to FP8.

    They are rounded if w4a4 activations with the scales of the file are: for scheme "checkpoint",
    for "w4a4", and without a request on FP4 tensor cores. Otherwise they keep the dtype of the
    model, which is at least as accurate. Weights in FP8 stay in FP8 in both cases.
    """
    return choose_scheme(Scheme.W4A4, requested_scheme, target)[0] is Scheme.W4A4


def _as_asked(checkpoint_scheme, requested_scheme):
    """Return the requested scheme and the reason, or raise if the checkpoint does not allow it."""
    if requested_scheme not in list(Scheme):
        raise ValueError(
            f"scheme: expected None, {CHECKPOINT!r} or one of {[str(s) for s in Scheme]}; "
            f"got {requested_scheme!r}"
        )
    if requested_scheme == Scheme.W4A4 and checkpoint_scheme is Scheme.W4A16:
        raise ValueError(f"scheme: {NEEDS_INPUT_SCALES}")
    return Scheme(requested_scheme), f"asked for {requested_scheme}"


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static facts of one op: all that the choice of a backend may depend on.

    Attributes:
      op: "moe_mlp", "grouped_gemm" (also for `linear`), or the name of another op.
      scheme: a `Scheme`; None for ops that multiply no NVFP4 weights.
      target: the device.
      dtype: name of the dtype of the activations, "bfloat16" by default.
      num_experts, top_k: number of experts or groups, in all and per token, 1 by default.
      hidden: number of features of a token, or k of a GEMM; 16 by default.
      intermediate: number of features between two GEMMs, or n of a GEMM; 16 by default.
      activation: name of the activation, or None (default) for an op without one.
      sizes: further sizes on which the choice depends, by name, such as {"key width": 64}. Pairs
        (name, number) are accepted too, and are what the field holds; empty (default) for none.
      cache_dtype: dtype of the keys and values, if they are in FP8; None (default) otherwise.
      weight_dtype: dtype of weights that are not quantized; None (default) for other ops.
      unavailable: pairs (extension, reason) of compiled modules that this process lacks. Empty
        (default) for a target other than the current device, because lowering needs no extension.

    Example:
      >>> import jax_nvfp4_moe as nvfp4
      >>> problem = nvfp4.Problem("moe_mlp", nvfp4.Scheme.W4A16, nvfp4.Target("cuda", (9, 0)))
      >>> nvfp4.explain(problem).backend
      'moe_w4a16_sm90'
    """

    op: str
    scheme: Scheme | None
    target: Target
    dtype: str = "bfloat16"
    num_experts: int = 1
    top_k: int = 1
    hidden: int = 16
    intermediate: int = 16
    activation: str | None = None
    sizes: Mapping[str, int] | tuple[tuple[str, int], ...] = ()
    cache_dtype: str | None = None
    weight_dtype: str | None = None
    unavailable: tuple[tuple[str, str], ...] = ()

    def __post_init__(self):
        """Keep the sizes as pairs, because the fields of a static value must have a hash."""
        object.__setattr__(self, "sizes", tuple(dict(self.sizes).items()))


@dataclasses.dataclass(frozen=True)
class Choice:
    """The result of `explain`: a scheme, a backend and all reasons.

    It prints as a table.

    Attributes:
      scheme: the chosen `Scheme`, or None for an op without a scheme.
      backend: name of the chosen backend.
      reasons: name of each backend of the op that cannot run the problem -> the reason.
      why: the reason for the scheme, in words for a user.
      problem: the `Problem` that was explained, or None.
      modules: for a model, pairs (path of a module, its `Choice`); empty for one problem.
      notes: which kernels of the backend run, in cases in which a user may expect others.

    Example:
      >>> import jax_nvfp4_moe as nvfp4
      >>> problem = nvfp4.Problem("moe_mlp", nvfp4.Scheme.W4A4, nvfp4.Target("cuda", (12, 0)))
      >>> choice = nvfp4.explain(problem)
      >>> choice.backend, choice.reasons["moe_w4a16_cpu"]
      ('moe_w4a4_sm120', 'needs cpu, got cuda 12.0')
    """

    scheme: Scheme | None
    backend: str
    reasons: Mapping[str, str]
    why: str = ""
    problem: Problem | None = None
    modules: tuple[tuple[str, "Choice"], ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the table: scheme, backend, notes, reasons against other backends, modules."""
        target = f" on {self.problem.target}" if self.problem else ""
        lines = [f"scheme   {self.scheme}{f': {self.why}' if self.why else ''}"]
        lines.append(f"backend  {self.backend}{target}")
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  not {name}: {reason}" for name, reason in self.reasons.items()]
        lines += [f"  {path}: {c.scheme}, {c.backend}" for path, c in self.modules]
        return "\n".join(lines)


class NoBackendError(ValueError):
    """No backend can run a problem; the message lists every backend of the op with its reason.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_nvfp4_moe as nvfp4
      >>> try:
      ...     nvfp4.ops.quantize_nvfp4(jnp.ones((4, 32)), backend="route_cuda")
      ... except nvfp4.NoBackendError as error:
      ...     print(str(error).splitlines()[0][:39])
      backend 'route_cuda' cannot run Problem
    """
