"""Test that the reference has each public name once. CI builds it with warnings as errors."""

import collections
import json
import re

import draw_charts
import draw_pictures
import figures
import layer_tables
import measure
import memory_tables
import pages
import pytest
import records
import speeds
import tables
from support.files.given import MODELS

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.models.loading import ARCHITECTURES
from jax_nvfp4_moe.models.refused import REFUSED_FAMILIES

MODULES = (nvfp4, nvfp4.ops, nvfp4.testing)


def left_out(module, reference):
    """Return the public names of `module` that are on no page."""
    there = {id(value) for _, names in reference.values() for value in names.values()}
    return {name for name, value in pages.public(module).items() if id(value) not in there}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_name_is_in_the_reference(module):
    assert {"load_model", "moe_mlp", "random_moe_params"} & pages.public(module).keys()
    assert left_out(module, pages.reference()) == set()


def test_no_name_is_there_twice():
    values = [id(value) for _, names in pages.reference().values() for value in names.values()]
    assert [value for value, count in collections.Counter(values).items() if count > 1] == []


def test_a_module_that_no_page_names_gets_its_own():
    reference = pages.reference({})
    assert left_out(nvfp4, reference) == set()
    names = list(reference["inference.generation"][1])
    assert names == ["GenerationStats", "generate", "stream"]


def test_a_name_that_is_on_no_page_is_noticed():
    assert "moe_mlp" in left_out(nvfp4.ops, pages.reference({}))


def test_a_page_asks_for_its_names_under_their_public_paths():
    text = pages.render(*pages.reference()["models"])
    assert ".. autofunction:: jax_nvfp4_moe.load_model\n" in text
    assert ".. autofunction:: jax_nvfp4_moe.save\n" in text


def test_the_command_line_is_described_in_full():
    text = pages.command_line()
    for words in ("## inspect", "## generate", "| `--max-new-tokens` |", "| `path` | required |"):
        assert words in text


def test_sources_hold_the_pages_that_the_readme_links_to(tmp_path):
    pages.write(tmp_path / "source")
    home = (tmp_path / "source" / "index.md").read_text()
    linked = list(pages.linked(home))
    assert "CONTRIBUTING.md" in linked
    assert all((tmp_path / "source" / path).is_file() for path in linked)
    assert "reference/ops\n" in home


def test_links_to_the_source_of_public_names_lead_to_the_reference():
    """Names of nothing public, and other links to files, stay as they are."""
    text = "[`ops.route`](../../jax_nvfp4_moe/ops/routing.py) [`nvfp4.save`](../jax_nvfp4_moe/a.py)"
    found = pages.with_reference_links(text)
    assert found == (
        "[`ops.route`](../../reference/ops.md#route) [`save`](../reference/models.md#save)"
    )
    others = "[`nothing`](../jax_nvfp4_moe/a.py) [`examples/lora.py`](../jax_nvfp4_moe/a.py)"
    assert pages.with_reference_links(others) == others


def test_a_notebook_becomes_a_page_with_its_outputs(tmp_path):
    text = pages.notebook_page(pages.ROOT / "notebooks" / "01_format.ipynb", tmp_path)
    assert text.startswith("# 1. What NVFP4 is\n")
    assert "```text\nexperts, rows, columns: (16, 256, 192)" in text
    pictures = sorted(path.name for path in tmp_path.iterdir())
    assert len(pictures) == 5
    assert all(f"![]({name})" in text for name in pictures)
    assert (tmp_path / pictures[0]).read_bytes().startswith(b"\x89PNG")


PICTURES = (draw_pictures.data_flow, draw_pictures.packed_layout, *draw_charts.CHARTS)


@pytest.mark.parametrize("draw", PICTURES)
def test_pictures_are_those_that_the_script_draws(draw):
    stored = draw_pictures.HERE / f"{draw.__name__}.svg"
    assert stored.read_text(encoding="utf-8") == draw()


