"""Select the matrices of a checkpoint to quantize, and decide what happens to its tensors."""

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.formats.rules import fused_name, parents
from jax_nvfp4_moe.checkpoint.opening import Checkpoint
from jax_nvfp4_moe.checkpoint.reading.byte_runs import index_shape
from jax_nvfp4_moe.checkpoint.safetensors import STORED_TYPES, Tensors
from jax_nvfp4_moe.checkpoint.weights.requests import ExpertSizes, Requests
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK

Modules = Literal["all", "experts"]
MODULES = ("all", "experts")

# Linears that are never quantized, as in ModelOpt: they are small, and their errors cost much
# quality.
NEVER = (
    "lm_head",
    "*.lm_head",
    "*.shared_expert_gate",
    "*.linear_attn.in_proj_a*",
    "*.linear_attn.in_proj_b*",
    "*router*",
)
# Linears that read the same input as q_proj, where there is one: of latent attention without a
# latent for queries, the gates, decays and rates of Kimi delta attention, the gates of AFMoE, and
# MiniMax-M3's indexer.
_BESIDE_QUERIES = (
    "kv_a_proj_with_mqa",
    "g_proj",
    "g_a_proj",
    "f_proj",
    "f_a_proj",
    "b_proj",
    "gate_proj",
    "index_q_proj",
    "index_k_proj",
)
# Linears of DeepSeek-V4's attention and of its modules -> the linear that reads the same input. The
# names are those of published files, then those of transformers.
_LATENTS_OF_V4 = {
    "wq_b": "q_b_proj",
    "wq_a": "q_a_proj",
    "wkv": "q_a_proj",
    "wgate": "q_a_proj",
    "q_b_proj": "q_b_proj",
    "kv_proj": "q_a_proj",
    "gate_proj": "q_a_proj",
}
# An attention, and the modules inside it that make compressed keys or choose keys.
_INSIDE = re.compile(r"(.*attn)(?:\.(?:compressor|indexer|scorer))+")
# Linears of these modules -> the linear of the attention around them that reads the same input.
_OF_INSIDE = {
    "wk": "q_a_proj",
    "weights_proj": "q_a_proj",
    "q_proj": "q_proj",
    "k_proj": "q_proj",
    "index_qk_proj": "q_proj",
    **_LATENTS_OF_V4,
}
# Linears of Qwen4-Exp -> the linear beside them that reads the same input.
_SAME_INPUT = {"block_inject_weight": "input_mix_weight_down", "value_proj": "key_proj"}


