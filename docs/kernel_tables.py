"""The table of `docs/guides/hardware.md` with the kernels that the package has.

It is read from the records of `jax_nvfp4_moe.ops.records`, from which the package chooses.
"""

import re
from collections.abc import Callable, Iterator, Mapping

from jax_nvfp4_moe.backends.launch_facts import facts
from jax_nvfp4_moe.backends.record import CUDA, Backend
from jax_nvfp4_moe.ops.records import RECORDS

_PLATFORMS = {"cuda": "GPU", "cpu": "CPU"}
# Parts of the CPU extension that need instructions which not all CPUs have.
_INSTRUCTIONS = {"attention_amx": "AMX-BF16", "attention_avx512": "AVX512-BF16"}
_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "int32": "i32"}
# Sizes with the limit of another size of the same op, which the table names.
_REPEATED = re.compile(r"first column|stride|width of part \d")
# No model has more rows or columns than this.
_LARGE = 1 << 18


def kernels() -> str:
    """Return the table of ops, kernels, dtypes and limits: GPUs first, in order of preference."""
    rows = [("op", "backend", "runs on", "dtypes", "limits"), ("---",) * 5]
    records = [record for record in RECORDS if record.ffi_targets]
    for platform in _PLATFORMS:
        rows += [_row(record) for record in records if record.platform == platform]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(record: Backend) -> tuple[str, ...]:
    return (
        ", ".join(f"`{op}`" for op in record.lower),
        f"`{record.name}`",
        _device(record),
        "any" if record.dtypes is None else ", ".join(_DTYPES[name] for name in record.dtypes),
        "; ".join(_limits(record)),
    )


def _device(record: Backend) -> str:
    """Return the devices of a record. "GPU" are those that most kernels take, 8.0 to 12.x."""
    if record.platform == "cpu":
        needed = _INSTRUCTIONS.get(record.part or "")
        return f"CPU with {needed}" if needed else "CPU"
    if record.devices == (CUDA,):
        return "GPU"
    ranges = []
    for device in record.devices:
        low, last = device.low[0], device.high[0] - 1
        ranges.append(f"{low}.x" if low == last else f"{low}.x to {last}.x")
    return "GPU " + ", ".join(ranges)


def _limits(record: Backend) -> Iterator[str]:
    """Yield what a record takes, in words."""
    if "moe_mlp" in record.lower or "route" in record.lower:
        experts, chosen = (_number(n) for n in (record.max_experts, record.max_top_k))
        yield f"up to {experts} experts, {chosen} for a token"
    extent = _number(record.max_extent)
    if extent <= _LARGE:
        yield f"up to {extent} rows and columns"
    yield from _sizes(record)
    for dtype, own in record.weight_dtypes.items():
        if own != (dtype,):
            yield f"weights of {_DTYPES[dtype]} rows: {', '.join(_DTYPES[name] for name in own)}"


def _sizes(record: Backend) -> Iterator[str]:
    """Yield the ranges of sizes that a record takes. Sizes with the same range share an entry."""
    names: dict[range, list[str]] = {}
    for name, limit in record.limits.items():
        if not _REPEATED.fullmatch(name):
            names.setdefault(_number(limit), []).append(name)
    for limit, sizes in names.items():
        if words := _words(limit):
            yield f"{', '.join(sizes)}: {words}"
    for name, limit in record.unasked.items():
        yield f"{name}: {_words(limit)}, unless asked for"


def _number(limit):
    """Return a number or a range, or the launch fact of that name."""
    return getattr(facts(), limit) if isinstance(limit, str) else limit


def _words(limit: range) -> str:
    """Return a range in words; empty if it takes every number."""
    step = f"multiples of {limit.step}" if limit.step > 1 else ""
    if limit[-1] >= _LARGE:
        return step or (f"from {limit[0]}" if limit[0] > 1 else "")
    bounds = f"{limit[0]} to {limit[-1]}" if limit[0] > limit.step else f"up to {limit[-1]}"
    return " in ".join(filter(None, (bounds, step)))


# The name of a table in a guide -> what writes it.
TABLES: Mapping[str, Callable[[], str]] = {"kernels": kernels}
