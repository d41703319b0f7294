"""Test what C++ and Python agree on before a kernel is called."""

import functools
import sys
import types

import jax
import numpy as np
import pytest
from jax import export

from jax_nvfp4_moe import ops
from jax_nvfp4_moe.backends import launch_facts
from jax_nvfp4_moe.backends.launch_facts import (
    facts,
    why_missing,
    workspace_bytes,
    workspace_bytes_of_rows,
)
from jax_nvfp4_moe.backends.record import Backend
from jax_nvfp4_moe.backends.resolution import choose_backend, reasons_against
from jax_nvfp4_moe.ops.records import RECORDS, find_backend
from jax_nvfp4_moe.ops.recurrent.kernel_limits import count_chunks
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
        assert workspace_bytes("nvfp4_attention_cuda", b, t, n, m, s, dv) == expected


def test_memory_of_latent_attention_holds_the_parts_of_the_keys():
    """264 blocks share the tiles of up to 16 rows, and 132 those of more; a part has 64 keys."""
    for t, parts in ((1, 16), (8, 16), (64, 8)):
        got = workspace_bytes("nvfp4_latent_attention_cuda", 1, t, 16, 1, 1024, 512)
        assert got == 4 * t * 16 * parts * (512 + 2)


def test_memory_of_recurrences_holds_whole_chunks():
    """A chunk has 64 tokens, and a key or a query 128 floats."""
    b, heads, shared, padded = 2, 3, 4, 128
    pairs, keys, decays = 64, 128, 2
    for rule, more, numbers in (
        ("mamba2_scan", (), pairs + decays),
        ("delta_rule", (False,), keys + pairs + decays),
        ("delta_rule", (True,), keys + pairs + decays + 4),  # 4 times 32 channels of a key
    ):
        chunks = count_chunks(b, 65)
        got = workspace_bytes_of_rows(f"nvfp4_{rule}_cuda", chunks, heads, shared, *more)
        assert got == 4 * b * padded * heads * (2 * 128 + shared * numbers)


MEMORY = {"WORKSPACE_BYTES": facts().WORKSPACE_BYTES, "WORKSPACE_ROWS": facts().WORKSPACE_ROWS}


@pytest.mark.parametrize("table", MEMORY)
def test_memory_is_that_of_targets(table):
    targets = {target for record in RECORDS for target in record.ffi_targets}
    assert MEMORY[table].keys() <= targets


@pytest.mark.parametrize("target", [one for one in facts().WORKSPACE_BYTES if "_moe_" in one])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_memory_of_a_layer_holds_what_its_products_exchange(target, gated, size):
    """A chunk has 65536 slots: their order, and the inputs, or outputs, of the second product."""
    top_k, e, h, i = 8, 128, 2048, 768
    sizes = top_k, e, h, i, gated, size
    few, many, more = (workspace_bytes(target, t, *sizes) for t in (64, 8192, 8193))
    assert few < many == more
    bits = 4 if "_w4a4_" in target else 8 * size
    chunk = 32768 if size == 4 and bits == 32 else 65536  # the plain kernels sort fewer slots
    assert many >= chunk * (4 + i * bits // 8 + 2 * h)
    assert workspace_bytes(target, 0, *sizes) >= 0


def test_memory_of_calls_that_no_engine_takes_is_that_of_the_plain_kernels():
    """They keep no partial sums, and the outputs of the second product in float32."""
    target, wide = "nvfp4_moe_w4a16_sm90", facts().MAX_ENGINE_EXTENT
    sums = 32 << 20
    for h, size, plain in ((wide, 2, False), (wide + 16, 2, True), (64, 4, True)):
        got = workspace_bytes(target, 1, 1, 1, h, 64, True, size)
        assert (got < sums) is plain
    assert workspace_bytes(target, 1, 1, 1, wide + 16, 64, True, 2) > 4 * wide


def test_rounds_of_the_cpu_kernels_stay_below_their_bound():
    """The memory grows with the tokens, up to those of a round of 256 MiB and one slot each."""
    for sizes in ((8, 128, 2048, 768, True, 2), (1, 4, 1 << 22, 64, False, 4)):
        fixed, of_token, most = facts().WORKSPACE_ROWS["nvfp4_moe_w4a16_cpu"](*sizes)
        assert most == max((256 << 20) // of_token, 1)
        assert of_token >= sizes[0] * sizes[5] * (sizes[2] + sizes[3])
        assert fixed >= 16 * of_token // sizes[0]  # kernels read 15 rows past the last one


@pytest.mark.parametrize(
    ("sizes", "shared_bytes", "tokens"),
    [
        ((8, 2048, 768, True), 227 << 10, 1),  # 38 million weights a token, of 64 at most
        ((1, 2048, 768, True), 227 << 10, 14),
        ((1, 64, 32, False), 227 << 10, 32),  # a lane of a warp for each slot
        ((2, 64, 1408, True), 227 << 10, 16),
        ((2, 64, 1408, True), 99 << 10, 6),  # 64,960 bytes, and 2,904 for each of 12 slots
        ((33, 64, 32, True), 227 << 10, 0),
        ((1, 64, (1 << 18) + 16, True), 1 << 40, 0),  # on the plain kernels
    ],
)
def test_layers_with_few_slots_run_without_a_sort(sizes, shared_bytes, tokens):
    assert facts().most_unsorted_tokens(*sizes, False, shared_bytes) == tokens
    assert facts().most_unsorted_tokens(*sizes, True, shared_bytes) == 0  # scales of tokens


def test_linear_layers_with_few_rows_run_in_one_kernel():
    """A row takes 2 bytes an element, and 16 bytes keep rows apart."""
    assert facts().most_linear_rows(1 << 18, True, 99 << 10) == 64
    for k, rows in ((2048, 8), (8192, 6), (50624, 1), (50688, 0)):
        assert facts().most_linear_rows(k, False, 99 << 10) == rows


def test_sizes_that_do_not_fit_a_target_are_named():
    """A symbol of `jax.export` is no size of a kernel that needs to know its memory."""
    expected = r"nvfp4_attention_cuda: expected a number for each of b t n m s dv, got \(1, "
    for sizes in ((1, 2), (1, 1, 32, 4, "s", 128)):
        with pytest.raises(TypeError, match=expected):
            workspace_bytes("nvfp4_attention_cuda", *sizes)


def test_rows_may_be_a_symbol():
    (b,) = export.symbolic_shape("b")
    of_row = workspace_bytes_of_rows("nvfp4_mamba2_step_cuda", 1, 4, 8)
    assert of_row == 4 * 4 * 8
    assert workspace_bytes_of_rows("nvfp4_mamba2_step_cuda", b, 4, 8) == of_row * b
    assert count_chunks(b, 65) == 2 * b


def test_a_recurrence_is_exported_for_any_number_of_rows_and_tokens():
    b, t = export.symbolic_shape("b, t")
    shapes = (
        (b, t, 2, 8),
        (b, t, 2, 8),
        (b, t, 2, 1, 8),
        (b, t, 2, 1),
        (b, t, 2, 1),
        (b, 2, 1, 8, 8),
    )
    operands = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    rule = functools.partial(ops.gated_delta_rule, target=GPU, dtype="bfloat16")
    unchecked = [export.DisabledSafetyCheck.custom_call("nvfp4_delta_rule_cuda")]
    how = {"platforms": ["cuda"], "disabled_checks": unchecked}
    exported = export.export(jax.jit(rule), **how)(*operands)
    assert "nvfp4_delta_rule_cuda" in exported.mlir_module()
