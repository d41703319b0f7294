"""The two decisions: which numbers (scheme) and which kernel (backend). Pure, static facts only.

The scheme changes the numbers, the backend must not. `choose_scheme` decides the first from the
checkpoint, the user and the device:

| checkpoint | asked | device | scheme |
|---|---|---|---|
| weights only | nothing | any | w4a16; input scales in the file are ignored with a note |
| w4a4 | nothing | FP4 tensor cores (10.x, 12.x) | w4a4 |
| w4a4 | nothing | any other | w4a16: at least as accurate there, and faster |
| any | checkpoint | any | what the file says, module by module |
| w4a4 | w4a16 or w4a4 | any | as asked |
| weights only | w4a16 | any | w4a16 |
| weights only | w4a4 | any | error: no input scales |
| any | w4a4_unit_scale | any | activations rounded to FP4 with global scales of 1 |
| any | w4a4_token_scale | any | activations rounded to FP4 with one global scale per token |

`backends.resolution.resolve` decides the second: the first record of an ordered tuple that accepts
the problem. Both decisions stand in one `Plan`; preparing weights, the call and `explain` read it.
"""

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any

import jax

ComputeCapability = tuple[int, int]


class Scheme(enum.StrEnum):
    """How activations enter the products; weights are NVFP4 in all of them."""

    W4A16 = "w4a16"  # bfloat16, float16 or float32 activations, as they are
    W4A4 = "w4a4"  # rounded to NVFP4 with the calibrated input scales
    W4A4_UNIT_SCALE = "w4a4_unit_scale"  # rounded to NVFP4 with global scales of 1
    W4A4_TOKEN_SCALE = "w4a4_token_scale"  # rounded to NVFP4, each row with amax / 2688


class FP8ActivationScaling(enum.StrEnum):
    """How activations enter the products of a matrix in FP8 (E4M3)."""

    STATIC = "fp8"  # rounded to E4M3 with one calibrated scale
    TOKEN = "fp8_token"  # rounded to E4M3, each row with amax / 448
    TENSOR = "fp8_tensor"  # rounded to E4M3, all with amax / 448
    WEIGHTS = "fp8_weights"  # as they are


# Compute capability -> bytes of shared memory that a block of threads may have at most ("maximum
# amount of shared memory per thread block" in the CUDA C++ Programming Guide). Other GPUs count as
# the smallest.
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

# Schemes whose scales are found while running, of a whole row of activations or more.
DYNAMIC = frozenset(
    {Scheme.W4A4_TOKEN_SCALE, FP8ActivationScaling.TOKEN, FP8ActivationScaling.TENSOR}
)
CheckpointScheme = (
    Scheme | FP8ActivationScaling | None
)  # what a file says of one module; None: it is not quantized

CHECKPOINT = "checkpoint"  # asks for what the file declares
W4A4_SCHEMES = frozenset(Scheme) - {Scheme.W4A16}
NEEDS_INPUT_SCALES = (
    "w4a4 needs input scales, and these weights come without. `jax-nvfp4-moe quantize SOURCE "
    "DESTINATION --text FILE` calibrates those of a checkpoint; experts of your own take them as "
    "gate_up_input_scale and down_input_scale of MoEParams, float32 [e], amax / 2688 of what "
    "enters each product, and say so by NVFP4MoE(checkpoint_scheme='w4a4'). Schemes "
    "w4a4_unit_scale and w4a4_token_scale need none"
)


