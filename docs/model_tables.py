"""Tables of whole models on GPUs: steps, prompts, drafts, several GPUs, beside other engines."""

from collections.abc import Callable, Mapping

import records
from records import FORMATS, TITLES, Row, times

_PEERS = "llama.cpp", "transformers"
_MESHES = {"1x1": "one GPU", "2x1": "two GPUs along `expert`", "1x2": "two GPUs along `tensor`"}


def steps(peer: str | None = None) -> list[Row]:
    """Return the newest row of each step of decoding.

    Args:
      peer: only rows of runs in which this engine ran, or with "", any other engine.
    """
    rows = records.read_rows(
        *(f"{name}.NVIDIA-H200" for name in ("decode", "decode_models", "decode_earlier"))
    )
    if peer is not None:
        rows = [row for row in rows if (peer in row["times"] if peer else row["times"])]
    return records.newest(rows, ("model", "format", "fp8_cache", "batch", "prompt"))


def step(model: str, batch: int, prompt: int, peer: str | None = None) -> Row:
    """Return the newest row of one step with NVFP4 weights; `peer` as for `steps`.

    Raises:
      LookupError: no run has this step.
    """
    wanted = (model, "nvfp4", False, batch, prompt)
    keys = "model", "format", "fp8_cache", "batch", "prompt"
    for row in steps(peer):
        if tuple(row.get(key, False) for key in keys) == wanted:
            return row
    raise LookupError(f"no run has a step of {wanted}")


def is_plain(row: Row) -> bool:
    """Return whether a row has NVFP4 weights, and a cache in 16 bits."""
    return row["format"] == "nvfp4" and not row.get("fp8_cache")


def decode_beside_peers() -> str:
    """Return the table of steps beside the engines that ran in the same run."""
    rows = steps(peer="")
    headings = (
        *("model", "batch", "prompt", "over llama.cpp", "over transformers"),
        *("tokens/s", "llama.cpp", "transformers"),
    )

    def line(row):
        found = [row["times"].get(peer) for peer in _PEERS]
        # A peer's step takes `found` times as long.
        speeds = [f"{row['tokens_per_s'] / ratio:,.0f}" if ratio else "" for ratio in found]
        ratios = [times(ratio) for ratio in found]
        cell = TITLES[row["model"]], row["batch"], row["prompt"]
        return (*cell, *ratios, f"{row['tokens_per_s']:,.0f}", *speeds)

    return records.table(headings, map(line, rows)) + records.sources(rows)


def decode() -> str:
    """Return the table of steps of decoding with NVFP4 weights."""
    rows = [row for row in steps() if is_plain(row)]
    headings = "model", "batch", "prompt", "over the floor", "tokens/s", "us a step", "commit"
    lines = (
        (
            *(TITLES[row["model"]], row["batch"], row["prompt"], times(row["over_floor"])),
            *(f"{row['tokens_per_s']:,.0f}", f"{row['step_us']:.0f}", row["run"]["commit"]),
        )
        for row in rows
    )
    return records.table(headings, lines) + records.sources(rows)


def decode_formats() -> str:
    """Return the table of steps with other formats beside the experts."""
    rows = [row for row in steps() if not is_plain(row)]
    headings = "format", "batch", "prompt", "of the speed in NVFP4", "tokens/s", "us a step"

    def line(row):
        plain = step(row["model"], row["batch"], row["prompt"])
        name = FORMATS[row["format"]] + (", cache in FP8" if row.get("fp8_cache") else "")
        share = row["tokens_per_s"] / plain["tokens_per_s"]
        figures = f"{share:.2f} x", f"{row['tokens_per_s']:,.0f}", f"{row['step_us']:.0f}"
        return (name, row["batch"], row["prompt"], *figures)

    return records.table(headings, map(line, rows)) + records.sources(rows)


def decode_parallel() -> str:
    """Return the table of steps over several GPUs, as factors over one."""
    rows = records.read_rows("decode_parallel.NVIDIA-H200")
    by_mesh = {(row["mesh"], row["batch"]): row["step_us"] for row in rows}
    peaks = {row["mesh"]: f"{row['peak_bytes'] / 1e9:.1f} GB" for row in rows}
    lines: list[tuple[object, ...]] = []
    for batch in sorted({row["batch"] for row in rows}):
        one, *others = (by_mesh[mesh, batch] for mesh in _MESHES)
        factors = (f"{one / us:.2f}" for us in others)
        lines.append((f"relative speed at batch {batch}", "1", *factors))
    lines.append(("peak memory of a GPU while loading", *(peaks[mesh] for mesh in _MESHES)))
    return records.table(("", *_MESHES.values()), lines) + records.sources(rows, "One or two")


