"""Test the prediction for many GPUs: its equations by hand, and laws of any such model."""

import itertools
import json
import math
import pathlib

import balance as balance_benchmark
import numpy as np
import parallel_prediction as prediction
import pytest
from parallel_prediction import FORMS, GPUS, INPUTS, MEASURED_CASES, TOKENS

RESULTS = pathlib.Path(prediction.__file__).parent / "results"
MEASURED = RESULTS / "moe.NVIDIA-H200.json"
LAYERS = {case: prediction.read_layer(case, MEASURED) for case in MEASURED_CASES}
CELLS = [
    (case, gpus, form)
    for case in MEASURED_CASES
    for gpus in GPUS
    for form in prediction.forms_for(LAYERS[case].case, gpus)
]


@pytest.mark.parametrize("case", MEASURED_CASES)
def test_products_are_those_that_were_measured_on_one_gpu(case):
    rows = json.loads(MEASURED.read_text())["rows"]
    own = [r for r in rows if r["case"] == case and r["contestant"] == prediction.CONTESTANT]
    assert len(own) == 14
    for row in own:
        ratio = prediction.products_us(LAYERS[case], row["tokens"], 1, 1) / row["us"]
        assert 0.8 < ratio < 1.15  # the page says 0.82 to 1.12


def test_bytes_by_hand():
    layer = LAYERS["deepseek-v3"]
    # A GPU sends 63/64 of 256 tokens of 7168 float32 values twice, an eighth of it through its
    # port.
    cost = FORMS["a psum"](layer, 256, 64)
    assert cost.nvlink == pytest.approx(2 * 63 / 64 * 256 * 7168 * 4)
    assert cost.infiniband == pytest.approx(cost.nvlink / 8)
    assert cost.wire == pytest.approx(cost.nvlink / 320e3 + 46 + 2 * 10)
    # Each GPU has 4 tokens and 4 of 256 experts, and each token has 8 experts.
    hit = 1 - math.comb(252, 8) / math.comb(256, 8)
    assert prediction.hit_chance(layer.case, 64) == pytest.approx(hit)
    cost = FORMS["b ragged, bf16"](layer, 256, 64)
    # A row goes out with 8 ids and weights of 4 bytes each, and comes back without them.
    row = 4 * hit * 1.1 * (2 * 7168 * 2 + 64)
    assert cost.infiniband == pytest.approx(56 * row)
    assert cost.nvlink == pytest.approx(7 * row)
    assert cost.wire == pytest.approx(56 * row / 45e3 + 2 * (14 + 56))
    cost = FORMS["b all_to_all, bf16"](layer, 256, 64)
    assert cost.infiniband == pytest.approx(56 * 4 * (2 * 7168 * 2 + 64))


def test_chances_are_those_of_drawing():
    rng = np.random.default_rng(0)
    case = LAYERS["qwen3-30b-a3b"].case
    ids = rng.permuted(np.tile(np.arange(128), (4000, 1)), axis=1)[:, : case.top_k]
    hit = np.mean((ids < 16).any(axis=1))
    # With 4000 draws, three standard deviations are 0.023.
    assert prediction.hit_chance(case, 8) == pytest.approx(hit, abs=0.023)
    assert prediction.hit_chance(case, 1) == 1


@pytest.mark.parametrize(("case", "gpus", "form"), CELLS)
def test_more_tokens_never_cost_less(case, gpus, form):
    costs = [FORMS[form](LAYERS[case], tokens, gpus) for tokens in TOKENS]
    for less, more in itertools.pairwise(costs):
        assert less.us <= more.us
        assert less.nvlink <= more.nvlink
        assert less.infiniband <= more.infiniband
        assert less.products <= more.products
    assert (costs[0].infiniband == 0) == (gpus == 8)


