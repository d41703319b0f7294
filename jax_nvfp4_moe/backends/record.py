"""What a backend is: the devices and the problems that it takes, and how it lowers ops."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jax_nvfp4_moe.backends.launch_facts import facts, why_missing
from jax_nvfp4_moe.numerics.layouts import CANONICAL
from jax_nvfp4_moe.scheme import ComputeCapability, Problem, Scheme

# Names of the dtypes of activations that all ops take, and of those with 16 bits.
FLOATS = ("bfloat16", "float16", "float32")
HALVES = FLOATS[:2]
OPEN = 1 << 62  # end of a range without an upper bound
# Extension with the kernels of a platform.
_EXTENSIONS = {"cpu": "_nvfp4_cpu", "cuda": "_nvfp4_cuda"}


@dataclasses.dataclass(frozen=True)
class Device:
    """The devices of a platform with a compute capability in ``[low, high)``.

    Attributes:
      platform: "cpu", "cuda", or None (default) for any platform.
      low, high: bounds of the compute capability; a CPU counts as (0, 0).
      schemes: schemes that a backend implements on these devices; None (default) for all, and for
        ops without a scheme.
    """

    platform: str | None = None
    low: ComputeCapability = (0, 0)
    high: ComputeCapability = (1000, 0)
    schemes: frozenset[Scheme] | None = None

    def reaches(self, problem: Problem) -> bool:
        """Whether the device of `problem` is in this range, whatever its scheme."""
        return self.low <= (problem.target.compute_capability or (0, 0)) < self.high

    def implements(self, problem: Problem) -> bool:
        """Whether a backend implements the scheme of `problem` on these devices."""
        return self.schemes is None or problem.scheme in self.schemes

    def __str__(self) -> str:
        """Return the range of compute capabilities."""
        return f"[{self.low[0]}.{self.low[1]}, {self.high[0]}.{self.high[1]})"


ANYWHERE, CPU, CUDA = Device(), Device("cpu"), Device("cuda", (8, 0), (13, 0))


class Kernel:
    """A lowering to FFI targets: ``emit(*targets, *operands, **own, **options)``.

    Attributes:
      emit: function that emits the calls.
      targets: names of the FFI targets that it calls.
      own: options of `emit` that belong to the targets.
    """

    def __init__(self, emit: Callable[..., Any], *targets: str, **own: Any):
        self.emit, self.targets, self.own = emit, targets, own

    def __call__(self, *operands: Any, **options: Any) -> Any:
        """Emit the calls for the operands and options of an op."""
        return self.emit(*self.targets, *operands, **self.own, **options)


def no_notes(_: Problem) -> tuple[str, ...]:
    """Return no notes: for a backend that has one kernel for an op."""
    return ()


@dataclasses.dataclass(frozen=True, eq=False)
class Backend:
    """One way to compute ops: a record of the ordered tuple ``ops.records.RECORDS``.

    Attributes:
      name: the common stem of the names of its kernel file, FFI targets and tests.
      lower: op -> `Kernel`, or a function in plain JAX, that emits the computation.
      devices: where it runs, all of one platform; anywhere by default.
      part: name of the part of the platform's extension that has the kernels (`_ffi.PARTS`); None
        (default) if the extension itself has them.
      dtypes: names of the dtypes of activations, or None for any; `FLOATS` by default.
      weight_dtypes: dtype of activations -> dtypes of the weights that it takes with them. Empty
        (default) takes any.
      limits: name of a size of a problem -> the numbers that it takes.
      unasked: name of a size -> the numbers for which it is chosen without being asked for.
      max_experts, max_top_k: largest number of experts, in all and per token.
      max_extent: largest number of rows or columns of a matrix.
      shared_bytes: bytes of shared memory per thread block that the most demanding kernel needs.
        A string in place of one of these numbers or ranges is the name of a launch fact.
      layout: name of the layout in which it reads weights; canonical by default.
      status: on which hardware it has been executed (default), emulated or only compiled.
      slow: ops for which an automatic choice of this record is worth a warning.
      sharded_by_xla: whether XLA shards the operations of its lowerings. False (default) if each
        device runs them on the rows that it holds.
      notes: function of a problem that says which kernels run where a user may expect others.
      derivatives: op -> function in plain JAX that has the derivatives of the op on this backend.
        Ops without an entry (default) have those of their definition.
    """

    name: str
    lower: Mapping[str, Callable[..., Any]]
    devices: tuple[Device, ...] = (ANYWHERE,)
    part: str | None = None
    dtypes: tuple[str, ...] | None = FLOATS
    weight_dtypes: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    limits: Mapping[str, range | str] = dataclasses.field(default_factory=dict)
    unasked: Mapping[str, range] = dataclasses.field(default_factory=dict)
    max_experts: int | str = 512
    max_top_k: int | str = OPEN
    max_extent: int | str = OPEN
    shared_bytes: int | str = 0
    layout: str = CANONICAL
    status: str = "executed"
    slow: frozenset[str] = frozenset()
    sharded_by_xla: bool = False
    notes: Callable[[Problem], tuple[str, ...]] = no_notes
    derivatives: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)

    @property
    def platform(self) -> str | None:
        """The platform on which it runs; None for any."""
        return self.devices[0].platform

    @property
    def extension(self) -> str:
        """Name of the extension with its kernels, or of a part of one; empty for plain JAX."""
        if not self.ffi_targets:
            return ""
        own = _EXTENSIONS[self.platform or ""]
        return f"{own}.{self.part}" if self.part else own

    @property
    def ffi_targets(self) -> tuple[str, ...]:
        """Names of the FFI targets that it calls; empty for plain JAX."""
        kernels = (one for one in self.lower.values() if isinstance(one, Kernel))
        return tuple(dict.fromkeys(target for kernel in kernels for target in kernel.targets))

    def reason_against(self, p: Problem, asked: bool = True) -> str | None:
        """Return in words why this backend does not run the problem `p`; None if it does.

        Args:
          p: the problem.
          asked: whether the backend is asked for by its name; True by default.
        """
        if p.op not in self.lower:  # the most frequent reason, which needs no other text
            return f"does not implement {p.op}"
        missing = dict(p.unavailable).get(self.extension)
        without_facts = why_missing() if self.extension else None
        if without_facts is not None:
            return missing or without_facts
        bounds, extent = self._bounds, max(p.hidden, p.intermediate)
        reached = [device for device in self.devices if device.reaches(p)]
        wrong_size = _find_wrong(p.sizes, bounds.limits, "needs")
        unasked = {} if asked else self.unasked
        unwanted = _find_wrong(p.sizes, unasked, "must be named in `backend` except for")
        checks = (
            (self.platform in (None, p.target.platform), f"needs {self.platform}, got {p.target}"),
            (bool(reached), f"needs {self._ranges()}, got {p.target}"),
            (
                bounds.shared_bytes <= p.target.shared_bytes,
                f"needs {bounds.shared_bytes} bytes of shared memory per thread block, and "
                f"{p.target} has {p.target.shared_bytes}",
            ),
            (
                any(device.implements(p) for device in reached),
                f"does not implement {p.scheme} on {p.target}",
            ),
            (
                self.dtypes is None or p.dtype in self.dtypes,
                f"needs {' or '.join(sorted(self.dtypes or ()))}, got {p.dtype}",
            ),
            (self._takes_weights(p), self._needed_weights(p)),
            (
                p.num_experts <= bounds.experts,
                f"needs at most {bounds.experts} experts, got {p.num_experts}",
            ),
            (p.top_k <= bounds.top_k, f"needs top_k of at most {bounds.top_k}, got {p.top_k}"),
            (
                extent <= bounds.extent,
                f"needs matrices of at most {bounds.extent} rows and columns, got {extent}",
            ),
            (wrong_size is None, wrong_size),
            (missing is None, missing),
            (unwanted is None, unwanted),
        )
        return next((why for ok, why in checks if not ok), None)

    @functools.cached_property
    def _bounds(self) -> "_Bounds":
        """Its bounds as numbers and ranges, with launch facts in place of their names."""
        return _Bounds(
            {name: _read(limit) for name, limit in self.limits.items()},
            *map(_read, (self.max_experts, self.max_top_k, self.max_extent, self.shared_bytes)),
        )

    def _takes_weights(self, p):
        """Return whether it takes the dtype of the weights, if the problem names one."""
        known = p.weight_dtype is None or not self.weight_dtypes
        return known or p.weight_dtype in self.weight_dtypes.get(p.dtype, ())

    def _needed_weights(self, p):
        """Return in words which weights it takes."""
        wanted = " or ".join(self.weight_dtypes.get(p.dtype, ()))
        return f"needs weights in {wanted} with {p.dtype}, got {p.weight_dtype}"

    def _ranges(self):
        """Return the ranges of compute capability in words."""
        return "compute capability in " + " or ".join(map(str, self.devices))


class _Bounds(NamedTuple):
    """The bounds of a `Backend`, whose fields have similar names."""

    limits: Mapping[str, range]
    experts: int
    top_k: int
    extent: int
    shared_bytes: int


def _read(bound: Any) -> Any:
    """Return a number or a range, or the launch fact of that name."""
    return getattr(facts(), bound) if isinstance(bound, str) else bound


def _find_wrong(sizes, ranges, verb):
    """Return in words which of `sizes` is not in the range of its name; None if all are."""
    for name, size in sizes:
        own = ranges.get(name)
        # A size that a symbol of `jax.export` stands for is in no range.
        if own is not None and not (isinstance(size, int) and size in own):
            bounds = f"of at least {own[0]}" if own.stop == OPEN else f"from {own[0]} to {own[-1]}"
            multiple = f" in multiples of {own.step}" if own.step > 1 else ""
            return f"{verb} {name} {bounds}{multiple}; got {size}"
    return None
