"""Test the choice of scheme and backend by tables. No test needs a device."""

import dataclasses
import functools
import logging
import re

import jax
import jax.numpy as jnp
import pytest

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.backends import resolution as choice
from jax_nvfp4_moe.backends.resolution import choose_backend, log_scheme
from jax_nvfp4_moe.ops.records import RECORDS
from jax_nvfp4_moe.scheme import Problem, Scheme, Target, choose_scheme
from jax_nvfp4_moe.testing import random_moe_params

CPU = Target("cpu")


def cuda(major, minor):
    return Target("cuda", (major, minor))


SCHEMES = [  # declared, requested, target, chosen: the table of scheme.py
    ("w4a16", None, CPU, "w4a16"),
    ("w4a16", None, cuda(9, 0), "w4a16"),
    ("w4a16", None, cuda(10, 0), "w4a16"),
    ("w4a16", None, cuda(12, 0), "w4a16"),
    ("w4a4", None, cuda(10, 0), "w4a4"),
    ("w4a4", None, cuda(10, 3), "w4a4"),
    ("w4a4", None, cuda(12, 0), "w4a4"),
    ("w4a4", None, cuda(12, 1), "w4a4"),
    ("w4a4", None, cuda(8, 0), "w4a16"),
    ("w4a4", None, cuda(8, 9), "w4a16"),
    ("w4a4", None, cuda(9, 0), "w4a16"),
    ("w4a4", None, cuda(11, 0), "w4a16"),
    ("w4a4", None, CPU, "w4a16"),
    ("w4a4", "checkpoint", CPU, "w4a4"),
    ("w4a4", "checkpoint", cuda(9, 0), "w4a4"),
    ("w4a16", "checkpoint", cuda(10, 0), "w4a16"),
    ("w4a4", "w4a16", cuda(10, 0), "w4a16"),
    ("w4a4", "w4a4", cuda(8, 0), "w4a4"),
    ("w4a16", "w4a16", cuda(12, 0), "w4a16"),
    ("w4a16", "w4a4_unit_scale", cuda(12, 0), "w4a4_unit_scale"),
    ("w4a4", "w4a4_unit_scale", CPU, "w4a4_unit_scale"),
    ("w4a16", "w4a4_token_scale", cuda(9, 0), "w4a4_token_scale"),
]


@pytest.mark.parametrize(
    ("checkpoint_scheme", "requested_scheme", "target", "want"), SCHEMES, ids=str
)
def test_choose_scheme(checkpoint_scheme, requested_scheme, target, want):
    scheme, why = choose_scheme(checkpoint_scheme, requested_scheme, target)
    assert scheme == want
    assert why


@pytest.mark.parametrize("target", [CPU, cuda(9, 0), cuda(10, 0)], ids=str)
def test_weights_only_cannot_be_w4a4(target):
    with pytest.raises(ValueError, match=r"no|weights only") as caught:
        choose_scheme("w4a16", "w4a4", target)
    for word in ("quantize", "w4a4_unit_scale", "w4a4_token_scale"):
        assert word in str(caught.value)


def test_an_unknown_scheme_is_named():
    with pytest.raises(ValueError, match=r"scheme: expected None, 'checkpoint' or one of .*'w4a8'"):
        choose_scheme("w4a4", "w4a8", CPU)


def test_strings_are_schemes():
    assert Scheme("w4a16") is Scheme.W4A16
    assert Scheme.W4A4 == "w4a4"


