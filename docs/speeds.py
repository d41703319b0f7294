"""Compare this package with other engines, for the first table, the picture and figures in text.

Each comparison has both speeds from one run. It is the newest one that has both.
"""

import dataclasses
from collections.abc import Callable, Mapping

import cpu_tables
import layer_tables
import model_tables
import records
from records import TITLES, Row

_MARLIN = "Marlin"
_QWEN = "qwen3-30b-a3b"
# Expert layers by case and tokens, and steps by model, batch and prompt.
LAYERS = (_QWEN, 1), (_QWEN, 64), (_QWEN, 8192)
STEPS = (
    (_QWEN, 1, 128),
    (_QWEN, 64, 1024),
    ("llama-3.1-8b", 1, 128),
    ("llama-3.1-8b", 64, 128),
)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One quantity of this package and of another engine.

    Attributes:
      model: whose sizes the model has.
      what: what is done, in words.
      peer: the other engine.
      own: tokens a second of this package.
      other: tokens a second of the other engine.
      own_text: what the table says of this package, with a unit.
      other_text: the same of the other engine.
      run: the run that both are from.
    """

    model: str
    what: str
    peer: str
    own: float
    other: float
    own_text: str
    other_text: str
    run: Row

    @property
    def ratio(self) -> float:
        """Return how many times as fast this package is."""
        return self.own / self.other


def layer(case: str, tokens: int) -> Comparison:
    """Compare an expert layer with vLLM's Marlin layer on one H200."""
    rows = layer_tables.newest((layer_tables.OWN, layer_tables.MARLIN))[case, tokens]
    own, other = (rows[name]["us"] for name in (layer_tables.OWN, layer_tables.MARLIN))
    what = f"expert layer, {tokens} token{'s' if tokens > 1 else ''}"
    texts = records.duration(own), records.duration(other)
    speeds = tokens / own * 1e6, tokens / other * 1e6
    run = rows[layer_tables.OWN]["run"]
    return Comparison(TITLES[case], what, _MARLIN, *speeds, *texts, run)


def step(model: str, batch: int, prompt: int) -> Comparison:
    """Compare decoding of a whole model with llama.cpp on one H200."""
    row = model_tables.step(model, batch, prompt, "llama.cpp")
    what = f"decoding, batch {batch}"
    return _beside_llama(model, what, row["tokens_per_s"], row["times"]["llama.cpp"], row["run"])


def on_cpu(what: str, size: int) -> Comparison:
    """Compare eight layers of Qwen3-30B-A3B on two cores with AMX with llama.cpp."""
    result = records.read("cpu_model.amx")
    row = next(row for row in result["rows"] if (row["what"], row["size"]) == (what, size))
    words = {"prefill": f"prompt of {size} tokens", "decode": f"decoding, batch {size}"}
    title = f"{words[what]}, 8 of 48 layers, on a CPU"
    return _beside_llama(_QWEN, title, row["tokens_per_s"], row["times_llama"], result)


def _beside_llama(model: str, what: str, own: float, ratio: float, run: Row) -> Comparison:
    own_text, other_text = (f"{speed:,.0f} tokens/s" for speed in (own, own / ratio))
    speeds = own, own / ratio
    return Comparison(TITLES[model], what, "llama.cpp", *speeds, own_text, other_text, run)


def summary() -> list[Comparison]:
    """Return the comparisons of the first table."""
    return [
        *(layer(*cell) for cell in LAYERS),
        *(step(*cell) for cell in STEPS[:3]),
        on_cpu("decode", 1),
        on_cpu("prefill", 2048),
    ]


def table() -> str:
    """Return the first table: what is how many times as fast as which peer."""
    rows = summary()
    headings = "", "times as fast", "this package", "peer, same run"
    lines = (
        (
            row.what if row.model == TITLES[_QWEN] else f"{row.what}, {row.model}",
            *(f"{row.ratio:.1f} x", row.own_text, f"{row.other_text}, {row.peer}"),
        )
        for row in rows
    )
    on_gpu = [{"run": row.run} for row in rows if "device" in row.run]
    elsewhere = [{"run": row.run} for row in rows if "device" not in row.run]
    text = records.table(headings, lines) + records.sources(on_gpu)
    return text.rstrip("\n") + records.sources(elsewhere, device=f" {cpu_tables.INTEL}")[1:]


# The name of a table in a guide -> what writes it.
TABLES: Mapping[str, Callable[[], str]] = {"speed": table}
