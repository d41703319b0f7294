"""Measure how evenly experts load their devices, before and after placement.

    python benchmarks/balance.py [--text FILE]

The figure is the number of slots of the busiest device over the mean of all devices. Placement uses
the counts of one half of the tokens; the figure is measured on the other half.

There are two sources of routing. The first is the example model on a text. Its windows go to the
two halves in turn. The figures are the worst and the mean of its layers. The second is Zipf
routing, where the expert of rank r is drawn with a probability proportional to 1 / r^s.

The columns are "before" (experts in their order), "placed" (the same experts in another order) and
"with replicas" (p - e experts more, which are replicas). Writes
``benchmarks/results/balance.{json,md}``.
"""

import argparse
import pathlib

import numpy as np
from provenance import provenance, write_page

from jax_nvfp4_moe import load_model
from jax_nvfp4_moe.inference import balance
from jax_nvfp4_moe.inference.tokenizer import load_tokenizer
from jax_nvfp4_moe.parallel.placement import balance_experts, imbalance, unplaced

HERE = pathlib.Path(__file__).resolve().parent
EXAMPLE = HERE.parent / "jax_nvfp4_moe" / "examples" / "tiny-python-moe"
TEXT = HERE.parent / "tests" / "checkpoints" / "tiny-python-moe-reference" / "heldout.txt"
TOKENS = 16384


def zipf_routing(experts: int, tokens: int, top_k: int, exponent: float) -> np.ndarray:
    """Return int32 ``[tokens, top_k]``, distinct within a token; the ranks are in random order."""
    rng = np.random.default_rng([experts, tokens])
    chances = np.arange(1, experts + 1, dtype=np.float64) ** -exponent
    # The k largest values of log p + Gumbel noise are k draws without replacement.
    scores = np.log(rng.permutation(chances)) + rng.gumbel(size=(tokens, experts))
    return np.argpartition(-scores, top_k - 1, axis=-1)[:, :top_k].astype(np.int32)


def measure_routing(experts, top_k, exponent, devices, physical, tokens=TOKENS) -> dict:
    """Return the row of Zipf routing."""
    ids = zipf_routing(experts, tokens, top_k, exponent)
    seen, new = np.split(ids, 2)
    load = np.bincount(seen.ravel(), minlength=experts)
    after = [
        imbalance(balance_experts(load, devices, p).routed_load(new)) for p in (experts, physical)
    ]
    before = imbalance(unplaced(experts, devices).routed_load(new))
    routing = f"Zipf, s = {exponent}, {experts} experts, top {top_k}"
    return _row(routing, devices, physical, [before], *([x] for x in after))


def measure_model(model, ids, devices, physical) -> dict:
    """Return the row of a model on tokens ``[2, b, t]``. The model keeps its last placement."""
    seen, new = ids
    load = balance.count_experts(model, seen)
    found = []
    for place_row in (
        lambda row: unplaced(row.size, devices),
        lambda row: balance_experts(row, devices),
        lambda row: balance_experts(row, devices, physical),
    ):
        balance.place_model(model, [place_row(row) for row in load])
        found.append([imbalance(row) for row in balance.device_load(model, new, devices)])
    experts = load.shape[1]
    return _row(
        f"example model, {len(load)} layers of {experts} experts", devices, physical, *found
    )


def _row(routing, devices, physical, before, placed, copies) -> dict:
    return {
        "routing": routing,
        "devices": devices,
        "physical": physical,
        **{
            name: {"mean": float(np.mean(values)), "worst": float(np.max(values))}
            for name, values in (("before", before), ("placed", placed), ("copies", copies))
        },
    }


def make_page(result) -> str:
    """Return the page of results as Markdown."""
    lines = [
        "# Balance of experts over devices",
        "",
        "Each figure is the load of the busiest device over the mean of all devices, on tokens "
        "that the placement has not seen. For a model, it is the mean of its layers and, in "
        f"brackets, the worst layer. Command: `{result['command']}`.",
        "",
        "| routing | devices | physical experts | before | placed | with replicas |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = [
            f"{row[name]['mean']:.2f}"
            + (f" ({row[name]['worst']:.2f})" if row[name]["worst"] > row[name]["mean"] else "")
            for name in ("before", "placed", "copies")
        ]
        head = (row["routing"], row["devices"], row["physical"])
        lines.append("| " + " | ".join(map(str, (*head, *cells))) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", type=pathlib.Path, default=TEXT)
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, help="number of tokens of Zipf routing"
    )
    parser.add_argument(
        "--windows", type=int, default=48, help="number of windows of 512 tokens of the text"
    )
    parser.add_argument("--commit", help="commit to record; default: what git reports")
    parser.add_argument("--output", type=pathlib.Path, default=HERE / "results")
    arguments = parser.parse_args()
    windows = arguments.windows // 2 * 2
    ids = load_tokenizer(EXAMPLE).encode(arguments.text.read_text(encoding="utf-8"))
    ids = np.asarray(ids[4096 : 4096 + 512 * windows], np.int32).reshape(windows, 512)
    ids = np.stack([ids[0::2], ids[1::2]])
    model = load_model(EXAMPLE, scheme="w4a16")
    experts = model.config.num_experts
    rows = [measure_model(model, ids, m, experts + extra) for m, extra in ((4, 4), (8, 8))]
    rows += [
        measure_routing(e, 8, s, m, p, arguments.tokens)
        for e, m, p in ((128, 8, 144), (256, 8, 288), (256, 32, 288), (256, 64, 320))
        for s in (0.5, 1.0)
    ]
    result = {"kind": "measured", **provenance(arguments.commit), "rows": rows}
    write_page(arguments.output / "balance", result, make_page(result))


if __name__ == "__main__":
    main()