BACKEND_OF = [  # scheme, target, backend
    ("w4a16", CPU, "moe_w4a16_cpu"),
    ("w4a4", CPU, "moe_w4a16_cpu"),
    ("w4a4_token_scale", CPU, "moe_w4a16_cpu"),
    ("w4a16", cuda(8, 0), "moe_w4a16_sm80"),
    ("w4a16", cuda(8, 9), "moe_w4a16_sm80"),
    ("w4a4", cuda(8, 6), "moe_w4a16_sm80"),
    ("w4a16", cuda(9, 0), "moe_w4a16_sm90"),
    ("w4a4", cuda(9, 0), "moe_w4a16_sm90"),
    ("w4a16", cuda(10, 0), "moe_w4a16_sm80"),
    ("w4a16", cuda(11, 0), "moe_w4a16_sm80"),
    ("w4a16", cuda(12, 1), "moe_w4a16_sm80"),
    ("w4a4", cuda(10, 0), "moe_w4a4_sm100"),
    ("w4a4", cuda(10, 3), "moe_w4a4_sm100"),
    ("w4a4_unit_scale", cuda(10, 0), "moe_w4a4_sm100"),
    ("w4a4", cuda(12, 0), "moe_w4a4_sm120"),
    ("w4a4", cuda(12, 1), "moe_w4a4_sm120"),
    ("w4a4_token_scale", cuda(12, 0), "moe_w4a4_sm120"),
    ("w4a4", cuda(11, 0), "moe_w4a16_sm80"),
    ("w4a16", cuda(7, 5), "reference"),
]


@pytest.mark.parametrize("op", ["moe_mlp", "grouped_gemm"])
@pytest.mark.parametrize(("scheme", "target", "want"), BACKEND_OF, ids=str)
def test_choose_backend(scheme, target, want, op):
    problem = Problem(op, Scheme(scheme), target, num_experts=512, top_k=32)
    assert choose_backend(problem, RECORDS).name == want


@pytest.mark.parametrize("op", ["moe_mlp", "grouped_gemm"])
def test_float32_on_12_x_takes_16_bit_engines(op):
    problem = Problem(op, Scheme.W4A4, cuda(12, 0), "float32")
    assert choose_backend(problem, RECORDS).name == "moe_w4a16_sm80"
    with pytest.raises(nvfp4.NoBackendError, match="needs bfloat16 or float16, got float32"):
        choose_backend(problem, RECORDS, ("moe_w4a4_sm120",))


@pytest.mark.parametrize("target", [CPU, *(cuda(*c) for c in [(8, 0), (9, 0), (10, 0), (12, 1)])])
def test_quantizers_are_found(target):
    want = "quantize_cpu" if target == CPU else "quantize_cuda"
    assert choose_backend(Problem("quantize_nvfp4", None, target), RECORDS).name == want


@pytest.mark.parametrize(
    ("target", "widths", "want", "why"),
    [
        (cuda(8, 0), (128, 128), "recurrent_cuda", None),
        (cuda(12, 1), (16, 8), "recurrent_cuda", None),
        (cuda(9, 0), (256, 128), "reference", "multiples of 4; got 256"),
        (cuda(9, 0), (16, 6), "reference", "multiples of 4; got 6"),
        (cuda(7, 5), (128, 128), "reference", "got cuda 7.5"),
        (CPU, (128, 128), "reference", "needs cuda, got cpu"),
    ],
)
@pytest.mark.parametrize("op", ["gated_delta_step", "kimi_delta_step", "mamba2_step"])
def test_recurrent_steps_are_found(op, target, widths, want, why):
    names = ("head width", "state width") if op == "mamba2_step" else ("key width", "value width")
    problem = Problem(op, None, target, sizes=dict(zip(names, widths, strict=True)))
    assert choose_backend(problem, RECORDS).name == want
    if why is not None:
        with pytest.raises(nvfp4.NoBackendError, match=why):
            choose_backend(problem, RECORDS, ("recurrent_cuda",))


