"""Which matrices of an unquantized checkpoint are quantized, and what becomes of its tensors."""

import dataclasses
import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from jax_nvfp4_moe.checkpoint.byte_runs import index_shape
from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.expert_names import PER_EXPERT, ExpertSizes, Naming, Requests
from jax_nvfp4_moe.checkpoint.formats import fused_name, parents
from jax_nvfp4_moe.checkpoint.opening import Checkpoint
from jax_nvfp4_moe.checkpoint.safetensors import STORED_TYPES, Tensors
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK

Modules = Literal["all", "experts"]
MODULES = ("all", "experts")

# Linears that ModelOpt leaves alone: small, and of more weight than their size.
NEVER = (
    "lm_head",
    "*.lm_head",
    "*.shared_expert_gate",
    "*.linear_attn.in_proj_a*",
    "*.linear_attn.in_proj_b*",
    "*router*",
)


@dataclasses.dataclass(frozen=True)
class Slice:
    """A tensor of the source or a part of it, as numpy indexes it.

    Attributes:
      tensor: its name in the open checkpoint.
      part: index into it.
      swapped: whether the last two axes of the part are exchanged.
    """

    tensor: str
    part: tuple[int | slice, ...] = ()
    swapped: bool = False

    def read(self, tensors: Tensors) -> np.ndarray:
        """Return the part as an array; no other part of the tensor is kept."""
        found = tensors.read(self.tensor, self.part)
        return np.swapaxes(found, -1, -2) if self.swapped else found

    def shape(self, tensors: Tensors) -> tuple[int, ...]:
        """Return the shape of what `read` gives, from the header."""
        shape = index_shape(tensors.info(self.tensor).array_shape, self.part)
        return (*shape[:-2], shape[-1], shape[-2]) if self.swapped else shape

    def dtype(self, tensors: Tensors) -> np.dtype:
        """Return the dtype of what `read` gives, from the header."""
        return STORED_TYPES[tensors.info(self.tensor).dtype].numpy


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One matrix ``[n, k]`` to quantize.

    Attributes:
      module: its name in the files that are written.
      source: where it lies.
      shape: n and k.
      group: matrices with the same one share a global scale: runtimes multiply them at once.
      owner: the linear, or the experts' module, by the name that models use.
      expert: its index, and None for a linear.
      product: of an expert, 0 for gate and up, 1 for down.
    """

    module: str
    source: Slice
    shape: tuple[int, int]
    group: str
    owner: str
    expert: int | None = None
    product: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is written.

    Attributes:
      matrices: to be quantized.
      kept: name in the files that are written -> what of the source it is, as it is.
      dense: modules with matrices that are not quantized, as files name them.
      excluded: the same with whole containers as one ``NAME*``.
    """

    matrices: tuple[Matrix, ...]
    kept: Mapping[str, Slice]
    dense: tuple[str, ...]
    excluded: tuple[str, ...]