def decode_peers() -> str:
    """Return the table of whole models with and without connected memory, as factors over one GPU.

    A factor is that of the newest run. A cell is empty if nobody has measured it.
    """
    rows = records.read_rows("decode_parallel_peers.NVIDIA-H200")
    by_command = {row["run"]["command"]: row["run"] for row in rows}
    order = list(TITLES)
    runs = sorted(by_command.values(), key=lambda run: order.index(run["rows"][0]["model"]))
    factors: dict[tuple[str, str], dict[str, float]] = {}
    for run in runs:
        found = [(f"decoding, batch {row['batch']}", row["step_us"], row) for row in run["rows"]]
        found += [
            (f"prompt of {row['prefill']} tokens", row["first_token_ms"], row)
            for row in run["prefill"]
        ]
        one = {what: time for what, time, row in found if row["mesh"] == "1x1"}
        for what, time, row in found:
            title = TITLES[row["model"]].replace("4 layers", f"{row['layers']} layers")
            factors.setdefault((title, what), {})[row["mesh"]] = one[what] / time
    meshes = {
        "1x2": "along `tensor`, NCCL",
        "1x2+peers": "along `tensor`, connected",
        "2x1+peers": "along `expert`, connected",
    }
    lines = (
        (*cell, *(f"{own[mesh]:.2f}" if mesh in own else "" for mesh in meshes))
        for cell, own in factors.items()
    )
    headings = "model", "relative speed", *meshes.values()
    return records.table(headings, lines) + records.sources(rows, "One or two")


def all_reduce() -> str:
    """Return the table of single sums."""
    run = records.read("all_reduce.NVIDIA-H200")
    lines = (
        (f"{row['kb']} kB", f"{row['peers']:.1f} us", f"{row['nccl']:.1f} us") for row in run["us"]
    )
    headings = "size of the array", "connected memory", "NCCL"
    return records.table(headings, lines) + records.sources([{"run": run}], "Two")


def drafts() -> str:
    """Return the table of steps with draft tokens; their tokens per step are stated, not measured.

    The speed of plain steps is that of the same run. The table shows it as a ratio only, because
    `decode` has the newest plain step.
    """
    rows = [
        {**row, **found, "plain_tokens_per_s": row["tokens_per_s"]}
        for row in records.read_rows("decode_drafts.NVIDIA-H200")
        for found in row["drafts"]
        if found["draft"] == "mtp" and found.get("draft_head") != "exact"
    ]
    rows = records.newest(rows, ("model", "batch", "drafts"))
    headings = (
        *("model", "batch", "draft tokens", "speedup", "tokens/s"),
        *("tokens per step (stated)", "time of a step / of a plain step", "commit"),
    )
    lines = (
        (
            *(TITLES[row["model"]], row["batch"], row["drafts"]),
            f"{row['tokens_per_s_as_stated'] / row['plain_tokens_per_s']:.2f} x",
            f"{row['tokens_per_s_as_stated']:,.0f}",
            f"{row['stated_tokens_a_step']:.2f}",
            f"{row['over_plain_step']:.2f} x",
            row["run"]["commit"],
        )
        for row in rows
    )
    return records.table(headings, lines) + records.sources(rows)


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def verifying() -> str:
    """Return the table of steps that verify draft tokens, which took no time to make."""
    rows = [
        {**row, **found}
        for row in records.read_rows("decode_drafts.NVIDIA-H200")
        for found in row["drafts"]
        if found["draft"] == "guess"
    ]
    found: dict[tuple[str, int], dict[int, Row]] = {}
    for row in records.newest(rows, ("model", "batch", "drafts")):
        found.setdefault((TITLES[row["model"]], row["batch"]), {})[row["drafts"]] = row
    counts = sorted({row["drafts"] for row in rows})
    headings = "model", "batch", *(records.counted(count, "draft token") for count in counts)
    lines = (
        (*cell, *(_over_plain(own.get(count)) for count in counts)) for cell, own in found.items()
    )
    return records.table(headings, lines) + records.sources(rows)


def _over_plain(row: Row | None) -> str:
    """Return the time of a step with drafts over that of a plain step, and in us, or nothing."""
    return "" if row is None else f"{row['over_plain_step']:.2f} x ({row['step_us']:,.0f} us)"


def training() -> str:
    """Return the table of training steps of LoRA on whole models."""
    rows = records.newest(records.read_rows("train.NVIDIA-H200"), ("model", "layers"))
    headings = (
        *("model", "layers", "tokens/s", "step, ms", "the GPU computes, ms", "forward pass, ms"),
        *("weights and adapters, GB", "memory of a step, GB"),
    )
    lines = (
        (
            *(TITLES[row["model"]], row["layers"], f"{row['tokens_per_s']:,.0f}"),
            *(f"{row['step_ms']:.0f}", f"{row['device']['busy_us'] / 1e3:.0f}"),
            f"{row['forward_ms']:.0f}",
            *(f"{row['weights_gb']:.1f}", f"{row['weights_gb'] + row['temp_gb']:.1f}"),
        )
        for row in rows
    )
    return records.table(headings, lines) + records.sources(rows)