@pytest.mark.parametrize(
    ("target", "dtype", "widths", "found", "why"),
    [
        (cuda(8, 6), "bfloat16", (128, 128), True, None),
        (cuda(12, 1), "bfloat16", (16, 8), True, None),
        (cuda(9, 0), "float16", (128, 128), False, "needs bfloat16, got float16"),
        (cuda(9, 0), "float32", (128, 128), False, "needs bfloat16, got float32"),
        (cuda(9, 0), "bfloat16", (130, 128), False, "multiples of 4; got 130"),
        (cuda(7, 5), "bfloat16", (128, 128), False, "got cuda 7.5"),
        (CPU, "bfloat16", (128, 128), False, "needs cuda, got cpu"),
    ],
)
@pytest.mark.parametrize(
    ("op", "kernel"),
    [("gated_delta_rule", "delta_rule_cuda"), ("mamba2_scan", "mamba2_scan_cuda")],
)
def test_recurrences_over_prompts_are_found(op, kernel, target, dtype, widths, found, why):
    names = ("head width", "state width") if op == "mamba2_scan" else ("key width", "value width")
    problem = Problem(op, None, target, dtype, sizes=dict(zip(names, widths, strict=True)))
    assert choose_backend(problem, RECORDS).name == (kernel if found else "reference")
    if not found:
        with pytest.raises(nvfp4.NoBackendError, match=why):
            choose_backend(problem, RECORDS, (kernel,))


@pytest.mark.parametrize(
    ("target", "dtype", "numbers", "want", "why"),
    [
        (cuda(8, 0), "bfloat16", (4, 12352, 0, 8192, 2048), "convolution_cuda", None),
        (cuda(12, 1), "float16", (8, 64, 4, 20, 20), "convolution_cuda", None),
        (cuda(9, 0), "float32", (4, 64, 0, 64, 64), "reference", "16, got float32"),
        (cuda(9, 0), "bfloat16", (9, 64, 0, 64, 64), "reference", "needs taps from 2 to 8; got 9"),
        (cuda(9, 0), "bfloat16", (1, 64, 0, 64, 64), "reference", "needs taps from 2 to 8; got 1"),
        (cuda(9, 0), "bfloat16", (4, 64, 2, 60, 60), "reference", "first column from 0 to .*got 2"),
        (cuda(7, 5), "bfloat16", (4, 64, 0, 64, 64), "reference", "got cuda 7.5"),
        (CPU, "bfloat16", (4, 64, 0, 64, 64), "reference", "needs cuda, got cpu"),
    ],
)
def test_convolutions_are_found(target, dtype, numbers, want, why):
    names = "taps", "columns", "first column", "stride", "width of part 0"
    sizes = dict(zip(names, numbers, strict=True))
    problem = Problem("causal_convolution", None, target, dtype, sizes=sizes)
    assert choose_backend(problem, RECORDS).name == want
    if why is not None:
        with pytest.raises(nvfp4.NoBackendError, match=why):
            choose_backend(problem, RECORDS, ("convolution_cuda",))


@pytest.mark.parametrize(
    ("target", "experts", "want"),
    [
        (CPU, 8, "reference"),
        (cuda(7, 5), 8, "reference"),
        (cuda(8, 0), 1024, "route_cuda"),
        (cuda(9, 0), 2048, "reference"),
        (cuda(12, 1), 8, "route_cuda"),
    ],
)
def test_routers_are_found(target, experts, want):
    problem = Problem("route", None, target, "float32", num_experts=experts)
    assert choose_backend(problem, RECORDS).name == want


@pytest.mark.parametrize(
    ("target", "dtype", "widths", "want", "why"),
    [
        (cuda(8, 0), "bfloat16", (128, 128), "attention_cuda", None),
        (cuda(12, 0), "float16", (192, 128), "attention_cuda", None),
        (cuda(9, 0), "float32", (128, 128), "reference", "needs bfloat16 or float16, got float32"),
        (cuda(9, 0), "bfloat16", (576, 576), "reference", "key width .* 256 .*got 576"),
        (cuda(9, 0), "bfloat16", (128, 20), "reference", "value width .*got 20"),
        (cuda(7, 5), "bfloat16", (128, 128), "reference", "got cuda 7.5"),
        (CPU, "bfloat16", (128, 128), "attention_amx", "needs cuda, got cpu"),
        (CPU, "float32", (128, 128), "attention_cpu", None),
    ],
)
def test_attention_is_found(target, dtype, widths, want, why):
    sizes = dict(zip(("key width", "value width"), widths, strict=True))
    problem = Problem("attention", None, target, dtype, sizes=sizes)
    assert choose_backend(problem, RECORDS).name == want
    if why is not None:
        with pytest.raises(nvfp4.NoBackendError, match=why):
            choose_backend(problem, RECORDS, ("attention_cuda",))