@dataclasses.dataclass(frozen=True)
class Target:
    """The device that a program is lowered for.

    Attributes:
      platform: "cpu", "cuda", or another that XLA compiles for, such as "tpu" or "rocm", where
        every op runs the reference.
      compute_capability: of a CUDA device, such as ``(9, 0)``; None elsewhere.

    Raises:
      ValueError: the platform has no name, a CUDA target has no compute capability, or another
        target has one.
    """

    platform: str
    compute_capability: ComputeCapability | None = None

    def __post_init__(self):
        """Check the platform and that it goes with the compute capability."""
        if not self.platform:
            raise ValueError(f"platform: expected a name such as 'cpu', got {self.platform!r}")
        if (self.platform == "cuda") != (self.compute_capability is not None):
            raise ValueError(
                "compute_capability: expected a pair such as (9, 0) with platform 'cuda' and None "
                f"with any other; got {self.compute_capability} with {self.platform!r}"
            )

    @classmethod
    def current(cls) -> "Target":
        """Return the target of JAX's default device; only this and `of` look at a device."""
        default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
        device = default or jax.devices()[0]
        return cls.of(jax.devices(device)[0] if isinstance(device, str) else device)

    @classmethod
    def of(cls, device: Any) -> "Target":
        """Return the target of a `jax.Device`."""
        if device.platform not in ("gpu", "cuda", "rocm"):
            return cls(device.platform.lower())
        # JAX calls every GPU "gpu". That of NVIDIA has a version such as "9.0", that of AMD the
        # name of an architecture such as "gfx942".
        major, dot, minor = str(device.compute_capability).partition(".")
        return cls("cuda", (int(major), int(minor))) if dot else cls("rocm")

    @property
    def has_fp4_tensor_cores(self) -> bool:
        """Whether the device multiplies FP4 by FP4 natively (10.x and 12.x)."""
        return self.compute_capability is not None and self.compute_capability[0] in (10, 12)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a block of threads may have; 0 on a CPU."""
        if self.compute_capability is None:
            return 0
        return _SHARED_BYTES.get(self.compute_capability, min(_SHARED_BYTES.values()))

    def __str__(self) -> str:
        """Return the platform, with the compute capability if there is one: "cuda 9.0"."""
        if self.compute_capability is None:
            return self.platform
        return f"{self.platform} {self.compute_capability[0]}.{self.compute_capability[1]}"


def choose_scheme(
    checkpoint_scheme: Scheme | str, requested_scheme: Scheme | str | None, target: Target
) -> tuple[Scheme, str]:
    """Choose the scheme of one module; the table of this module's docstring.

    Args:
      checkpoint_scheme: what the checkpoint says of the module, "w4a16" or "w4a4".
      requested_scheme: None, "checkpoint" or a scheme.
      target: the device.

    Returns:
      The scheme and, in words for a user, why.

    Raises:
      ValueError: `requested_scheme` is no scheme, or is "w4a4" where the checkpoint has no input
        scales.
    """
    checkpoint_scheme = Scheme(checkpoint_scheme)
    if requested_scheme == CHECKPOINT:
        return checkpoint_scheme, f"the checkpoint declares {checkpoint_scheme}"
    if requested_scheme is not None:
        return _as_asked(checkpoint_scheme, requested_scheme)
    if checkpoint_scheme is Scheme.W4A16:
        return Scheme.W4A16, "the checkpoint quantizes weights only"
    if target.has_fp4_tensor_cores:
        return Scheme.W4A4, f"the checkpoint declares w4a4 and {target} has FP4 tensor cores"
    return Scheme.W4A16, (
        f"{target} has no FP4 tensor cores, so weight-only is at least as accurate and faster; "
        "ask for scheme='w4a4' or 'checkpoint' to round activations to FP4"
    )


def rounds_to_fp8(requested_scheme: Scheme | str | None, target: Target) -> bool:
    """Whether activations, keys and values that a file declares FP8 are rounded to it.

    Where those that it declares NVFP4 are rounded, with the file's scales: by scheme "checkpoint",
    by w4a4, and on FP4 tensor cores where nothing is asked. Elsewhere they keep the model's dtype,
    which is at least as accurate; weights in FP8 stay in FP8 either way.
    """
    return choose_scheme(Scheme.W4A4, requested_scheme, target)[0] is Scheme.W4A4


def _as_asked(checkpoint_scheme, requested_scheme):
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
    """The static facts of one op: all that a choice of backend may depend on.

    Attributes:
      op: "moe_mlp", "grouped_gemm", "linear", "quantize_nvfp4" or "route".
      scheme: the numbers; None for quantize_nvfp4 and route.
      target: the device.
      dtype: name of the activations' dtype.
      num_experts, top_k, hidden, intermediate: the layer's sizes; a product has hidden = k and
        intermediate = n.
      activation: name of the activation, or None.
      unavailable: pairs (extension, reason) of compiled modules that this process lacks. Empty
        for a target other than the current device: lowering asks for none.
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
    unavailable: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Device:
    """Compute capabilities ``[low, high)`` on which a backend implements `schemes`."""

    schemes: frozenset[Scheme | None]
    low: ComputeCapability = (0, 0)
    high: ComputeCapability = (1000, 0)

    def __contains__(self, problem: Problem) -> bool:
        """Whether the scheme and the device of `problem` are both inside."""
        return problem.scheme in self.schemes and self.reaches(problem)

    def reaches(self, problem: Problem) -> bool:
        """Whether the device of `problem` is inside."""
        return self.low <= (problem.target.compute_capability or (0, 0)) < self.high


