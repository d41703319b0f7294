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
the problem. A `Plan` holds both decisions.
"""

import dataclasses
import enum
from collections.abc import Callable, Mapping
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
      head_widths: widths of attention heads or of parts of them; empty (default) for other ops.
      cache_dtype: dtype of the keys and values, if they are in FP8; None (default) otherwise.
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
    head_widths: tuple[int, ...] = ()
    cache_dtype: str | None = None
    unavailable: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Device:
    """The compute capabilities ``[low, high)`` on which a backend implements `schemes`.

    A CPU counts as (0, 0). The scheme None stands for ops without a scheme.
    """

    schemes: frozenset[Scheme | None]
    low: ComputeCapability = (0, 0)
    high: ComputeCapability = (1000, 0)

    def __contains__(self, problem: Problem) -> bool:
        """Whether both the scheme and the device of `problem` are in this range."""
        return problem.scheme in self.schemes and self.reaches(problem)

    def reaches(self, problem: Problem) -> bool:
        """Whether the device of `problem` is in this range, whatever its scheme."""
        return self.low <= (problem.target.compute_capability or (0, 0)) < self.high


def does_not_implement(op: str) -> str:
    """Return the reason against a backend of other ops, which tables for users leave out."""
    return f"does not implement {op}"


@dataclasses.dataclass(frozen=True)
class Capability:
    """What a backend accepts. A field with its default value accepts everything that it can.

    Attributes:
      ops: names of the ops that the backend implements.
      devices: the devices on which it implements certain schemes.
      platform: "cpu", "cuda", or None (default) for any platform.
      extension: name of the compiled module with the kernels, or of a part of one (`_ffi.PARTS`);
        None (default) for plain XLA.
      dtypes: names of the dtypes of activations.
      max_experts, max_top_k: largest number of experts, in all and per token.
      max_extent: largest number of rows or columns of a matrix.
      head_widths: range of all widths of heads, or a tuple with one range for each.
      shared_bytes: bytes of shared memory per thread block that the most demanding kernel needs.
    """

    ops: frozenset[str]
    devices: tuple[Device, ...]
    platform: str | None = None
    extension: str | None = None
    dtypes: frozenset[str] = frozenset({"bfloat16", "float16", "float32"})
    max_experts: int = 512
    max_top_k: int = 32
    max_extent: int = 1 << 62
    head_widths: range | tuple[range, ...] = range(1 << 62)
    shared_bytes: int = 0

    def reason_against(self, p: Problem) -> str | None:
        """Return in words why this backend cannot run the problem `p`; None if it can."""
        if p.op not in self.ops:  # the most frequent reason, which needs no other text
            return does_not_implement(p.op)
        missing = dict(p.unavailable).get(self.extension or "")
        extent, most, widths = max(p.hidden, p.intermediate), self.max_extent, self.head_widths
        each = widths if isinstance(widths, tuple) else (widths,) * len(p.head_widths)
        reached = [d for d in self.devices if d.reaches(p)]
        checks = (
            (self.platform in (None, p.target.platform), f"needs {self.platform}, got {p.target}"),
            (bool(reached), f"needs {self._ranges()}, got {p.target}"),
            (
                self.shared_bytes <= p.target.shared_bytes,
                f"needs {self.shared_bytes} bytes of shared memory per thread block, and "
                f"{p.target} has {p.target.shared_bytes}",
            ),
            (any(p in d for d in reached), f"does not implement {p.scheme} on {p.target}"),
            (p.dtype in self.dtypes, f"needs {' or '.join(sorted(self.dtypes))}, got {p.dtype}"),
            (
                p.num_experts <= self.max_experts,
                f"needs at most {self.max_experts} experts, got {p.num_experts}",
            ),
            (p.top_k <= self.max_top_k, f"needs top_k of at most {self.max_top_k}, got {p.top_k}"),
            (extent <= most, f"needs matrices of at most {most} rows and columns, got {extent}"),
            (
                all(w in own for w, own in zip(p.head_widths, each, strict=False)),
                f"needs widths of heads in {widths}, got {p.head_widths}",
            ),
            (missing is None, f"{missing}"),
        )
        return next((why for ok, why in checks if not ok), None)

    def _ranges(self):
        """Return the ranges of compute capability in words."""
        spans = (f"[{d.low[0]}.{d.low[1]}, {d.high[0]}.{d.high[1]})" for d in self.devices)
        return "compute capability in " + " or ".join(spans)


def no_notes(_: Problem) -> tuple[str, ...]:
    """Return no notes: for a backend that has one kernel for an op."""
    return ()


@dataclasses.dataclass(frozen=True, eq=False)
class Backend:
    """One way to compute ops: a record in the ordered tuple ``backends.BACKENDS``.

    Attributes:
      name: the common stem of the names of its kernel file, FFI targets and tests.
      can: the problems that it accepts.
      layout: name of the layout in which it reads weights.
      lower: op -> function that emits the computation.
      status: on which hardware it has been executed, emulated or only compiled.
      notes: function of a problem that says which kernels run where a user may expect others.
      ffi_targets: names of the FFI targets that `lower` calls; empty (default) for plain XLA.
    """

    name: str
    can: Capability
    layout: str
    lower: Mapping[str, Callable]
    status: str
    notes: Callable[[Problem], tuple[str, ...]] = no_notes
    ffi_targets: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one op runs: its scheme, its backend, and the layout in which the backend reads weights.

    `backends.resolution.resolve` creates one plan per layer. Weight preparation, the call and
    `explain` read that plan, so that weights are always prepared for the kernel that the call uses.

    Attributes:
      problem: the static facts, including the chosen scheme.
      backend: the chosen record.
      why: the reason for the scheme in words; empty if the problem already had a scheme.
      checkpoint_scheme: the scheme that the checkpoint declares, or None.
      requested_scheme: the requested scheme, or None; `explain` uses it for another device.
      requested_backends: names of the requested backends, or None.
    """

    problem: Problem
    backend: Backend
    why: str = ""
    checkpoint_scheme: Scheme | None = None
    requested_scheme: str | None = None
    requested_backends: tuple[str, ...] | None = None

    @property
    def scheme(self) -> Scheme | None:
        """The chosen scheme; None for an op without a scheme."""
        return self.problem.scheme

    @property
    def target(self) -> Target:
        """The device for which the op is lowered."""
        return self.problem.target

    @property
    def layout(self) -> str:
        """Name of the layout in which the backend reads weights."""
        return self.backend.layout

    @property
    def lower(self) -> Callable:
        """The backend's function that emits the computation."""
        return self.backend.lower[self.problem.op]

    def check(self, **facts: Any) -> None:
        """Check that the planned backend can run a call with other `facts`, fields of `Problem`.

        Raises:
          NoBackendError: if it cannot; the message says why.
        """
        problem = dataclasses.replace(self.problem, **facts)
        reason = self.backend.can.reason_against(problem)
        if reason and problem != self.problem:
            raise NoBackendError(
                f"plan: the weights are prepared for backend {self.backend.name!r}, which cannot "
                f"run {problem}: {reason}. Prepare the weights again with the facts of this call"
            )


@dataclasses.dataclass(frozen=True)
class Choice:
    """The result of `explain`: a scheme, a backend and all reasons.

    It prints as a table, which leaves out the backends of other ops.

    Attributes:
      scheme: the chosen `Scheme`, or None for an op without a scheme.
      backend: name of the chosen backend.
      reasons: name of each backend that cannot run the problem -> the reason.
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
        other = None if self.problem is None else does_not_implement(self.problem.op)
        lines += [
            f"  not {name}: {reason}" for name, reason in self.reasons.items() if reason != other
        ]
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