def test_attention_on_another_cpu():
    """Without the instructions of the best kernel there is another, and a reason."""
    reasons = {isa: f"which needs {isa}" for isa in ("amx", "avx512")}
    missing = [(f"_nvfp4_cpu.attention_{isa}", why) for isa, why in reasons.items()]
    for lacking, best in ((missing[:1], "attention_avx512"), (missing, "attention_cpu")):
        problem = Problem("attention", None, CPU, "bfloat16", unavailable=tuple(lacking))
        assert choose_backend(problem, RECORDS).name == best
    for isa, why in reasons.items():
        with pytest.raises(nvfp4.NoBackendError, match=f"attention_{isa}: {why}"):
            choose_backend(problem, RECORDS, (f"attention_{isa}",))


@pytest.mark.parametrize(
    ("target", "dtype", "widths", "want", "why"),
    [
        (cuda(8, 0), "bfloat16", (576, 512), "latent_attention_cuda", None),
        (cuda(12, 0), "float16", (48, 32), "latent_attention_cuda", None),
        (cuda(9, 0), "float32", (576, 512), "reference", "needs bfloat16 or float16, got float32"),
        (cuda(9, 0), "bfloat16", (576, 528), "reference", "value width .* 512 .*got 528"),
        (cuda(9, 0), "bfloat16", (592, 512), "reference", "key width .* 576 .*got 592"),
        (cuda(9, 0), "bfloat16", (44, 32), "reference", "got 44"),
        (cuda(7, 5), "bfloat16", (576, 512), "reference", "got cuda 7.5"),
        (CPU, "bfloat16", (576, 512), "attention_amx", "needs cuda, got cpu"),
        (CPU, "float32", (576, 512), "attention_cpu", None),
    ],
)
def test_latent_attention_is_found(target, dtype, widths, want, why):
    sizes = dict(zip(("key width", "value width"), widths, strict=True))
    problem = Problem("latent_attention", None, target, dtype, sizes=sizes)
    assert choose_backend(problem, RECORDS).name == want
    if why is not None:
        with pytest.raises(nvfp4.NoBackendError, match=why):
            choose_backend(problem, RECORDS, ("latent_attention_cuda",))


@pytest.mark.parametrize(
    ("target", "rows", "dtypes", "want"),
    [
        (cuda(9, 0), 1, ("bfloat16", "bfloat16"), "dense_cuda"),
        (cuda(9, 0), 64, ("bfloat16", "float32"), "dense_cuda"),
        (cuda(9, 0), 65, ("bfloat16", "float32"), "xla_in_parts"),
        (cuda(9, 0), 65, ("bfloat16", "bfloat16"), "xla"),
        (cuda(9, 0), 1, ("float32", "float32"), "xla_sum"),
        (cuda(9, 0), 2, ("float16", "bfloat16"), "xla"),
        (cuda(7, 5), 1, ("bfloat16", "bfloat16"), "xla_sum"),
        (CPU, 8, ("bfloat16", "bfloat16"), "dense_cpu"),
        (CPU, 9, ("bfloat16", "bfloat16"), "xla_cpu"),
        (CPU, 0, ("bfloat16", "bfloat16"), "xla"),
        (CPU, 1, ("float32", "float32"), "xla"),
        (Target("tpu"), 1, ("bfloat16", "bfloat16"), "xla"),
    ],
)
def test_forms_of_dense_products_are_found(target, rows, dtypes, want):
    sizes = {"rows": rows, "inputs": 64, "outputs": 32}
    facts = {"weight_dtype": dtypes[1], "sizes": sizes}
    problem = Problem("dense", None, target, dtypes[0], **facts)
    assert choose_backend(problem, RECORDS).name == want


