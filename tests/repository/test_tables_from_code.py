"""Test the tables of families and of activations, which the guides take from the code."""

import re

import measure
import tables

from jax_nvfp4_moe.models.loading import ARCHITECTURES
from jax_nvfp4_moe.numerics.activations import ACTIVATIONS, ALIASES


def names(row):
    return re.findall(r"`(\w+)`", row)


def cells(row):
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_the_table_of_families_has_each_architecture_once():
    rows = tables.families().splitlines()[2:]
    assert sorted(name for row in rows for name in names(row)) == sorted(ARCHITECTURES)
    # A variant shares the modules of another family, and still has a row of its own.
    assert [cells(row)[-1] for row in rows if row.startswith("| Qwen3-MoE |")] == [
        "`Qwen3MoeForCausalLM`"
    ]


def test_every_family_has_a_checkpoint_that_adapters_train():
    rows = [cells(row) for row in tables.families().splitlines()[2:] if row.startswith("|")]
    assert [row[0] for row in rows if row[1] == "0" or row[5] != "yes"] == []


def test_a_family_has_the_worst_of_its_checkpoints(monkeypatch):
    results = {
        "granite-modelopt-w4a16": {"logits": 3e-7, "gpu": 1.5, "gpu_device": "a GPU"},
        "olmo2-modelopt-w4a16": {"logits": 2e-7, "mesh": 4e-8},
        "olmo3-modelopt-w4a16": {"logits": 1e-7, "mesh": 0.0},
    }
    monkeypatch.setattr(measure, "read_results", lambda: results)
    table = tables.families()
    rows = {row[0]: row for row in map(cells, table.splitlines())}
    assert rows["OLMo 2 and OLMo 3"][1:-1] == ["2", "2.0e-7", "", "4.0e-8", "yes", ""]
    granite = next(row for name, row in rows.items() if name.startswith("Granite, the dense"))
    assert granite[1:-1] == ["1", "3.0e-7", "1.50", "", "yes", ""]
    assert rows["Qwen3-Next"][2:-1] == ["", "", "", "yes", "mtp"]
    assert table.endswith("\nGPU: a GPU.\n")


def test_the_table_of_activations_has_each_name_once():
    rows = tables.activations().splitlines()[2:]
    assert [names(row)[0] for row in rows] == list(ACTIVATIONS)
    assert sorted(name for row in rows for name in names(row)[1:]) == sorted(ALIASES)
    assert "| `silu` | `swish` | gate, then up |  |" in rows
    assert "| `swigluoai` |  | alternate | alpha 1.702, beta 1, limit 7 |" in rows
    assert "| `relu2` | `relu2_no_mul` | no gate |  |" in rows
