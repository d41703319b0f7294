"""Bring experts that a file stores under other public names, or in other forms, to known ones.

Only headers change: a tensor gets another name or shape, or its parts become tensors of their own.
`KNOWN` lists all of them. Experts under names that are not known are one sentence for all
layers, in place of one for each tensor that is missing.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from jax_nvfp4_moe.checkpoint.errors import quoted
from jax_nvfp4_moe.checkpoint.names import PROJECTION_OF, PROJECTIONS, SPELLINGS
from jax_nvfp4_moe.checkpoint.safetensors import TensorInfo, Tensors
from jax_nvfp4_moe.checkpoint.weights.finder import FLOATS, Finder
from jax_nvfp4_moe.checkpoint.weights.requests import ExpertSizes

_GATE, _UP, _DOWN = PROJECTIONS
# A name of one tensor for gate and up of an expert, which stands in front of the other names.
_BOTH = "gate_up_proj"
_APART = SPELLINGS[:2]  # of projections that are stacked apart
_STEMS = ("w13", _BOTH, *_APART[0], *_APART[1])
# Published files of Step-3.7 have one tensor for each projection of all experts. The text is sought
# first, which is faster, and few files have it.
_MOE = ".moe."
_OUTSIDE = re.compile(r"(.+\.moe)\.((?:gate|up|down)_proj)\.(\w+)")
_STACKED = re.compile(rf"({'|'.join(_STEMS)})(?:([._])(.+))?")
_EACH = re.compile(rf"(\d+)\.{_BOTH}\.(.+)")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_LISTED = 6  # the most names in a message
# The sentence's list of what is read. `E` stands for the number of an expert.
KNOWN = (
    *(", ".join(f"E.{name}" for name in names) for names in SPELLINGS),
    f"E.{_BOTH}, E.{_DOWN}",
    f"{_BOTH}, {_DOWN}",
    "w13_weight, w2_weight",
    "w1, w3, w2",
)
Change = tuple[str, TensorInfo]


def divide_stacks(tensors: Tensors) -> None:
    """Divide tensors that stack one projection of all experts outside of the experts' module."""
    changes: dict[str, Sequence[Change]] = {}
    for name in tensors.names():
        match = _OUTSIDE.fullmatch(name) if _MOE in name else None
        if match is None:
            continue
        block, projection, leaf = match.groups()
        weight, info = f"{block}.{projection}.weight", tensors.info(name)
        shape = tensors.info(weight).shape if weight in tensors else ()
        if len(shape) == 3 and shape[0] and info.shape[:1] == shape[:1]:
            stem = f"{block}.experts"
            new = (f"{stem}.{expert}.{projection}.{leaf}" for expert in range(shape[0]))
            parts = zip(new, _divide(info, shape[0]), strict=True)
            changes[name] = [(one, part._replace(name=one)) for one, part in parts]
    tensors.reform(changes)


def settle_experts(finder: Finder, prefix: str, sizes: ExpertSizes) -> None:
    """Rename and divide the tensors of the experts `prefix`, if they have one of these forms.

    * ``w13_weight`` and ``w2_weight``, the names of vLLM: the rows of gate, then those of up.
    * ``gate_up_proj_packed`` with ``_scale``, ``_global_scale`` and ``_input_global_scale``.
    * One stack for each projection: ``w1``, ``w3`` and ``w2``, or ``gate_proj`` and so on.
    * Stacks of two axes, ``[experts * rows, columns]``.
    * ``E.gate_up_proj`` for gate and up of one expert: the rows of gate, then those of up.

    Names that are known already stay as they are. So do forms whose meaning is not certain, as the
    order of gate and up where an architecture alternates their rows.
    """
    before = len(f"{prefix}.")
    names = {
        rest: name
        for name in finder.tensors.under(f"{prefix}.")
        if not (rest := name[before:])[:1].isdecimal() or _BOTH in rest
    }
    stems = {stem for stem, form in _STACKED_AS.items() if any(map(form.fullmatch, names))}
    changes: dict[str, Sequence[Change]] = {}
    for rest, name in names.items():
        made = list(_change(finder, sizes, names, stems, rest))
        if made:
            info = finder.tensors.info(name)
            head = info.name.removesuffix(rest) if info.name.endswith(rest) else f"{prefix}."
            changes[name] = [
                (f"{prefix}.{new}", part._replace(name=head + new)) for new, part in made
            ]
    finder.tensors.reform(changes)