@pytest.mark.parametrize(
    ("op", "target", "rows", "want"),
    [
        ("absorb_queries", cuda(9, 0), 8, "head_products_cuda"),
        ("absorb_queries", cuda(9, 0), 9, "xla"),
        ("expand_values", cuda(9, 0), 0, "xla"),
        ("expand_values", CPU, 1, "xla"),
        ("read_rows", CPU, 1, "moves_cpu"),
        ("write_tokens", cuda(9, 0), 1, "xla"),
        ("activate", cuda(9, 0), 64, "gating_cuda"),
        ("activate", cuda(9, 0), 65, "reference"),
    ],
)
def test_few_rows_take_a_kernel(op, target, rows, want):
    problem = Problem(op, None, target, weight_dtype="bfloat16", sizes={"rows": rows})
    assert choose_backend(problem, RECORDS).name == want


def test_a_kernel_that_is_asked_for_takes_more_rows():
    problem = Problem("activate", None, cuda(9, 0), sizes={"rows": 65})
    assert choose_backend(problem, RECORDS, ("gating_cuda",)).name == "gating_cuda"
    found = nvfp4.explain(problem).reasons["gating_cuda"]
    assert found == "must be named in `backend` except for rows from 0 to 64; got 65"


def test_the_reference_of_a_router_is_nothing_to_warn_of(caplog):
    choice._log_backend.cache_clear()
    with caplog.at_level(logging.INFO, logger="jax_nvfp4_moe"):
        choice.resolve(Problem("route", None, CPU, "float32"), RECORDS)
        choice.resolve(Problem("quantize_nvfp4", None, cuda(7, 5)), RECORDS)
    said = {r.levelname: r.message for r in caplog.records}
    assert said["INFO"].startswith("backend reference for route")
    assert said["WARNING"].startswith("quantize_nvfp4")


def test_the_error_carries_every_reason():
    problem = Problem("moe_mlp", Scheme.W4A4, cuda(9, 0))
    with pytest.raises(nvfp4.NoBackendError) as caught:
        choose_backend(problem, RECORDS, ("moe_w4a4_sm100",))
    text = str(caught.value)
    assert "moe_w4a4_sm100: needs compute capability in [10.0, 11.0), got cuda 9.0" in text
    assert "moe_w4a16_sm90: could run it" in text
    assert "moe_w4a16_cpu: needs cpu, got cuda 9.0" in text
    named = {backend.name for backend in RECORDS if f"  {backend.name}: " in text}
    assert named == {backend.name for backend in RECORDS if "moe_mlp" in backend.lower}


def test_an_extension_that_is_missing_is_a_reason_and_the_reference_still_runs():
    reason = "the extension _nvfp4_cpu is not usable here: reinstall"
    problem = Problem("moe_mlp", Scheme.W4A16, CPU, unavailable=(("_nvfp4_cpu", reason),))
    assert choose_backend(problem, RECORDS).name == "reference"
    with pytest.raises(nvfp4.NoBackendError, match="_nvfp4_cpu is not usable here"):
        choose_backend(problem, RECORDS, ("moe_w4a16_cpu",))


def test_a_part_that_is_missing_is_a_reason():
    lacking = (("_nvfp4_cuda.w4a4_sm100", "built without CUTLASS's headers"),)
    problem = Problem("moe_mlp", Scheme.W4A4, cuda(10, 0), unavailable=lacking)
    with pytest.raises(nvfp4.NoBackendError, match="moe_w4a4_sm100: built without CUTLASS's"):
        choose_backend(problem, RECORDS, ("moe_w4a4_sm100",))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_fp4_tensor_cores_of_10_take_bfloat16(dtype):
    problem = Problem("moe_mlp", Scheme.W4A4, cuda(10, 0), dtype)
    with pytest.raises(nvfp4.NoBackendError, match=f"needs bfloat16, got {dtype}"):
        choose_backend(problem, RECORDS, ("moe_w4a4_sm100",))


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match=r"backend: expected one of .*'reference'.*got 'marlin'"):
        choose_backend(Problem("moe_mlp", Scheme.W4A16, CPU), RECORDS, ("marlin",))