def test_charts_have_the_speeds_and_sizes_of_the_tables():
    chart, table = draw_charts.speed(), speeds.table()
    for model, batch, prompt in speeds.STEPS[:3]:
        compared = speeds.step(model, batch, prompt)
        assert f">{compared.own_text}, this package<" in chart
        assert f"| {compared.own_text} | {compared.other_text}, llama.cpp |" in table
        assert compared.ratio > 1  # the text beside the picture says so
    chart, table = draw_charts.memory(), memory_tables.models()
    for row in memory_tables.sizes():
        size = f"{row['weights_bytes']['nvfp4'] / 1e9:.1f}"
        assert f" | {size} | " in table
        assert (f">{size}<" in chart) == memory_tables.holds(141, row)
    # The text beside the picture says which models stay below which lines.
    needed = {row["model"]: memory_tables.needed(row) / 1e9 for row in memory_tables.sizes()}
    small = {"llama-3.1-8b", "qwen3-30b-a3b", "nemotron3-nano"}
    assert {name for name, size in needed.items() if size < 24} == small
    assert {name for name, size in needed.items() if size > 48} == {"deepseek-v3"}


def test_the_longer_bar_of_a_pair_is_the_faster_one():
    """Also where the peer is: the picture must not be drawn for the package alone."""
    run = {"date": "2026-01-01"}
    slower = speeds.Comparison("model", "layer", "peer", 20.0, 80.0, "20", "80", run)
    drawn = "".join(draw_charts._pairs(0, [slower], "peer"))
    widths = re.findall(r'<rect [^>]*width="([\d.]+)"', drawn)
    assert [float(width) for width in widths] == [draw_charts.SPAN / 4, draw_charts.SPAN]


def test_a_cell_has_one_value_in_all_tables():
    """The newest run counts, also where an older one is beside a peer."""
    step = speeds.step("qwen3-30b-a3b", 1, 128)
    for text in (speeds.table(), memory_tables.models(), figures.FIGURES["decode_1"]()):
        assert step.own_text.removesuffix(" tokens/s") in text
    newest = layer_tables.newest((layer_tables.OWN,))
    older = layer_tables.newest((layer_tables.OWN,), "moe_peers")
    cell = "deepseek-v3", 1
    assert newest[cell][layer_tables.OWN]["run"]["commit"] == "6da9362"
    assert older[cell][layer_tables.OWN]["us"] > newest[cell][layer_tables.OWN]["us"]
    for case, tokens in speeds.LAYERS:
        own = newest[case, tokens][layer_tables.OWN]["us"]
        assert speeds.layer(case, tokens).own_text == records.duration(own)


def test_a_newer_run_replaces_an_older_one(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    for name, date, us in (("a", "2026-02-01", 1), ("b", "2026-01-01", 2), ("c", "2026-02-01", 3)):
        run = {"date": date, "rows": [{"model": "llama-3.1-8b", "us": us}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(run))

    def newest(*files):
        return [row["us"] for row in records.newest(records.read_rows(*files), ("model",))]

    assert newest("a", "b") == [1]
    assert newest("a", "b", "c") == [3]  # of one day: the file that is named last
    assert newest("c", "b", "a") == [1]


def test_tables_of_the_guides_are_those_that_the_script_writes():
    texts = [path.read_text(encoding="utf-8") for path in tables.pages()]
    assert [tables.with_tables(text) for text in texts] == texts
    for name in tables.TABLES:
        assert any(f"<!-- table: {name} -->" in text for text in texts)


def test_a_table_that_was_edited_by_hand_is_written_again():
    text = f"a\n<!-- table: refused_formats -->\n{tables.refused_formats()}<!-- end of table -->\nb"
    edited = text.replace("| `hqq`", "| `hqx`").replace("`gptq`", "")
    assert edited != text
    assert tables.with_tables(edited) == text


def test_a_family_is_supported_or_refused():
    assert not ARCHITECTURES.keys() & REFUSED_FAMILIES


def test_the_table_of_checkpoints_has_a_result_for_each_folder():
    """`python docs/measure.py && python docs/tables.py` measures new and changed folders."""
    results = measure.read_results()
    assert sorted(results) == MODELS
    changed = [f.name for f in measure.folders() if results[f.name]["digest"] != measure.digest(f)]
    assert changed == []
    assert all({"experts", "blocks", "logits"} <= found.keys() for found in results.values())
    rows = tables.checkpoints().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == MODELS


def test_a_checkpoint_that_changed_has_another_digest(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    first = measure.digest(tmp_path)
    (tmp_path / "config.json").write_text("{ }")
    assert measure.digest(tmp_path) != first