def test_codes_are_less_on_the_wire():
    layer = LAYERS["deepseek-v3"]
    wide = FORMS["b ragged, bf16"](layer, 4096, 64).infiniband
    narrow = FORMS["b ragged, NVFP4 by token"](layer, 4096, 64).infiniband
    # Rows come back in bfloat16. Ids, weights and a scale take less than a hundredth.
    assert narrow / wide == pytest.approx((9 / 16 + 2) / 4, rel=0.01)


def test_forms_that_cut_a_block_are_left_out():
    deepseek, qwen = (LAYERS[case].case for case in MEASURED_CASES)
    assert "c psum, cut" in prediction.forms_for(deepseek, 64)  # 2048 = 64 * 2 blocks
    assert "c psum, cut" not in prediction.forms_for(deepseek, 512)
    assert "c psum, cut" not in prediction.forms_for(qwen, 64)  # 768 = 48 blocks


@pytest.mark.parametrize("case", MEASURED_CASES)
@pytest.mark.parametrize("gpus", [64, 512])
def test_the_faster_form_changes_at_the_crossover(case, gpus):
    layer = LAYERS[case]
    first, second = FORMS["a psum"], FORMS["b ragged, NVFP4 by token"]
    tokens = prediction.crossover(layer, gpus, "a psum", "b ragged, NVFP4 by token")
    assert tokens is not None
    assert second(layer, tokens, gpus).us <= first(layer, tokens, gpus).us
    assert second(layer, tokens - 1, gpus).us > first(layer, tokens - 1, gpus).us
    assert prediction.crossover(layer, gpus, "b ragged, NVFP4 by token", "a psum") is None


def test_the_pages_are_those_of_the_code():
    for name in ("parallel_prediction", "balance"):
        result = json.loads((RESULTS / f"{name}.json").read_text())
        page = (RESULTS / f"{name}.md").read_text()
        make_page = (prediction if name != "balance" else balance_benchmark).make_page
        assert page == make_page(result)
    result = json.loads((RESULTS / "parallel_prediction.json").read_text())
    assert result["kind"] == "prediction"
    assert result["inputs"].keys() == INPUTS.keys()
    for part in result["parts"]:
        again = prediction.predict(LAYERS[part["case"]], part["gpus"])
        assert [c["us"] for c in again["cells"]] == pytest.approx([c["us"] for c in part["cells"]])
        assert again["crossovers"] == part["crossovers"]


def test_one_host_stands_beside_what_was_measured_there():
    page = json.loads((RESULTS / "parallel_prediction.json").read_text())["one_host"]
    measured = json.loads((RESULTS / page["file"]).read_text())
    rows = [row for row in measured["rows"] if "us" in row]
    assert [(r["us"], r["exchange_us"]) for r in page["rows"]] == [
        (r["us"], r["exchange_us"]) for r in rows
    ]
    again = prediction.compare(list(LAYERS.values()), measured["rows"])
    assert [r["predicted_us"] for r in again] == pytest.approx(
        [r["predicted_us"] for r in page["rows"]]
    )
    # Computed by hand: 2 (n - 1) / n * 4 h t bytes over 370 GB/s, and 15 us.
    row = next(r for r in again if (r["form"], r["devices"], r["tokens"]) == ("psum", 4, 4096))
    assert row["predicted_wire_us"] == pytest.approx(1.5 * 4 * 7168 * 4096 / 370e3 + 15)


def test_every_input_says_where_it_is_from():
    kinds = {"measured elsewhere", "measured here", "model of NCCL", "chosen"}
    assert {row.kind for row in INPUTS.values()} == kinds
    assert all(row.source for row in INPUTS.values())


@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_zipf_routing_is_distinct_and_balanced_by_placement(exponent):
    ids = balance_benchmark.zipf_routing(64, 2000, 4, exponent)
    assert (np.diff(np.sort(ids), axis=-1) > 0).all()
    row = balance_benchmark.measure_routing(64, 4, exponent, 4, 72, tokens=8000)
    assert row["before"]["mean"] > row["copies"]["mean"]