@dataclasses.dataclass(frozen=True)
class Slice:
    """A tensor of the source, or a part of one.

    Attributes:
      tensor: its name in the open checkpoint.
      part: the index of the part. An empty index takes the whole tensor.
      swapped: whether the last two axes of the part are exchanged.
    """

    tensor: str
    part: tuple[int | slice, ...] = ()
    swapped: bool = False

    def read(self, tensors: Tensors) -> np.ndarray:
        """Return the part as an array. Memory does not hold the rest of the tensor."""
        found = tensors.read(self.tensor, self.part)
        return np.swapaxes(found, -1, -2) if self.swapped else found

    def shape(self, tensors: Tensors) -> tuple[int, ...]:
        """Return the shape of the array that `read` returns, from the header."""
        shape = index_shape(tensors.info(self.tensor).array_shape, self.part)
        return (*shape[:-2], shape[-1], shape[-2]) if self.swapped else shape

    def dtype(self, tensors: Tensors) -> np.dtype:
        """Return the dtype of the array that `read` returns, from the header."""
        return STORED_TYPES[tensors.info(self.tensor).dtype].numpy


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One matrix ``[n, k]`` to quantize.

    Attributes:
      module: its module in the files that are written.
      source: where it is stored.
      shape: n and k.
      group: the name of its group. The matrices of a group share a global scale, because runtimes
        merge them into one matrix.
      owner: the linear, or the experts' module, by the name that models use.
      expert: the index of the expert. None for a linear.
      product: for an expert, 0 for gate and up, and 1 for down.
    """

    module: str
    source: Slice
    shape: tuple[int, int]
    group: str
    owner: str
    expert: int | None = None
    product: int = 0


@dataclasses.dataclass(frozen=True)
class Selection:
    """What to write.

    Attributes:
      matrices: the matrices to quantize.
      kept: a name in the files that are written -> the part of the source that is copied there.
      dense: the modules with matrices that are not quantized, by the names in the files.
      excluded: the modules of `dense`, with each container that holds nothing quantized as one
        entry ``NAME*``.
    """

    matrices: tuple[Matrix, ...]
    kept: Mapping[str, Slice]
    dense: tuple[str, ...]
    excluded: tuple[str, ...]


def select_matrices(
    checkpoint: Checkpoint,
    requests: Requests,
    modules: Modules = "all",
    exclude: Sequence[str] = (),
) -> Selection:
    """Decide what happens to each tensor of an unquantized checkpoint.

    Args:
      checkpoint: the open checkpoint. Its headers have been checked against `requests`.
      requests: the linears and experts that its model asks for.
      modules: "all" linears and experts, or "experts" alone.
      exclude: modules that are not quantized, by name or with wildcards. Everything inside them is
        excluded too.

    Raises:
      ValueError: an entry of `exclude` matches nothing, or it matches some experts of a layer but
        not all of them, or nothing is left to quantize.
      CheckpointError: the number of inputs of a matrix is not a multiple of 16.
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
        raise ValueError(
            f"exclude: nothing is left to quantize with modules={modules!r}; exclude fewer modules"
        )
    for matrix in chosen:
        if matrix.shape[1] % BLOCK:
            problems.append(
                f"{quoted(matrix.module)} has {matrix.shape[1]} inputs; expected a multiple of "
                f"{BLOCK}, the block size of NVFP4: pass its name in exclude"
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
    return Selection(tuple(chosen), kept | moved, tuple(dense), tuple(_collapse(dense, quantized)))


def _owner(part: Slice, owners) -> bool:
    """Return whether the part belongs to one of `owners`."""
    return any(part.tensor.startswith(f"{owner}.") for owner in owners)


def _linear(checkpoint, prefix, shape, group) -> Matrix:
    """Return the matrix of the linear `prefix`."""
    name = f"{prefix}.weight"
    module = checkpoint.tensors.info(name).name.removesuffix(".weight")
    return Matrix(module, Slice(name), shape, group, prefix)


def _group(prefix, requests) -> str:
    """Return the name of the group of linears that read the same input as `prefix`."""
    parent, _, leaf = prefix.rpartition(".")
    if leaf == "w3":  # the up projection of LFM2, whose gate projection is w1
        return f"{parent}.w1"
    direct = f"{parent.removesuffix('.forget_gate')}.q_proj"
    if leaf in _BESIDE_QUERIES and direct in requests.linears:
        return fused_name(direct)
    if found := _INSIDE.fullmatch(parent):
        return fused_name(f"{found[1]}.{_OF_INSIDE[leaf]}")
    if parent.endswith("attn") and leaf in _LATENTS_OF_V4:
        return fused_name(f"{parent}.{_LATENTS_OF_V4[leaf]}")
    if (other := f"{parent}.{_SAME_INPUT.get(leaf)}") in requests.linears:
        return fused_name(other)
    return fused_name(prefix)


def _experts(checkpoint, prefix, sizes) -> Iterator[Matrix]:
    """Yield the matrices of all experts of a layer. Gate and up of an expert share a group."""
    place = _stacked if _is_stacked(checkpoint, prefix) else _each
    first = (sizes.intermediate, sizes.hidden)
    shapes = {"gate": first, "up": first, "down": first[::-1]}
    for expert in range(sizes.num_experts):
        for part, shape in shapes.items():
            if part == "gate" and not sizes.gated:
                continue
            module, source = place(checkpoint, prefix, sizes, expert, part)
            product = int(part == "down")
            group = f"{prefix}.{expert}.{product}"
            yield Matrix(module, source, shape, group, prefix, expert, product)


def _is_stacked(checkpoint, prefix) -> bool:
    """Return whether one tensor holds a projection of all experts."""
    return f"{prefix}.0.down_proj.weight" not in checkpoint.tensors


def _each(checkpoint, prefix, sizes, expert, part):
    """Return the module and the place of one expert's matrix, stored in a tensor of its own."""
    name = f"{prefix}.{expert}.{part}_proj.weight"
    return checkpoint.tensors.info(name).name.removesuffix(".weight"), Slice(name)


def _stacked(checkpoint, prefix, sizes, expert, part):
    """Return the module and the place of one expert's matrix in a tensor of all experts."""
    name = _stem(prefix, sizes, part)
    info = checkpoint.tensors.info(name)
    module = f"{checkpoint.key_mapping.stored(prefix)}.{expert}.{part}_proj"
    every, rows = slice(None), _rows(sizes, part)
    n = sizes.hidden if part == "down" else sizes.parts * sizes.intermediate
    swapped = sizes.inputs_first
    if swapped is None:
        swapped = info.shape[2] == n  # n and k differ, or the check of the headers had raised
    return module, Slice(name, (expert, every, rows) if swapped else (expert, rows), bool(swapped))


def _stem(prefix, sizes, part) -> str:
    """Return the name of the tensor that holds one projection of all experts."""
    if part == "down":
        return f"{prefix}.down_proj"
    return f"{prefix}.gate_up_proj" if sizes.gated else f"{prefix}.up_proj"


def _rows(sizes: ExpertSizes, part: str) -> slice:
    """Return the rows of one projection among the rows of its product."""
    i = sizes.intermediate
    if part == "down" or not sizes.gated:
        return slice(None)
    first = int(part == "up")
    return slice(first, None, 2) if sizes.interleaved else slice(first * i, (first + 1) * i)


def _biases(checkpoint, prefix, sizes) -> dict[str, Slice]:
    """Return the biases of single experts, for a source that stacks the biases of all experts."""
    if not sizes.bias or not _is_stacked(checkpoint, prefix):
        return {}
    found: dict[str, Slice] = {}
    for part in ("gate", "up", "down") if sizes.gated else ("up", "down"):
        stem = _stem(prefix, sizes, part)
        name = f"{stem}.bias" if f"{stem}.bias" in checkpoint.tensors else f"{stem}_bias"
        owner = checkpoint.tensors.info(name).name.removesuffix(name.removeprefix(prefix))
        for expert in range(sizes.num_experts):
            module = f"{owner}.{expert}.{part}_proj"
            found[f"{module}.bias"] = Slice(name, (expert, _rows(sizes, part)))
    return found


def _choose(candidates: list[Matrix], modules: Modules, exclude: Sequence[str]) -> list[Matrix]:
    """Return the candidates to quantize, after checking that every entry of `exclude` is valid."""
    unused = [p for p in exclude if not any(_matches(matrix, [p]) for matrix in candidates)]
    if unused:
        names = sorted({matrix.module for matrix in candidates})
        raise ValueError(
            f"exclude: no linear or experts match {', '.join(map(repr, unused))}; expected names "
            f"such as {', '.join(map(repr, names[:3]))}, or wildcards such as '*self_attn*'"
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
            f"exclude: expected all experts of a layer or none; some experts of {partial} match, "
            "others do not"
        )
    return chosen


def _matches(matrix: Matrix, patterns: Iterable[str]) -> bool:
    """Return whether a pattern matches the matrix, or a module that contains it.

    Patterns may use the names of the file or the names that models use.
    """
    names = [matrix.module, *parents(matrix.module), matrix.owner, *parents(matrix.owner)]
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in names)