def plan_matrices(
    checkpoint: Checkpoint,
    requests: Requests,
    modules: Modules = "all",
    exclude: Sequence[str] = (),
) -> Plan:
    """Plan what becomes of each tensor of an unquantized checkpoint.

    Args:
      checkpoint: open; its headers have been checked against `requests`.
      requests: what its model asks for.
      modules: "all" linears and experts, or "experts" alone.
      exclude: names of modules, whole or with wildcards, that are not quantized; what is inside
        them is not either.

    Raises:
      ValueError: an entry of `exclude` matches nothing, or some experts of a layer and not all.
      CheckpointError: a matrix is not made of whole blocks of 16.
    """
    problems: list[str] = []
    candidates: list[Matrix] = []
    split: dict[str, Slice] = {}
    for prefix, shape in requests.linears.items():
        candidates.append(_linear(checkpoint, prefix, shape, _group(prefix, requests)))
    for prefix, sizes in requests.experts.items():
        found = list(_experts(checkpoint, prefix, sizes))
        candidates += found
        split |= _biases(checkpoint, prefix, sizes)
    chosen = _choose(candidates, modules, exclude)
    if not chosen:
        raise ValueError("exclude: nothing is left to quantize; leave some names out")
    for matrix in chosen:
        if matrix.shape[1] % BLOCK:
            problems.append(
                f"{quoted(matrix.module)}: {matrix.shape[1]} inputs are no multiple of {BLOCK}; "
                "exclude it"
            )
    if problems:
        raise CheckpointError(problems, str(checkpoint.folder))
    owners = {matrix.owner for matrix in chosen}
    consumed = {matrix.source.tensor for matrix in chosen}
    moved = {name: part for name, part in split.items() if _owner(part, owners)}
    consumed |= {part.tensor for part in moved.values()}
    kept = {
        checkpoint.tensors.info(name).name: Slice(name)
        for name in checkpoint.tensors.names()
        if name not in consumed
    }
    quantized = [matrix.module for matrix in chosen]
    dense = _dense_modules(checkpoint, consumed)
    return Plan(tuple(chosen), kept | moved, tuple(dense), tuple(_collapse(dense, quantized)))


def _owner(part: Slice, owners) -> bool:
    return any(part.tensor.startswith(f"{owner}.") for owner in owners)


def _linear(checkpoint, prefix, shape, group) -> Matrix:
    name = f"{prefix}.weight"
    module = checkpoint.tensors.info(name).name.removesuffix(".weight")
    return Matrix(module, Slice(name), shape, group, prefix)


def _group(prefix, requests) -> str:
    """Return what names the linears that read the same input as `prefix`."""
    parent, _, leaf = prefix.rpartition(".")
    direct = f"{parent}.q_proj"  # of latent attention without a latent for queries
    alone = leaf != "kv_a_proj_with_mqa" or direct not in requests.linears
    return fused_name(prefix if alone else direct)


def _experts(checkpoint, prefix, sizes) -> Iterator[Matrix]:
    """Yield the matrices of all experts, by expert; gate and up share a global scale."""
    naming = _naming(checkpoint, prefix)
    place = _each if naming is not None else _stacked
    first = (sizes.intermediate, sizes.hidden)
    shapes = {"gate": first, "up": first, "down": first[::-1]}
    for expert in range(sizes.num_experts):
        for part, shape in shapes.items():
            if part == "gate" and not sizes.gated:
                continue
            module, source = place(checkpoint, prefix, sizes, naming or PER_EXPERT[0], expert, part)
            product = int(part == "down")
            group = f"{prefix}.{expert}.{product}"
            yield Matrix(module, source, shape, group, prefix, expert, product)


def _naming(checkpoint, prefix) -> Naming | None:
    """Return how experts are named; None where one tensor holds them all."""
    for naming in PER_EXPERT:
        if f"{prefix}.0.{naming.down}.weight" in checkpoint.tensors:
            return naming
    return None


def _each(checkpoint, prefix, sizes, naming, expert, part):
    name = f"{prefix}.{expert}.{getattr(naming, part)}.weight"
    return checkpoint.tensors.info(name).name.removesuffix(".weight"), Slice(name)


def _stacked(checkpoint, prefix, sizes, naming, expert, part):
    """Return the module and the place of one expert's matrix in a tensor of all experts."""
    name = _stem(prefix, sizes, part)
    info = checkpoint.tensors.info(name)
    module = f"{info.name.rpartition('.')[0]}.{expert}.{getattr(naming, part)}"
    every, rows = slice(None), _rows(sizes, part)
    n = sizes.hidden if part == "down" else sizes.parts * sizes.intermediate
    swapped = sizes.inputs_first
    if swapped is None:
        swapped = info.shape[2] == n  # n and k differ: else the headers' check has refused it
    return module, Slice(name, (expert, every, rows) if swapped else (expert, rows), bool(swapped))


def _stem(prefix, sizes, part) -> str:
    if part == "down":
        return f"{prefix}.down_proj"
    return f"{prefix}.gate_up_proj" if sizes.gated else f"{prefix}.up_proj"