def test_sizes_over_a_kernels_limit_go_to_the_reference():
    many = Problem("moe_mlp", Scheme.W4A16, cuda(9, 0), num_experts=1024)
    assert choose_backend(many, RECORDS).name == "reference"
    assert choose_backend(dataclasses.replace(many, num_experts=8, top_k=33), RECORDS).name == (
        "reference"
    )


def test_targets_check_themselves():
    with pytest.raises(ValueError, match="platform: expected a name such as 'cpu', got ''"):
        Target("")
    with pytest.raises(ValueError, match=r"compute_capability: .* with platform 'cuda' and None"):
        Target("tpu", (9, 0))
    with pytest.raises(ValueError, match=r"compute_capability: expected a pair such as \(9, 0\)"):
        Target("cuda")
    assert str(cuda(9, 0)) == "cuda 9.0"


LOWERED = [(s, t, b) for s, t, b in BACKEND_OF if t.platform == "cuda" and b != "reference"]


@pytest.mark.parametrize(("scheme", "target", "backend"), LOWERED, ids=str)
def test_any_gpu_lowers_without_one(scheme, target, backend):
    """The program for each architecture calls that architecture's kernel and no other kernel."""
    params = random_moe_params(jax.random.key(0), num_experts=4, hidden=64, intermediate=32)
    x, ids = jnp.zeros((8, 64), jnp.bfloat16), jnp.zeros((8, 2), jnp.int32)
    op = functools.partial(nvfp4.ops.moe_mlp, scheme=scheme, target=target)
    traced = jax.jit(op).trace(x, params, ids, jnp.ones((8, 2)))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"custom_call @(\S+?)\(", text) == [f"nvfp4_{backend}"]
    assert "tensor<4x64x32xui8>" in text  # the packed bytes of gate_up are passed unchanged
    product = functools.partial(nvfp4.ops.linear, scheme=scheme, target=target)
    weight = nvfp4.quantize(jnp.ones((32, 64)))
    traced = jax.jit(product).trace(x, weight, input_scale=jnp.float32(0.1))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    stem = backend.removeprefix("moe_")
    assert re.findall(r"custom_call @(\S+?)\(", text) == [f"nvfp4_grouped_gemm_{stem}"]


def test_explain_prints_the_choice_for_each_device():
    for target, backend in [(CPU, "moe_w4a16_cpu"), (cuda(8, 9), "moe_w4a16_sm80")]:
        choice = nvfp4.explain(Problem("moe_mlp", Scheme.W4A16, target))
        text = str(choice)
        if target != CPU:  # the CPU extension may be missing in this process
            assert choice.backend == backend
        assert "scheme   w4a16" in text
        assert "not moe_w4a4_sm100: needs c" in text
        able = {b.name for b in RECORDS if "moe_mlp" in b.lower} - choice.reasons.keys()
        assert able - {"reference"} <= {choice.backend}


def test_a_kernel_that_needs_more_shared_memory_than_a_block_may_have_is_refused():
    problem = Problem("moe_mlp", Scheme.W4A16, cuda(8, 9))
    needy = dataclasses.replace(RECORDS[3], shared_bytes=101377)
    reason = "needs 101377 bytes of shared memory per thread block, and cuda 8.9 has 101376"
    assert needy.reason_against(problem) == reason
    backends = (needy, *RECORDS[4:])
    assert choose_backend(problem, backends).name == "reference"
    larger = dataclasses.replace(problem, target=cuda(8, 0))
    assert choose_backend(larger, backends).name == "moe_w4a16_sm80"


def test_a_gpu_that_is_not_in_the_table_counts_as_the_smallest():
    assert cuda(12, 9).shared_bytes == cuda(8, 6).shared_bytes == 99 << 10
    assert CPU.shared_bytes == 0


