"""Test what a record derives from what it holds, and how it refuses a problem."""

import copy
import pickle

import pytest

from jax_nvfp4_moe.backends._ffi import EXTENSIONS, PARTS
from jax_nvfp4_moe.backends.record import CPU, CUDA, OPEN, Backend, Kernel
from jax_nvfp4_moe.ops.records import RECORDS
from jax_nvfp4_moe.ops.running import find_meaning
from jax_nvfp4_moe.scheme import Problem, Target

GPU = Target("cuda", (9, 0))
OPS = sorted({op for record in RECORDS for op in record.lower} - {"chain_calls"})


def test_targets_platform_and_extension_are_derived():
    lower = {"a": Kernel(print, "one", "two"), "b": Kernel(print, "two"), "c": print}
    record = Backend("record", lower, (CUDA,), part="part")
    assert record.ffi_targets == ("one", "two")
    assert (record.platform, record.extension) == ("cuda", "_nvfp4_cuda.part")
    assert Backend("plain", {"c": print}, (CPU,)).extension == ""


def test_a_kernel_passes_targets_operands_and_options():
    def emit(*given, **options):
        return given, options

    assert Kernel(emit, "one", size=2)(3, scale=4) == (("one", 3), {"size": 2, "scale": 4})


def test_the_extensions_of_all_records_exist():
    found = {record.extension for record in RECORDS if record.ffi_targets}
    assert found == EXTENSIONS.keys() | PARTS.keys()


@pytest.mark.parametrize("op", OPS)
def test_each_op_has_a_definition_that_runs_anywhere(op):
    last = [record for record in RECORDS if op in record.lower][-1]
    assert last.lower[op] is find_meaning(op)
    assert (last.platform, last.ffi_targets, last.limits) == (None, (), {})


@pytest.mark.parametrize("change", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_record_is_the_record(change):
    assert all(change(record) is record for record in RECORDS)


@pytest.mark.parametrize(
    ("sizes", "asked", "reason"),
    [
        ({"taps": 8, "rows": 64}, False, None),
        ({}, False, None),  # a size that is not given is not limited
        ({"taps": 9}, True, "needs taps from 2 to 8 in multiples of 2; got 9"),
        ({"width": 8}, True, "needs width of at least 16 in multiples of 16; got 8"),
        (
            {"width": "a symbol"},
            True,
            "needs width of at least 16 in multiples of 16; got a symbol",
        ),
        ({"rows": 65}, False, "must be named in `backend` except for rows from 0 to 64; got 65"),
        ({"rows": 65}, True, None),
    ],
)
def test_limits_are_named(sizes, asked, reason):
    record = Backend(
        "record",
        {"op": print},
        limits={"taps": range(2, 9, 2), "width": range(16, OPEN, 16)},
        unasked={"rows": range(65)},
    )
    found = record.reason_against(Problem("op", None, GPU, sizes=sizes), asked)
    assert found == reason


def test_weights_of_another_dtype_are_refused():
    weights = {"bfloat16": ("bfloat16", "float32")}
    record = Backend("record", {"op": print}, weight_dtypes=weights)
    for dtype, reason in (
        ("float32", None),
        (None, None),
        ("float16", "needs weights in bfloat16 or float32 with bfloat16, got float16"),
    ):
        problem = Problem("op", None, GPU, weight_dtype=dtype)
        assert record.reason_against(problem) == reason


def test_a_problem_with_sizes_has_a_hash():
    one, other = (Problem("op", None, GPU, sizes=s) for s in ({"taps": 4}, (("taps", 4),)))
    assert one == other
    assert hash(one) == hash(other)