@dataclasses.dataclass(frozen=True)
class Capability:
    """What a backend accepts. A field left at its default accepts everything.

    Attributes:
      ops: the ops that it implements.
      devices: where it implements which schemes.
      platform: "cpu", "cuda" or None for both.
      extension: the compiled module that holds it, or a part of one (`_ffi.PARTS`), or None.
      dtypes: of the activations.
      max_experts, max_top_k: largest sizes.
      max_extent: most rows or columns of a matrix.
      shared_bytes: bytes of shared memory that a block of threads needs, in the kernel of this
        backend that needs most.
    """

    ops: frozenset[str]
    devices: tuple[Device, ...]
    platform: str | None = None
    extension: str | None = None
    dtypes: frozenset[str] = frozenset({"bfloat16", "float16", "float32"})
    max_experts: int = 512
    max_top_k: int = 32
    max_extent: int = 1 << 62
    shared_bytes: int = 0

    def reason_against(self, p: Problem) -> str | None:
        """Say why this backend cannot run `p`, in words for a user; None if it can."""
        missing = dict(p.unavailable).get(self.extension or "")
        reached = [d for d in self.devices if d.reaches(p)]
        checks = (
            (p.op in self.ops, f"does not implement {p.op}"),
            (self.platform in (None, p.target.platform), f"needs {self.platform}, got {p.target}"),
            (bool(reached), f"needs {self._ranges()}, got {p.target}"),
            (
                self.shared_bytes <= p.target.shared_bytes,
                f"needs {self.shared_bytes} bytes of shared memory for a block of threads, and "
                f"{p.target} has {p.target.shared_bytes}",
            ),
            (any(p in d for d in reached), f"does not implement {p.scheme} on {p.target}"),
            (p.dtype in self.dtypes, f"needs {' or '.join(sorted(self.dtypes))}, got {p.dtype}"),
            (p.num_experts <= self.max_experts, f"needs at most {self.max_experts} experts"),
            (p.top_k <= self.max_top_k, f"needs top_k of at most {self.max_top_k}, got {p.top_k}"),
            (
                max(p.hidden, p.intermediate) <= self.max_extent,
                f"needs matrices of at most {self.max_extent} rows and columns, got "
                f"{max(p.hidden, p.intermediate)}",
            ),
            (missing is None, f"{missing}"),
        )
        return next((why for ok, why in checks if not ok), None)

    def _ranges(self):
        spans = (f"[{d.low[0]}.{d.low[1]}, {d.high[0]}.{d.high[1]})" for d in self.devices)
        return "compute capability in " + " or ".join(spans)


def no_notes(problem: Problem) -> tuple[str, ...]:
    """Return the notes of a backend that has one kernel for an op: none."""
    del problem
    return ()


@dataclasses.dataclass(frozen=True, eq=False)
class Backend:
    """One way to compute ops: a record in the ordered tuple ``backends.BACKENDS``.

    Attributes:
      name: the stem that its kernel file, FFI target and tests share.
      can: what it accepts.
      layout: name of the layout that it reads weights in.
      lower: op -> function that emits the computation.
      status: what has been shown of it, for tables.
      notes: problem -> which of its kernels run, and why, where a user may expect another.
      ffi_targets: names of the FFI targets that `lower` calls; none for plain XLA.
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
    """How one op runs: its scheme, its backend, and the layout in which that reads weights.

    A plan is resolved once for a layer, by `backends.resolution.resolve`. Preparing weights, the
    call and `explain` all read it, so that weights are prepared for the kernel that the call takes.

    Attributes:
      problem: the static facts, the chosen scheme among them.
      backend: the chosen record.
      why: why this scheme, in words for a user; empty where the problem came with its scheme.
      checkpoint_scheme, requested_scheme, requested_backends: what the choice was made from.
        `explain` chooses again from them for another device.
    """

    problem: Problem
    backend: Backend
    why: str = ""
    checkpoint_scheme: Scheme | None = None
    requested_scheme: str | None = None
    requested_backends: tuple[str, ...] | None = None

    @property
    def scheme(self) -> Scheme | None:
        """The chosen scheme; None for ops that have none."""
        return self.problem.scheme

    @property
    def target(self) -> Target:
        """The device that the op is lowered for."""
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
        """Check that the planned backend also runs a call with other `facts`, fields of `Problem`.

        Raises:
          NoBackendError: it does not; says why.
        """
        problem = dataclasses.replace(self.problem, **facts)
        if problem == self.problem:
            return
        if reason := self.backend.can.reason_against(problem):
            raise NoBackendError(
                f"plan: weights are prepared for backend {self.backend.name!r}, which cannot run "
                f"{problem}: {reason}"
            )


@dataclasses.dataclass(frozen=True)
class Choice:
    """What `explain` returns: a scheme, a backend and every reason; prints as a table.

    Attributes:
      scheme: the chosen scheme.
      backend: name of the chosen backend.
      reasons: name of each backend passed over -> why not.
      why: why this scheme.
      problem: what was asked.
      modules: of a model, pairs (module path, its choice); empty for one problem.
      notes: which kernels of the backend run, where a user may expect others.
    """

    scheme: Scheme | None
    backend: str
    reasons: Mapping[str, str]
    why: str = ""
    problem: Problem | None = None
    modules: tuple[tuple[str, "Choice"], ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the table."""
        target = f" on {self.problem.target}" if self.problem else ""
        lines = [f"scheme   {self.scheme}{f': {self.why}' if self.why else ''}"]
        lines.append(f"backend  {self.backend}{target}")
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  not {name}: {reason}" for name, reason in self.reasons.items()]
        lines += [f"  {path}: {c.scheme}, {c.backend}" for path, c in self.modules]
        return "\n".join(lines)


class NoBackendError(ValueError):
    """No backend can run a problem; the message carries every backend's reason."""