LAYER = {"num_experts": 4, "top_k": 2, "hidden": 64, "activation": "silu"}


@pytest.mark.parametrize("scheme", [Scheme.W4A16, Scheme.W4A4])
def test_explain_says_where_few_tokens_are_sorted_for_want_of_shared_memory(scheme):
    """In the second GEMM, a slot takes 2832 + 72 bytes, besides 64960 bytes per block."""
    problem = Problem("moe_mlp", scheme, cuda(8, 9), intermediate=1408, **LAYER)
    text = str(nvfp4.explain(problem))
    assert "note: calls with more than 6 tokens sort the tokens by expert first" in text
    assert "105616 bytes of shared memory for 7 tokens; cuda 8.9 has 101376" in text
    assert "note:" not in str(nvfp4.explain(problem, target=cuda(9, 0)))
    narrow = dataclasses.replace(problem, intermediate=192)
    assert "note:" not in str(nvfp4.explain(narrow))


@pytest.mark.parametrize("op", ["moe_mlp", "grouped_gemm"])
def test_explain_says_where_the_plain_kernels_run(op):
    problem = Problem(op, Scheme.W4A16, cuda(9, 0), intermediate=2**18, **LAYER)
    assert "plain" not in str(nvfp4.explain(problem))
    wide = dataclasses.replace(problem, intermediate=2**18 + 16)
    assert "up to 262144 rows and columns, got 262160" in str(nvfp4.explain(wide))
    single = dataclasses.replace(problem, dtype="float32")
    assert "note: float32 runs the plain kernels" in str(nvfp4.explain(single))


def test_matrices_over_the_limit_of_an_engine_go_to_the_next_backend():
    wide = Problem("grouped_gemm", Scheme.W4A4, cuda(12, 0), intermediate=2**18 + 16)
    choice = nvfp4.explain(wide)
    assert choice.backend == "moe_w4a16_sm80"
    assert "at most 262144 rows and columns, got 262160" in choice.reasons["moe_w4a4_sm120"]


def test_explain_refuses_what_it_cannot_explain():
    with pytest.raises(ValueError, match=r"subject: expected a Problem, .*got int"):
        nvfp4.explain(3)


def test_a_choice_is_said_once(caplog):
    log_scheme.cache_clear()
    params = random_moe_params(jax.random.key(0), num_experts=2, hidden=16, intermediate=16)
    x, ids = jnp.zeros((1, 16)), jnp.zeros((1, 1), jnp.int32)
    with caplog.at_level(logging.INFO, logger="jax_nvfp4_moe"):
        for _ in range(2):
            nvfp4.ops.moe_mlp(x, params, ids, jnp.ones((1, 1)), target=CPU, backend="reference")
    said = [r.message for r in caplog.records if r.message.startswith("scheme w4a16")]
    assert len(said) == 1
    assert "no FP4 tensor cores" in said[0]


class OtherDevice:
    """A device of another vendor, as `jax.devices()` lists it."""

    def __init__(self, platform, **facts):
        self.platform = platform
        vars(self).update(facts)


@pytest.mark.parametrize(
    ("device", "platform"),
    [
        (OtherDevice("tpu"), "tpu"),
        (OtherDevice("METAL"), "metal"),
        (OtherDevice("gpu", compute_capability="gfx942"), "rocm"),
        (OtherDevice("rocm", compute_capability="gfx942"), "rocm"),
    ],
)
@pytest.mark.parametrize("op", ["moe_mlp", "grouped_gemm", "quantize_nvfp4", "route"])
def test_any_other_device_runs_the_reference(device, platform, op):
    target = Target.of(device)
    assert target == Target(platform)
    assert not target.has_fp4_tensor_cores
    scheme = Scheme.W4A16 if op in ("moe_mlp", "grouped_gemm") else None
    chosen = nvfp4.explain(Problem(op, scheme, target))
    assert chosen.backend == "reference"
    assert f"got {platform}" in str(chosen)
    assert choose_scheme("w4a4", None, target)[0] is Scheme.W4A16
