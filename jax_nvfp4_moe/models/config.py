"""Read the sizes of a model from ``config.json``, and report all wrong values in one error."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jax_nvfp4_moe.checkpoint.errors import CheckpointError, quoted
from jax_nvfp4_moe.checkpoint.folder import CONFIG, read_size
from jax_nvfp4_moe.numerics.nvfp4 import BLOCK
from jax_nvfp4_moe.numerics.rope import Rope

ROPE_TYPES = ("default", "linear", "yarn", "llama3", "proportional")
# A multimodal embedding is the usual one where the tokens are text.
_ROPE_ALIASES = {"mrope": "default"}
# Types whose factor is in `max_position_embeddings` already.
_LENGTHENED_TYPES = ("llama3", "longrope")
_ORIGINAL = "original_max_position_embeddings"
_MOST_POSITIONS = 2**31  # of int32
_KINDS: dict[type, str] = {bool: "true or false", float: "a finite number"}


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The values that make sense for a number of the config.

    Attributes:
      least: the smallest value.
      most: the largest value.
      positive: whether 0 is refused too.
    """

    least: float = -float(np.finfo(np.float32).max)
    most: float = float(np.finfo(np.float32).max)
    positive: bool = False

    def hold(self, value: float) -> bool:
        """Return whether `value` is within the bounds, also after its rounding to float32."""
        return self.least <= value <= self.most and not (self.positive and np.float32(value) <= 0)

    def __str__(self) -> str:
        """Return words for a message, such as "a positive number of at most 1"."""
        kind = "positive" if self.positive else "nonnegative" if self.least == 0 else "finite"
        most = f" of at most {self.most:g}" if self.most < Bounds.most else ""
        return f"a {kind} number{most}"


_ANY = Bounds()
_EPSILON = Bounds(0, 1, positive=True)
_FACTOR = Bounds(0, 1e6, positive=True)
_POSITIVE = Bounds(0, positive=True)
_NONNEGATIVE = Bounds(0)
# Numbers outside of these bounds make a model's results zero, infinite or NaN.
BOUNDS: Mapping[str, Bounds] = {
    **dict.fromkeys(
        ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "hc_eps"), _EPSILON
    ),
    "partial_rotary_factor": Bounds(0, 1, positive=True),
    **dict.fromkeys(
        (
            "routed_scaling_factor",
            "moe_router_scaling_factor",
            "moe_routed_scaling_factor",
            "logit_scale",
            "attention_value_scale",
            "attention_multiplier",
            "embedding_multiplier",
            "residual_multiplier",
            "final_logit_softcapping",
            "query_pre_attn_scalar",
            "swiglu_alpha",
            "swiglu_limit",
            "attention_factor",
        ),
        _FACTOR,
    ),
    **dict.fromkeys(
        (
            "rope_theta",
            "compress_rope_theta",
            "beta_fast",
            "beta_slow",
            "low_freq_factor",
            "high_freq_factor",
            "clip_qkv",
            "floor_scale",
            "alpha",
        ),
        _POSITIVE,
    ),
    **dict.fromkeys(
        (
            "moe_router_logit_softcapping",
            "logits_scaling",  # its reader refuses 0
            "mscale",
            "mscale_all_dim",
            "llama_4_scaling_beta",
            "attn_scale",
            "time_step_min",
            "mamba_dt_min",
        ),
        _NONNEGATIVE,
    ),
}

# The largest values of sizes and counts, far above those of any model. Reading makes a list of all
# layers, and an array as long as a head. A size that the file does not hold has to stay cheap until
# the headers tell that it is wrong.
_MOST = 2**20
_MOST_LAYERS = 1000
_MOST_CHANNELS = 2**14  # of one head
MOST: Mapping[str, int] = {
    "num_hidden_layers": _MOST_LAYERS,
    "ngram_vocab_size_base": 2**26,  # the primes from there on are found in a moment
    "hc_sinkhorn_iters": 1000,  # each of which runs for every token of a layer
    **dict.fromkeys(
        ("head_dim", "global_head_dim", "attention_head_dim", "qk_rope_head_dim"), _MOST_CHANNELS
    ),
    **dict.fromkeys(  # lengths, for which reading makes nothing
        ("max_position_embeddings", _ORIGINAL, "sliding_window", "attention_chunk_size"),
        _MOST_POSITIONS - 1,
    ),
}


