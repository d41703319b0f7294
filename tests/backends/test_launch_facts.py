"""Test what C++ and Python agree on before a kernel is called."""

import sys
import types

import pytest

from jax_nvfp4_moe.backends import launch_facts
from jax_nvfp4_moe.backends.launch_facts import facts, why_missing
from jax_nvfp4_moe.backends.record import Backend
from jax_nvfp4_moe.backends.resolution import choose_backend, reasons_against
from jax_nvfp4_moe.ops.records import RECORDS, find_backend
from jax_nvfp4_moe.scheme import Problem, Target

GPU = Target("cuda", (9, 0))


def bounds(record: Backend):
    """Return the bounds of a record, of which strings are names of facts."""
    numbers = record.max_experts, record.max_top_k, record.max_extent, record.shared_bytes
    return [*record.limits.values(), *numbers]


def test_there_are_facts_and_records_name_those_that_there_are():
    assert why_missing() is None
    named = {bound for record in RECORDS for bound in bounds(record) if isinstance(bound, str)}
    assert len(named) > 20
    assert [name for name in sorted(named) if not hasattr(facts(), name)] == []


@pytest.mark.parametrize("record", [one for one in RECORDS if one.extension], ids=lambda r: r.name)
def test_facts_are_ranges_and_numbers(record):
    assert all(isinstance(limit, range) for limit in record._bounds.limits.values())
    assert all(isinstance(number, int) for number in record._bounds[1:])


def test_xla_takes_the_rows_that_the_kernel_does_not():
    parts = find_backend("xla_in_parts").limits["rows"]
    assert parts.start == facts().DENSE_ROWS.stop


def test_a_record_that_names_a_fact_refuses_what_the_kernel_does():
    record = find_backend("attention_cuda")
    for width, reason in (
        (256, None),
        (264, "needs key width from 8 to 256 in multiples of 8; got 264"),
    ):
        sized = Problem("attention", None, GPU, dtype="bfloat16", sizes={"key width": width})
        assert record.reason_against(sized) == reason


@pytest.fixture
def replace_extension(monkeypatch):
    """Return a function that replaces the CPU extension; None takes it away."""

    def give(module):
        monkeypatch.setitem(sys.modules, "jax_nvfp4_moe._nvfp4_cpu", module)
        launch_facts._load.cache_clear()

    yield give
    launch_facts._load.cache_clear()


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (None, "_nvfp4_cpu is not usable here"),
        (types.ModuleType("old"), "_nvfp4_cpu was built from older sources"),
    ],
)
def test_without_facts_kernels_are_refused_and_the_reference_runs(replace_extension, module, why):
    """A program cannot be lowered for a kernel whose memory nobody knows."""
    replace_extension(module)
    problem = Problem("attention", None, GPU, dtype="bfloat16")
    reasons = reasons_against(problem, RECORDS)
    assert reasons["attention_cuda"].startswith(f"the extension {why}")
    assert "reinstall the package" in reasons["attention_cuda"]
    assert choose_backend(problem, RECORDS).name == "reference"
    with pytest.raises(ImportError, match=why):
        facts()


def test_memory_of_attention_holds_the_parts_of_the_keys():
    """264 blocks share the tiles of 64 rows; a part has 256 keys or more."""
    for (b, t, n, m, s, dv), parts in (
        ((1, 1, 32, 4, 8192, 128), 32),  # 66 blocks for a tile, and 32 times 256 keys
        ((1, 1, 32, 4, 65536, 128), 66),
        ((1, 1, 32, 4, 65536, 256), 33),  # blocks with wide values take twice as much room
        ((66, 4, 32, 4, 65536, 256), 1),
    ):
        expected = 4 * b * t * n * parts * (dv + 2) if parts > 1 else 0
        assert facts().attention_workspace_bytes(b, t, n, m, s, dv) == expected


def test_memory_of_latent_attention_holds_the_parts_of_the_keys():
    """264 blocks share the tiles of up to 16 rows, and 132 those of more; a part has 64 keys."""
    for t, parts in ((1, 16), (8, 16), (64, 8)):
        got = facts().latent_attention_workspace_bytes(1, t, 16, 1, 1024, 512)
        assert got == 4 * t * 16 * parts * (512 + 2)


def test_memory_of_recurrences_holds_whole_chunks():
    """A chunk has 64 tokens, and a key or a query 128 floats."""
    b, heads, shared, padded = 2, 3, 4, 128
    pairs, keys, decays = 64, 128, 2
    for fact, numbers in (
        ("mamba2_scan", pairs + decays),
        ("delta_rule", keys + pairs + decays),
        ("channel_delta_rule", keys + pairs + decays + 4),  # one for each 32 tokens of a key
    ):
        got = getattr(facts(), f"{fact}_workspace_bytes")(b, 65, heads, shared)
        assert got == 4 * b * padded * heads * (2 * 128 + shared * numbers)