def find_excluded(
    checkpoint: Checkpoint, consumed: Iterable[str], quantized: Sequence[str]
) -> tuple[str, ...]:
    """Return the modules that a config must exclude from quantization.

    Args:
      checkpoint: open.
      consumed: tensors that are not written as they are.
      quantized: modules that are written in NVFP4.
    """
    return tuple(_collapse(_dense_modules(checkpoint, frozenset(consumed)), quantized))


def _dense_modules(checkpoint, consumed) -> list[str]:
    """Return the modules that are not quantized and whose weights have two axes or more."""
    found = []
    for name in checkpoint.tensors.names():
        info = checkpoint.tensors.info(name)
        if name not in consumed and len(info.shape) > 1 and not info.name.endswith("bias"):
            found.append(info.name.removesuffix(".weight"))
    # A head that shares the weights of the embedding has no tensor. Runtimes still treat it as a
    # linear, and would take it for quantized if it were not listed.
    mapping = checkpoint.key_mapping
    found = [mapping.head_module if f"{name}." == mapping.head else name for name in found]
    return sorted({mapping.head_module, *found})


def _collapse(dense: Sequence[str], quantized: Sequence[str]) -> list[str]:
    """Return `dense`, with each container that holds nothing quantized as one entry ``NAME*``."""
    holders = {parent for module in quantized for parent in parents(module)}
    found: dict[str, str] = {}
    for module in dense:
        free = [parent for parent in parents(module) if parent not in holders]
        name = free[-1] if free else module
        if name not in found:
            # "layers.1*" would match layer 10 too, and "gate*" would match gate_proj.
            more = name[-1].isdigit() or any(other.startswith(name) for other in quantized)
            found[name] = name if not free else f"{name}.*" if more else f"{name}*"
    return list(found.values())