def prefill() -> str:
    """Return the table of prompts."""
    rows = records.newest(
        records.read_rows("prefill*.NVIDIA-H200"), ("model", "format", "batch", "tokens")
    )
    headings = "model", "tokens", "over the floor", "tokens/s", "ms", "memory, GB", "commit"
    lines = (
        (
            *(TITLES[row["model"]], row["tokens"], times(row["over_floor"])),
            *(f"{row['tokens_per_s']:,.0f}", _ms(row["ms"])),
            "-" if row["memory_gb"] is None else f"{row['memory_gb']:.2f}",
            row["run"]["commit"],
        )
        for row in rows
    )
    return records.table(headings, lines) + records.sources(rows)


def first_tokens() -> list[Row]:
    """Return the prompts of one text that other engines read in the same run.

    Each row has ``times``: how many times as long each engine took until the first token. The time
    of an engine is its fastest one, as in `model_peers.times_as_fast`.
    """
    rows = []
    for row in records.read_rows("decode.NVIDIA-H200"):
        if row["batch"] > 1:
            continue
        seconds = {
            peer["peer"]: min(cell["first_token_s"])
            for peer in row["run"]["peers"]
            if peer["model"] == row["model"]
            for cell in peer["rows"]
            if (cell["batch"], cell["prompt"]) == (1, row["prompt"])
        }
        ratios = {peer: s * 1e3 / row["first_token_ms"] for peer, s in seconds.items()}
        rows.append({**row, "times": ratios, "peers_ms": {k: s * 1e3 for k, s in seconds.items()}})
    return rows


def prefill_beside_peers() -> str:
    """Return the table of the time until the first token, beside other engines."""
    rows = sorted(first_tokens(), key=lambda row: row["prompt"])
    for row in records.read_rows("prefill*.NVIDIA-H200"):
        if row.get("times"):
            peers = {peer: ratio * row["ms"] for peer, ratio in row["times"].items()}
            rows.append({**row, "prompt": row["tokens"], "peers_ms": peers})
    headings = (
        *("model", "tokens", "over llama.cpp", "over transformers"),
        *("llama.cpp, ms", "transformers, ms"),
    )
    lines = (
        (
            *(TITLES[row["model"]], row["prompt"]),
            *(times(row["times"].get(peer)) for peer in _PEERS),
            *(_ms(row["peers_ms"][peer]) if peer in row["peers_ms"] else "" for peer in _PEERS),
        )
        for row in rows
    )
    return records.table(headings, lines) + records.sources(rows)


def prefill_batch() -> str:
    """Return the table of a batch of prompts whose lengths differ."""
    result = records.read("prefill_long.NVIDIA-H200")
    rows = [{**row, "run": result} for row in result["ragged"]]
    models = list(dict.fromkeys(row["model"] for row in rows))
    found = {(row["prompts"], row["model"]): row["ms"] for row in rows}
    own = "unequal lengths"
    names = {
        own: "the batch",
        "one after the other": "the four prompts, one after the other",
        "a single prompt": "a single prompt of as many tokens",
        "all as long as the longest": "four prompts of 4096 tokens",
    }
    headings = ["", *(f"{TITLES[model]}, {what}" for model in models for what in ("x", "ms"))]

    def line(prompts):
        cells = [
            text
            for model in models
            for text in (
                f"{found[prompts, model] / found[own, model]:.2f}",
                f"{found[prompts, model]:.0f}",
            )
        ]
        return (names[prompts], *cells)

    return records.table(headings, map(line, names)) + records.sources(rows)


def h200s() -> str:
    """Return the table of what the runs on H200s measured as the limits of their GPU.

    Runs without XLA's autotuning are left out, because their product is no limit.
    """
    files = "decode", "decode_models", "decode_earlier", "prefill*", "moe*"
    rows = records.read_rows(*(f"{name}.NVIDIA-H200" for name in files))
    untuned = "autotune_level=0"
    runs = {id(r["run"]): r for r in rows if untuned not in r["run"].get("xla_flags", "")}
    units = {
        "copy_tb_per_s": ("large copy, TB/s", "{:.2f}"),
        "matmul_tflop_per_s": ("large product in bfloat16, TFLOP/s", "{:.0f}"),
    }

    def line(name):
        title, form = units[name]
        found = [row["run"]["ceilings"][name] for row in runs.values()]
        return (title, form.format(min(found)), form.format(max(found)), len(found))

    headings = "limit", "lowest run", "highest run", "runs"
    return records.table(headings, map(line, units)) + records.sources(runs.values(), "Several")


# The name of a table in a guide -> what writes it.
TABLES: Mapping[str, Callable[[], str]] = {
    "decode": decode,
    "decode_beside_peers": decode_beside_peers,
    "decode_formats": decode_formats,
    "decode_parallel": decode_parallel,
    "decode_peers": decode_peers,
    "all_reduce": all_reduce,
    "verifying": verifying,
    "drafts": drafts,
    "training": training,
    "prefill": prefill,
    "prefill_beside_peers": prefill_beside_peers,
    "prefill_batch": prefill_batch,
    "h200s": h200s,
}
