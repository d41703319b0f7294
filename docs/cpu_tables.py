"""Tables of what was measured on CPUs, each on two cores."""

import functools
from collections.abc import Callable, Mapping

import records
from records import Row

_FORMS = {"amx": "AMX-BF16", "avx512": "AVX512-BF16", "avx2": "AVX2"}
INTEL, AMD = "Two cores of an Intel Xeon with AMX-BF16", "Two cores of an AMD EPYC (Zen 5)"
_TASKS = {"evaluate": "`evaluate`", "quantize": "`quantize_model`", "generate": "`generate`"}


def _rows(name: str) -> list[Row]:
    result = records.read(name)
    # The oldest result has its versions beside its commit.
    result.setdefault("versions", {"jax": result.get("jax")})
    return [{**row, "run": result} for row in result["rows"]]


def layer() -> str:
    """Return the table of an expert layer on a CPU, beside ggml."""
    rows = _rows("cpu_moe")
    found = {(row["isa"], row["tokens"]): row for row in rows}
    headings = "tokens", "AMX over ggml", *(f"{form}, us" for form in _FORMS.values()), "ggml, us"

    def line(tokens):
        best = found["amx", tokens]
        own = (f"{found[isa, tokens]['us']:.0f}" for isa in _FORMS)
        return (tokens, _times(best["ggml_us"], best["us"]), *own, f"{best['ggml_us']:.0f}")

    tokens = sorted({row["tokens"] for row in rows})
    return records.table(headings, map(line, tokens)) + records.sources(
        rows, device="Two threads of one core of an Intel Xeon with AMX-BF16"
    )


def _times(theirs: float, own: float) -> str:
    """Return how many times as long as ours another time is."""
    return records.times(theirs / own)


def model(name: str, device: str) -> str:
    """Return the table of a whole model on a CPU, beside llama.cpp."""
    rows = _rows(name)
    what = {"prefill": "prompt", "decode": "step"}
    headings = (
        *("", "tokens or batch", "over llama.cpp", "tokens/s", "ms", "llama.cpp, ms"),
        "over reading",
    )
    lines = (
        (
            *(what[row["what"]], row["size"], _times(row["llama_ms"], row["ms"])),
            *(f"{row['tokens_per_s']:,.0f}", f"{row['ms']:.1f}", f"{row['llama_ms']:.1f}"),
            f"{row['over_floor']:.2f} x" if "over_floor" in row else "",
        )
        for row in rows
    )
    return records.table(headings, lines) + records.sources(rows, device=device)


def attention(name: str, device: str) -> str:
    """Return the table of one layer of attention on a CPU, beside XLA's products."""
    rows = _rows(name)
    kernels = [kernel for kernel in rows[0]["ms"] if kernel != "attention_cpu"]
    headings = (
        *("batch", "queries", "keys", "over XLA", *(f"`{kernel}`, ms" for kernel in kernels)),
        *("XLA, ms", "GFLOP/s"),
    )

    def line(row):
        own, plain = row["ms"][kernels[0]], row["ms"]["attention_cpu"]
        shown = (f"{row['ms'][kernel]:.2f}" for kernel in kernels)
        return (*row["sizes"], _times(plain, own), *shown, f"{plain:.2f}", f"{row['gflops']:.0f}")

    text = records.table(headings, map(line, rows), repeat_first=True)
    return text + records.sources(rows, device=device)


def long_text() -> str:
    """Return the table of long texts on a CPU."""
    rows = _rows("long_text.cpu")
    headings = "task", "tokens", "peak, MB", "cache, MB", "seconds"
    lines = (
        (
            *(_TASKS[row["task"]], row["tokens"], f"{row['peak_bytes'] / 1e6:.0f}"),
            f"{row['cache_bytes'] / 1e6:.0f}" if "cache_bytes" in row else "-",
            f"{row['seconds']:.0f}",
        )
        for row in rows
    )
    return records.table(headings, lines) + records.sources(
        rows, device="Two cores of an AMD EPYC with AVX2 (Zen 3)"
    )


# The name of a table in a guide -> what writes it.
TABLES: Mapping[str, Callable[[], str]] = {
    "cpu_layer": layer,
    "cpu_model_amx": functools.partial(model, "cpu_model.amx", INTEL),
    "cpu_model_avx512": functools.partial(model, "cpu_model", f"{AMD} with AVX512-BF16"),
    "cpu_attention_amx": functools.partial(attention, "cpu_attention.amx", INTEL),
    "cpu_attention_avx512": functools.partial(
        attention, "cpu_attention", "Two cores of an AMD EPYC with AVX512-BF16"
    ),
    "long_text": long_text,
}