class Fields:
    """Checked look-ups in a parsed ``config.json``.

    A look-up that fails adds a problem and returns a value of the right type, so that reading can
    go on and find further problems. `finish` raises them all.

    Attributes:
      problems: a sentence for each value that is missing, wrong or not supported.
    """

    def __init__(self, config: Mapping[str, Any]):
        self._config = config
        self.problems: list[str] = []

    def size(self, *names: str, default: int | None = None) -> int:
        """Return the positive integer under the first of `names` that is present.

        It must not exceed `MOST`.
        """
        try:
            value = read_size(self._config, *names, default=default)
        except CheckpointError as error:
            self.problems += error.problems
            return BLOCK
        name = next((one for one in names if self.present(one)), names[0])
        return value if self._within(name, value) else BLOCK

    def number(self, name: str, default: float | None = None) -> float:
        """Return the finite number `name`, which must be within its `BOUNDS` if it has any."""
        value, bounds = self._typed(name, default, float, 1.0), BOUNDS.get(name, _ANY)
        if bounds.hold(value):
            return float(value)
        self.problems.append(f"{CONFIG}: {name}: expected {bounds}, got {quoted(value)}")
        return 1.0

    def flag(self, name: str, default: bool) -> bool:
        """Return the boolean `name`."""
        return self._typed(name, default, bool, default)

    def indices(self, name: str) -> tuple[int, ...]:
        """Return the list of integers `name`, or an empty one if it is missing."""
        value = self._config.get(name) or []
        if isinstance(value, list) and all(type(item) is int for item in value):
            return tuple(value)
        self.problems.append(f"{CONFIG}: {name}: expected a list of integers, got {quoted(value)}")
        return ()

    def layer_types(
        self,
        allowed: Iterable[str],
        default: Sequence[str],
        name: str = "layer_types",
        listed: Any = None,
    ) -> tuple[str, ...]:
        """Return the list `name`, which has one of `allowed` for each layer.

        Args:
          allowed: the values that an element may have.
          default: the result if the list is missing, or if it is not valid, which is a problem.
          name: the name of the list.
          listed: the list, where it stands under another name too. None takes it from `name`.
        """
        value = self._config.get(name) if listed is None else listed
        if value is None:
            return tuple(default)
        allowed, layers = tuple(allowed), self.size("num_hidden_layers")
        known = isinstance(value, list) and all(item in allowed for item in value)
        if known and len(value) == layers:
            return tuple(value)
        found = f"a list of {len(value)}" if known else quoted(value)
        self.problems.append(
            f"{CONFIG}: {name}: expected a list of {layers} values from {', '.join(allowed)}; "
            f"got {found}"
        )
        return tuple(default)

    def heads(self, key_heads: int | None = None) -> tuple[int, int]:
        """Return the numbers of query heads and of key heads, which must divide the first.

        Args:
          key_heads: the default of ``num_key_value_heads``. None takes one for each query head.
        """
        heads = self.size("num_attention_heads")
        key_heads = self.size("num_key_value_heads", default=key_heads or heads)
        self.multiple("num_attention_heads", heads, key_heads, "key heads")
        return heads, key_heads

    def multiple(self, name: str, value: int, unit: int, what: str) -> None:
        """Add a problem if the value of `name` is not a multiple of `unit`, which counts `what`."""
        self.relate(value % unit == 0, f"{name}: expected a multiple of {unit} {what}, got {value}")

    def count(self, name: str, default: int = 0) -> int:
        """Return the integer `name`, which must not be negative nor exceed `MOST`."""
        value = self._config.get(name)
        value = default if value is None else value
        if type(value) is int and value >= 0:
            return value if self._within(name, value) else default
        self.problems.append(
            f"{CONFIG}: {name}: expected an integer of 0 or more, got {quoted(value)}"
        )
        return default

    def only(self, name: str, allowed: Sequence[Any], default: Any) -> Any:
        """Return the value of `name`, which must be one of `allowed`."""
        value = self._config.get(name)
        value = default if value is None else value
        if value in allowed:
            return value
        names = ", ".join(map(quoted, allowed))
        self.problems.append(
            f"{CONFIG}: {name}: {quoted(value)} is not supported; supported: {names}"
        )
        return default

    def positions(self, default: int | None = None, counted: Sequence[str] = ()) -> int:
        """Return the number of positions that the model supports; see `read_positions`."""
        return read_positions(self, self._config, default, counted)

    def present(self, name: str) -> bool:
        """Return whether `name` is present and not null."""
        return self._config.get(name) is not None

    def given(self, name: str) -> bool:
        """Return whether `name` is present, if only as null."""
        return name in self._config

    def require(self, holds: bool, problem: str) -> None:
        """Add a problem if `holds` is false."""
        if not holds:
            self.problems.append(f"{CONFIG}: {problem}")

    def relate(self, holds: bool, problem: str) -> None:
        """Add a problem if `holds`, a relation between values, is false.

        Values are only compared if all of them are valid. Otherwise the problem is in the value
        itself, which has been added already.
        """
        self.require(holds or bool(self.problems), problem)

    def finish(self) -> None:
        """Raise all problems as one `CheckpointError`, if there are any."""
        if self.problems:
            raise CheckpointError(list(dict.fromkeys(self.problems)))

    def _within(self, name, value) -> bool:
        """Return whether a size is at most `MOST`, and add a problem if it is not."""
        most = MOST.get(name, _MOST)
        self.require(
            value <= most, f"{name}: expected an integer up to {most}, got {quoted(value)}"
        )
        return value <= most

    def _typed(self, name, default, kind, fallback):
        """Return the value of `name` if it is a finite number or a boolean, as `kind` says."""
        value = self._config.get(name)
        value = default if value is None else value
        wanted = (int, float) if kind is float else (bool,)
        if type(value) in wanted and is_finite(value):
            return value
        found = "nothing" if value is None else quoted(value)
        self.problems.append(f"{CONFIG}: {name}: expected {_KINDS[kind]}, got {found}")
        return fallback