def _change(finder, sizes, names, stems, rest) -> Iterator[Change]:
    """Yield the tensors that one tensor becomes, with names below the experts' module.

    Args:
      finder: knows the tensors of the file.
      sizes: those of the experts.
      names: the name of each tensor below the experts' module -> its name in the file.
      stems: the names of projections that the file stacks.
      rest: one of `names`.
    """
    info = finder.tensors.info(names[rest])
    each, stacked = _EACH.fullmatch(rest), _STACKED.fullmatch(rest)
    if each is not None and sizes.gated and not sizes.interleaved:
        expert, leaf = each.groups()
        halves = zip((_GATE, _UP), _divide(info, 2, rows=True), strict=True)
        yield from ((f"{expert}.{stem}.{leaf}", part) for stem, part in halves)
    elif stacked is not None:
        stem, join, leaf = stacked.groups()
        parts = (stem, join or "", leaf or "")
        yield from _change_stack(finder, sizes, names, stems, info, parts)


def _change_stack(finder, sizes, names, stems, info, parts) -> Iterator[Change]:
    """Yield what one stack of all experts becomes, or nothing if it is known as it is."""
    stem, join, leaf = parts
    if sizes.interleaved and stem in ("w13", "w2"):
        return  # whether the rows of gate and up alternate in the file cannot be known
    found = info
    if len(info.shape) == 2 and info.shape[0] > sizes.num_experts:
        found = _with_axis(info, sizes.num_experts)
    apart = any(stem in names and _stacks_apart(stems, names, sizes) for names in _APART)
    if stem == "w13" or (stem == "w2" and "w13" in stems):
        rows = (_DOWN,) if stem == "w2" else sizes.projections[:-1]
    elif apart:
        rows = (PROJECTION_OF[stem],)
    else:
        leaves = _packed_leaves(finder, names, stem)
        new = f"{stem}.{leaves[leaf]}" if leaf in leaves else stem + join + leaf
        if (new, found) != (stem + join + leaf, info):
            yield new, found
        return
    leaf = _packed_leaves(finder, names, stem).get(leaf, leaf)
    leaf = leaf or ("weight" if info.dtype in FLOATS else finder.names.packed)
    for expert, whole in enumerate(_divide(found, sizes.num_experts)):
        for name, part in zip(rows, _divide(whole, len(rows), rows=True), strict=True):
            yield f"{expert}.{name}.{leaf}", part


def _packed_leaves(finder, names, stem) -> Mapping[str, str]:
    """Return the names that a tool gives to the tensors of one stack -> those of its linears.

    compressed-tensors puts an ending after the name of a parameter. It is "weight" in a linear, and
    the name of the projection in a stack. In another format, it is not certain whether a scale of
    such a name divides.
    """
    if f"{stem}_packed" not in names or not finder.names.divides:
        return {}
    found = {
        "packed": finder.names.packed,
        "scale": finder.names.block_scale,
        "global_scale": finder.names.weight_global,
        "input_global_scale": finder.names.input_global,
    }
    return {old: new for old, new in found.items() if f"{stem}_{old}" in names}


def _stacks_apart(stems, names, sizes) -> bool:
    """Return whether the file stacks gate and up of all experts apart, under these names."""
    if not sizes.gated and names is PROJECTIONS:
        return False  # up_proj and down_proj are read as they are
    return stems.issuperset(names if sizes.gated else names[1:])


_STACKED_AS = {stem: re.compile(rf"{stem}(?:[._].+)?") for stem in _STEMS}


