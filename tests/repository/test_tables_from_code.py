"""Test the tables of families, activations and kernels, which the guides take from the code."""

import re

import accuracy_tables
import kernel_tables
import measure
import tables

from jax_nvfp4_moe.models.loading import ARCHITECTURES
from jax_nvfp4_moe.numerics.activations import ACTIVATIONS, ALIASES
from jax_nvfp4_moe.ops.records import RECORDS


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


def test_the_table_of_kernels_has_each_kernel_once():
    rows = [row.split(" | ") for row in kernel_tables.kernels().splitlines()[2:]]
    assert sorted(row[1].strip("`") for row in rows) == sorted(
        record.name for record in RECORDS if record.ffi_targets
    )


def test_a_row_has_the_devices_and_limits_of_its_kernel():
    rows = kernel_tables.kernels().splitlines()
    attention = (
        "| `attention`, `latent_attention` | `attention_amx` | CPU with AMX-BF16 | bf16 "
        "| key width, value width: up to 1024 |"
    )
    few = "| GPU 8.x, 10.x to 12.x | bf16, f16, f32 | up to 512 experts, 32 for a token |"
    assert attention in rows
    assert any(few in row for row in rows)
    assert any(row.endswith("| rows: up to 64, unless asked for |") for row in rows)
    assert any("| taps: 2 to 8; columns: multiples of 4; tokens: from 9" in row for row in rows)


def test_the_summary_of_accuracy_leaves_out_what_was_not_measured(monkeypatch):
    dense = {"experts": 0.0, "blocks": 0.0, "logits": 2e-7, "decoding": 0.0}
    experts = {"experts": 1e-7, "blocks": 3e-7, "logits": 4e-7, "decoding": 0.0, "mesh": 1e-7}
    both = {"bfloat16": 1.25, "gpu": 1.5}
    results = {"dense": dense | both, "experts": experts | both}
    monkeypatch.setattr(measure, "read_results", lambda: results)
    rows = accuracy_tables.summary().splitlines()
    assert "| float32: routed experts (1 checkpoints) | 1.0e-7 | 1.0e-7 |" in rows
    assert "| float32: logits (2 checkpoints) | 3.0e-7 | 4.0e-7 |" in rows
    assert (
        "| float32: two to four CPU devices against one (1 checkpoints) | 1.0e-7 | 1.0e-7 |" in rows
    )