def is_index(text: str) -> bool:
    """Return whether `text` is the index of a layer. Python refuses to read 5000 digits."""
    return text.isdecimal() and len(text) < 10


def is_finite(value: float) -> bool:
    """Return whether a number is finite as a float. An integer of JSON may be too large for one."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def find_rope_fields(config: Mapping[str, Any]) -> Any:
    """Return the value of ``rope_scaling`` or ``rope_parameters``, or an empty object.

    ``original_max_position_embeddings`` beside it takes precedence over the same name inside, as in
    transformers and vLLM.
    """
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    original = config.get(_ORIGINAL)
    if isinstance(given, dict) and given and original is not None:
        return {**given, _ORIGINAL: original}
    return given


def read_rope_kind(given: Mapping[str, Any]) -> Any:
    """Return the type of a rotary embedding, under the name that this package knows."""
    kind = given.get("rope_type", given.get("type", "default"))
    return _ROPE_ALIASES.get(kind, kind) if isinstance(kind, str) else kind


def read_positions(
    fields: Fields,
    config: Mapping[str, Any],
    default: int | None = None,
    counted: Sequence[str] = (),
) -> int:
    """Return the number of positions that the model supports.

    YaRN lengthens its original context by ``factor``, whatever ``max_position_embeddings`` says.
    A linear factor lengthens ``max_position_embeddings``. The factors of "llama3" and "longrope"
    are in that number already.

    Args:
      fields: the fields of ``config.json``, which receive the problems.
      config: the parsed ``config.json``.
      default: the default of ``max_position_embeddings``.
      counted: further types of rotation whose factor is in ``max_position_embeddings`` already.

    Source: `_get_and_verify_max_len` of vLLM.
    """
    own = fields.size("max_position_embeddings", default=default)
    given = find_rope_fields(config)
    given = given if isinstance(given, dict) else {}
    sections = [one for one in given.values() if isinstance(one, dict)] or [given]
    positions, factor = own, 1.0
    for section in sections:
        kind, rope = read_rope_kind(section), Fields(section)
        if kind in (*_LENGTHENED_TYPES, *counted):
            continue
        if kind == "yarn":
            original = rope.size(_ORIGINAL, default=own)
            # Without a factor, the rotation has the one that gives `max_position_embeddings`.
            positions, factor = original, rope.number("factor", max(own / original, 1.0))
        else:
            factor = rope.number("factor", factor)
        if rope.problems:  # of which reading the rotation tells
            return own
    if positions * factor < _MOST_POSITIONS:
        return max(int(positions * factor), 1)
    fields.require(False, f"rope factor: {positions} positions times {factor:g} are too many")
    return own


def read_rope(
    fields: Fields,
    config: Mapping[str, Any],
    width: int,
    positions: int,
    *,
    theta: float = 10000.0,
    share: float = 1.0,
    types: Sequence[str] = ROPE_TYPES,
) -> Rope:
    """Read the rotary embedding.

    Newer files have ``rope_parameters``. Older ones have ``rope_theta`` and ``rope_scaling``.

    A "proportional" embedding has the frequencies of whole heads, of which the first ones are used.
    Channels that it does not rotate have the frequency 0.

    Args:
      fields: receives the problems.
      config: the parsed ``config.json``.
      width: the channels of a head. The factor ``partial_rotary_factor`` of them is rotated.
      positions: the value of ``max_position_embeddings``.
      theta: the default of ``rope_theta``.
      share: the default of ``partial_rotary_factor``.
      types: the types that the architecture has.

    Source: YaRN, arXiv:2309.00071; `modeling_rope_utils` of transformers for the details.
    """
    given = _one_section(fields, find_rope_fields(config))
    kind = read_rope_kind(given)
    if kind not in types:
        fields.require(
            False, f"rope_type: {quoted(kind)} is not supported; supported: {', '.join(types)}"
        )
        kind = "default"
    older = ("rope_theta", "partial_rotary_factor")
    rope = Fields({name: config.get(name) for name in older} | given)
    theta = rope.number("rope_theta", theta)
    rope.require(theta > 0, f"rope_theta: expected a positive number, got {theta}")
    share = rope.number("partial_rotary_factor", share)
    head, width = width, int(width * share)
    rope.relate(
        0 < share <= 1 and width > 0 and width % 2 == 0,
        f"partial_rotary_factor: expected an even number of channels to rotate, got {share}",
    )
    rope.require(
        head <= _MOST_CHANNELS,
        f"head_dim: expected at most {_MOST_CHANNELS} channels of a head, got {head}",
    )
    fields.problems += rope.problems
    if rope.problems:
        return Rope((1.0,) * (min(width, _MOST_CHANNELS) // 2))
    whole = head if kind == "proportional" else width
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(whole)
    frequencies = np.float32(1) / np.float32(theta) ** exponents
    if kind == "default":
        return Rope(tuple(frequencies.tolist()))
    if kind == "proportional":
        frequencies = np.pad(frequencies, (0, (head - width) // 2))
        return _linear(fields, Fields({"factor": 1.0} | given), frequencies)
    if kind == "linear":
        return _linear(fields, Fields(given), frequencies)
    if kind == "llama3":
        return _llama3(fields, Fields(given), frequencies, positions)
    return _yarn(fields, Fields(given), frequencies, theta, positions)


def _one_section(fields, given) -> dict[str, Any]:
    """Return the fields of the one rotary embedding that all layers of a model have.

    transformers may write an object for each type of layers. They must agree.
    """
    if not isinstance(given, dict):
        fields.require(False, f"rope_parameters: expected an object, got {quoted(given)}")
        return {}
    sections = {name: one for name, one in given.items() if isinstance(one, dict)}
    if not sections:
        return given
    first = next(iter(sections.values()))
    fields.require(
        all(one == first for one in sections.values()),
        f"rope_parameters: expected one rotary embedding, because all layers of this architecture "
        f"have the same; got different ones for {', '.join(map(quoted, sections))}",
    )
    return first


def _linear(fields, given, frequencies):
    """Return frequencies that are all divided by ``factor``."""
    factor = given.number("factor")
    given.relate(factor >= 1, f"rope factor: expected at least 1, got {factor}")
    fields.problems += given.problems
    return Rope(tuple((frequencies / np.float32(max(factor, 1.0))).tolist()))


def _llama3(fields, given, frequencies, positions):
    """Return frequencies whose low ones are divided by ``factor``.

    Frequencies that turn less than ``low_freq_factor`` times within the original context are
    divided. Those that turn more than ``high_freq_factor`` times are kept, and those between are
    blended.
    """
    factor = given.number("factor")
    original = given.size(_ORIGINAL, default=positions)
    low, high = given.number("low_freq_factor"), given.number("high_freq_factor")
    given.relate(factor >= 1, f"rope factor: expected at least 1, got {factor}")
    given.relate(
        0 < low <= high, f"low_freq_factor: expected a positive number up to {high}, got {low}"
    )
    fields.problems += given.problems
    if given.problems:
        return Rope(tuple(frequencies.tolist()))
    turns = original * frequencies / np.float32(2 * math.pi)  # within the original context
    # Llama 4 Scout has low = high, so that no frequency is blended. The blend would divide by 0.
    kept = np.clip((turns - low) / (high - low), 0, 1) if low < high else turns >= low
    blended = frequencies * kept + frequencies / np.float32(factor) * (1 - kept)
    return Rope(tuple(blended.astype(np.float32).tolist()))


def _yarn(fields, given, frequencies, theta, positions):
    """Return frequencies as YaRN changes them for a longer context.

    High frequencies are kept, low ones are divided by ``factor``, and those between are blended.
    """
    original = given.size(_ORIGINAL, default=positions)
    stretch = positions / original if given.present(_ORIGINAL) else None
    factor = given.number("factor", stretch)
    turns = (given.number("beta_fast", 32.0), given.number("beta_slow", 1.0))
    mscale = given.number("mscale", 0.0)
    mscale_all = given.number("mscale_all_dim", 0.0)
    truncate = given.flag("truncate", True)
    given.require(factor >= 1, f"rope factor: expected at least 1, got {factor}")
    given.require(theta > 1, f"rope_theta: expected more than 1 with YaRN, got {theta}")
    default = _mscale(factor, 1.0)
    if mscale and mscale_all:
        default = _mscale(factor, mscale) / _mscale(factor, mscale_all)
    scale = given.number("attention_factor", default)
    fields.problems += given.problems
    if given.problems:
        return Rope(tuple(frequencies.tolist()))
    width = 2 * len(frequencies)

    def channel(turns):
        """Return the channel whose rotation turns this many times in the original context."""
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(turns[0]), channel(turns[1])
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high + 0.001 if low == high else high
    ramp = np.clip((np.arange(width // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    blended = frequencies / np.float32(factor) * ramp + frequencies * (1 - ramp)
    attention = _mscale(factor, mscale_all) ** 2 if mscale_all else 1.0
    return Rope(tuple(blended.astype(np.float32).tolist()), scale, attention)


def _mscale(factor, mscale):
    """Return YaRN's factor on attention scores for this stretch of the context."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
