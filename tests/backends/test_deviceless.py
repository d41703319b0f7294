"""Compile programs that hold our FFI targets with XLA's CUDA compiler, without a GPU.

The tests show that the programs compile for Hopper and Blackwell, take the packed bytes unchanged,
allocate nothing as large as a dequantized matrix, gather nothing, and can be put into a CUDA graph.
No kernel runs.
"""

import pytest
from support.devices.deviceless import read_report, run_program
from support.extensions import cuda_calls

TARGETS = {
    "h100": ("w4a16_sm90", "w4a16_sm80"),
    "b200": ("w4a4_sm100", "w4a16_sm80"),
    "rtx_pro_6000": ("w4a4_sm120", "w4a16_sm80"),
}
CASES = [
    pytest.param(device, suffix, marks=pytest.mark.cutlass if suffix == "w4a4_sm100" else ())
    for device, suffixes in TARGETS.items()
    for suffix in suffixes
]

pytestmark = [pytest.mark.deviceless, pytest.mark.cuda_build, pytest.mark.every_case]


def compile_for(device, program, suffix, flags=""):
    """Run deviceless_compile.py; return its process."""
    return run_program("deviceless_compile.py", device, program, suffix, flags=flags)


def report(device, program, suffix, flags=""):
    """Return the report of deviceless_compile.py for a program that must compile."""
    return read_report(compile_for(device, program, suffix, flags))


@pytest.mark.parametrize(("device", "suffix"), CASES)
def test_layer_compiles_packed(device, suffix):
    found = report(device, "kernel", suffix)
    assert found["custom_calls"] == [f"nvfp4_moe_{suffix}"]
    # Alignment accounts for up to 4 KiB. Half a byte more for each weight would be 48 MiB.
    assert found["packed_bytes"] <= found["argument_bytes"] <= found["packed_bytes"] + 4096
    assert found["temporary_bytes"] < found["dequantized_bytes"]


def test_bound_catches_dequantized_weights():
    found = report("h100", "dequantized", "none")
    assert found["temporary_bytes"] >= found["dequantized_bytes"]


def test_shard_map_gathers_nothing():
    found = report("h100", "shard_map", "w4a16_sm90")
    assert found["all_gathers"] == 0
    assert found["argument_bytes"] <= found["packed_bytes"] + 4096
    assert found["temporary_bytes"] < found["dequantized_bytes"]


def test_bound_catches_a_gather():
    assert report("h100", "unwrapped", "w4a16_sm90")["all_gathers"] > 0


def test_unknown_target_is_named():
    process = compile_for("h100", "kernel", "w4a16_sm70")
    assert process.returncode != 0
    assert "nvfp4_moe_w4a16_sm70" in process.stderr


@pytest.mark.parametrize("allowed", [True, False])
def test_layer_goes_into_a_cuda_graph(tmp_path, allowed):
    kinds = "CUSTOM_CALL" if allowed else "FUSION"
    flags = (
        f"--xla_gpu_enable_command_buffer={kinds} --xla_gpu_graph_min_graph_size=1 "
        f"--xla_dump_to={tmp_path}"
    )
    report("h100", "kernel", "w4a16_sm90", flags)
    assert cuda_calls.graphs_hold_custom_call(tmp_path) == allowed


@pytest.mark.parametrize(
    ("batch", "linears", "most"),
    [(1, "dense", 11), (8, "dense", 14), (64, "dense", 14), (1, "nvfp4", 11), (8, "fp8", 0)],
)
def test_a_decoding_step_is_few_kernels_of_one_cuda_graph(tmp_path, batch, linears, most):
    """A step has 48 layers, and each kernel costs a microsecond or more.

    Five calls a layer are ours: two norms, the heads, the router and the experts. They are seven if
    the linear layers of the attention are NVFP4: queries, keys and values are one call. With FP8
    linears, a chain holds all calls of all layers. With XLA's dot, a layer would be six kernels
    and calls.
    """
    how = {"flags": f"--xla_dump_to={tmp_path}"}
    process = run_program("deviceless_decode.py", "h100", batch, tmp_path, linears, **how)
    found = read_report(process)
    assert found["in_one_graph"]
    assert found["kernels_a_layer"] <= most


@pytest.mark.parametrize(
    ("mixer", "most"), [("qwen3.6", 6), ("kimi-linear", 15), ("nemotron-3-nano", 8)]
)
def test_a_recurrent_mixer_is_products_and_few_kernels(mixer, most):
    """A prefill of 2048 tokens solves no triangular system row by row.

    Between the projections of Qwen3.6 are the convolution, the rates, the delta rule and the norm.
    Kimi-Linear has four more projections, and computes the decays of its channels.
    """
    found = read_report(run_program("deviceless_mixers.py", "h100", mixer, 2048))
    assert found["solves"] == 0
    assert found["kernels"] <= most


@pytest.mark.parametrize(
    ("mixer", "kernels"), [("qwen3.6", 3), ("kimi-linear", 7), ("nemotron-3-nano", 3)]
)
def test_a_recurrent_mixer_decodes_with_one_call_between_its_projections(mixer, kernels):
    """A copy of the state or of the inputs of the convolution would be a further kernel.

    Kimi-Linear has six projections, four of which make its decays and gates.
    """
    assert read_report(run_program("deviceless_mixers.py", "h100", mixer, 1))["kernels"] == kernels


@pytest.mark.parametrize(
    ("mixer", "kernels"), [("qwen3.6", 3), ("kimi-linear", 7), ("nemotron-3-nano", 3)]
)
def test_a_recurrent_mixer_reads_a_window_with_one_call_between_its_projections(mixer, kernels):
    """The kernel reads the kept state and writes those after each token: none is copied."""
    process = run_program("deviceless_mixers.py", "h100", mixer, 4, "window")
    # The others copy `kept`, one number for each row.
    assert read_report(process)["kernels"] <= kernels + 2


@pytest.mark.parametrize("batch", [1, 8])
def test_decoding_with_drafts_is_one_cuda_graph_that_copies_no_cache(tmp_path, batch):
    how = {"flags": f"--xla_dump_to={tmp_path}"}
    process = run_program("deviceless_decode.py", "h100", batch, tmp_path, "nvfp4", "lookup", **how)
    found = read_report(process)
    assert found["in_one_graph"]
    assert found["copied_bytes"] < found["cache_bytes"] / 100


def test_latent_attention_decodes_without_kernels_of_xla():
    """The layer is three projections and four calls, which `chain_calls` can join into one."""
    assert read_report(run_program("deviceless_mixers.py", "h100", "deepseek-v3", 1)) == {
        "kernels": 7,
        "solves": 0,
    }


def test_a_triangular_solver_is_counted():
    found = read_report(run_program("deviceless_mixers.py", "h100", "solver", 2048))
    assert found["solves"] == 1


def test_roundings_are_not_optimized_away():
    """XLA removes the conversions that nothing protects, which the other counts show."""
    found = read_report(run_program("deviceless_roundings.py", "h100"))
    assert (found["float8_rounded"], found["float8_converted"]) == (1, 0)
    assert (found["bfloat16_rounded"], found["bfloat16_converted"]) == (1, 0)