def _rows(sizes: ExpertSizes, part: str) -> slice:
    """Return the rows of one projection among those of its product."""
    i = sizes.intermediate
    if part == "down" or not sizes.gated:
        return slice(None)
    first = int(part == "up")
    return slice(first, None, 2) if sizes.interleaved else slice(first * i, (first + 1) * i)


def _biases(checkpoint, prefix, sizes) -> dict[str, Slice]:
    """Return what stacked biases become: one for each expert and projection."""
    if not sizes.bias or _naming(checkpoint, prefix) is not None:
        return {}
    found: dict[str, Slice] = {}
    for part in ("gate", "up", "down") if sizes.gated else ("up", "down"):
        stem = _stem(prefix, sizes, part)
        name = f"{stem}.bias" if f"{stem}.bias" in checkpoint.tensors else f"{stem}_bias"
        owner = checkpoint.tensors.info(name).name.removesuffix(name.removeprefix(prefix))
        for expert in range(sizes.num_experts):
            module = f"{owner}.{expert}.{getattr(PER_EXPERT[0], part)}"
            found[f"{module}.bias"] = Slice(name, (expert, _rows(sizes, part)))
    return found


def _choose(candidates: list[Matrix], modules: Modules, exclude: Sequence[str]) -> list[Matrix]:
    """Return the matrices to quantize."""
    unused = [p for p in exclude if not any(_matches(matrix, [p]) for matrix in candidates)]
    if unused:
        names = sorted({matrix.module for matrix in candidates})
        raise ValueError(
            f"exclude: no linear or experts are called {', '.join(map(repr, unused))}; wildcards "
            f"count, as in '*self_attn*'; names begin with {', '.join(map(repr, names[:3]))}"
        )
    chosen = []
    for matrix in candidates:
        wanted = modules == "all" or matrix.expert is not None
        if wanted and not _matches(matrix, NEVER) and not _matches(matrix, exclude):
            chosen.append(matrix)
    counts: dict[str, list[int]] = {}
    for matrices, index in ((candidates, 0), (chosen, 1)):
        for matrix in matrices:
            counts.setdefault(matrix.owner, [0, 0])[index] += 1
    partial = [owner for owner, (total, kept) in counts.items() if 0 < kept < total]
    if partial:
        raise ValueError(
            f"exclude: a layer's experts are quantized all or none; some of {partial} are excluded"
        )
    return chosen


def _matches(matrix: Matrix, patterns: Iterable[str]) -> bool:
    """Whether a pattern means the matrix or a module around it, by the file's name or its own."""
    names = [matrix.module, *parents(matrix.module), matrix.owner, *parents(matrix.owner)]
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in names)


def _dense_modules(checkpoint, consumed) -> list[str]:
    """Return the modules whose weights have two axes or more and stay as they are."""
    found = []
    for name in checkpoint.tensors.names():
        info = checkpoint.tensors.info(name)
        if name not in consumed and len(info.shape) > 1 and not info.name.endswith("bias"):
            found.append(info.name.removesuffix(".weight"))
    # A head that shares the embedding has no tensor, and is a linear for runtimes all the same.
    head = checkpoint.key_mapping.head.removesuffix(".")
    return sorted({head, *found})


def _collapse(dense: Sequence[str], quantized: Sequence[str]) -> list[str]:
    """Return `dense` with each container of which nothing is quantized as one ``NAME*``."""
    holders = {parent for module in quantized for parent in parents(module)}
    found: dict[str, str] = {}
    for module in dense:
        free = [parent for parent in parents(module) if parent not in holders]
        name = free[-1] if free else module
        if name not in found:
            # "layers.1*" would mean layer 10 as well, and "gate*" gate_proj.
            more = name[-1].isdigit() or any(other.startswith(name) for other in quantized)
            found[name] = name if not free else f"{name}.*" if more else f"{name}*"
    return list(found.values())