def _with_axis(info: TensorInfo, experts: int) -> TensorInfo:
    """Return a tensor ``[e * rows, columns]`` as ``[e, rows, columns]``, if its rows divide."""
    rows, columns = info.shape
    if rows % experts:
        return info
    return info._replace(shape=(experts, rows // experts, columns))


def _divide(info: TensorInfo, count: int, *, rows: bool = False) -> list[TensorInfo]:
    """Return the parts of a tensor along its first axis.

    A tensor with one element belongs to every part, and so does one that cannot be divided, whose
    shape is a problem later.

    Args:
      info: the tensor.
      count: the number of parts.
      rows: whether a part of a matrix keeps the axis, as a part of its rows.
    """
    if math.prod(info.shape) == 1 or not info.shape or info.shape[0] % count:
        return [info] * count
    first, rest = info.shape[0] // count, info.shape[1:]
    keeps = (rows and (first > 1 or bool(rest))) or first > 1
    nbytes = info.nbytes // count
    return [
        info._replace(
            shape=(first, *rest) if keeps else rest,
            start=info.start + part * nbytes,
            nbytes=nbytes,
        )
        for part in range(count)
    ]


def has_experts(finder: Finder, prefix: str, sizes: ExpertSizes) -> bool:
    """Return whether the file has a known stack, or known projections of at least one expert."""
    tensors = finder.tensors

    def used(stem):
        return next(tensors.under(stem), None) is not None

    def stacked(stem):
        packed = finder.names.packed
        ends = ("", f".{packed}", f"_{packed}", ".weight", "_blocks")
        return any(f"{prefix}.{stem}{end}" in tensors for end in ends)

    if stacked(_BOTH if sizes.gated else _UP) or stacked(_DOWN):
        return True  # of a stack that is missing, one line for each of its tensors says more
    return all(
        any(used(f"{prefix}.{expert}.{name}.") for expert in range(sizes.num_experts))
        for name in sizes.projections
    )


def unknown_experts(finder: Finder, prefixes: Sequence[str]) -> list[str]:
    """Return one sentence about layers whose experts have no known names, or nothing.

    Args:
      finder: knows which tensors were taken. It receives those that the sentence names as taken,
        so that they are not named again.
      prefixes: the modules of the experts of these layers.
    """
    if not prefixes:
        return []
    first, count = prefixes[0], len(prefixes) - 1
    others = f" and the experts of {count} more layers" if count else ""
    inside = [name for prefix in prefixes for name in _left_over(finder, f"{prefix}.")]
    beside = [name for prefix in prefixes for name in _left_over(finder, _block(prefix))]
    names = inside or beside
    finder.taken.update(names)
    patterns = list(dict.fromkeys(_pattern(finder.spell(name), prefixes) for name in names))
    listed = ", ".join(map(quoted, patterns[:_LISTED]))
    listed += f" and {len(patterns) - _LISTED} more" if len(patterns) > _LISTED else ""
    if inside:
        return [
            f"{quoted(first)}{others}: the names {listed} are not known; expected one of these: "
            f"{'; '.join(KNOWN)}"
        ]
    return [
        f"{quoted(first)}{others}: the file has no experts there; expected tensors such as "
        f"{first}.0.down_proj.weight or {first}.down_proj"
        + (f"; in their place it has {listed}" if listed else "")
    ]


def _block(prefix) -> str:
    """Return the scope of the module around the experts `prefix`, or a scope without tensors."""
    block = f"{prefix.rpartition('.')[0]}."
    return block if _NUMBER.search(block) else f"{prefix}."


def _pattern(name, prefixes) -> str:
    """Return a name without the module of its experts, or with a star for the layer."""
    inside = next((prefix for prefix in prefixes if name.startswith(f"{prefix}.")), None)
    if inside is None:
        return _NUMBER.sub("*", name)
    return _NUMBER.sub("E", name.removeprefix(inside)).removeprefix(".")


def _left_over(finder, scope) -> list[str]:
    """Return the names below `scope` that nobody has taken."""
    return [name for name in finder.tensors.under(scope) if name not in finder.taken]
