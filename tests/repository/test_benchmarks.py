"""Test the arithmetic of the benchmarks, and that their programs run on small sizes."""

import collections
import contextlib
import dataclasses
import gc
import hashlib
import importlib
import io
import json
import pathlib
import runpy
import subprocess
import sys
import types

import blackwell
import compilations
import cpu_model
import decode
import jax
import jax.numpy as jnp
import layer
import linear_forms
import model_peers
import model_sizes
import moe
import moe_cases
import numpy as np
import prefill
import pytest
import quantize
import train
import whole_model
from flax import nnx
from moe_cases import CASES, Ceilings
from provenance import write_page
from rich.console import Console
from support.devices.host_devices import make_mesh
from support.devices.young_objects import collects_new_objects_alone
from support.files.given import user_environment

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.cli.timing import time_program
from jax_nvfp4_moe.models.loading import find_architecture
from jax_nvfp4_moe.nn.building.builder import Builder
from jax_nvfp4_moe.nn.building.settings import Settings
from jax_nvfp4_moe.scheme import Target

HERE = pathlib.Path(moe.__file__).parent
H200 = Ceilings(copy_tb_per_s=4.24, matmul_tflop_per_s=797.0)


@pytest.mark.parametrize(
    ("case", "tokens", "active", "floor"),
    [
        # Computed by hand: 8 experts of 3 * 2048 * 768 weights at 9/16 byte, and 8 KiB of tokens.
        ("qwen3-30b-a3b", 1, 8, (8 * 4718592 * 0.5625 + 8192) / 4.24e6),
        # 6 experts without a gate, each 2 * 2688 * 1856 weights, and 10752 bytes of tokens.
        ("nemotron3-nano", 1, 6, (6 * 2 * 2688 * 1856 * 0.5625 + 10752) / 4.24e6),
        # 1024 tokens with 8 experts each: arithmetic takes longer than memory traffic.
        ("qwen3-30b-a3b", 1024, 128, 2 * 1024 * 8 * 4718592 / 797e6),
    ],
)
def test_floor(case, tokens, active, floor):
    assert moe_cases.floor_us(CASES[case], tokens, active, H200) == pytest.approx(floor)


def test_forms_of_linears_are_compared_with_the_time_to_read_weights(tmp_path):
    """The floor is computed by hand: 4 million weights at 9/16 byte, at 2 TB/s."""
    program = tmp_path / "program"
    lines = ("2.000", "$1 $2 $3 2.250 linear_few", "4 $2 $3 4.5 sm90, teams 2")
    program.write_text("#!/bin/sh\n" + "".join(f'echo "{line}"\n' for line in lines))
    program.chmod(0o755)
    bandwidth, table = linear_forms.measure(program, [(1, 2000, 2000)])
    assert bandwidth == 2.0
    assert [(row["rows"], row["n"], row["k"], row["form"]) for row in table] == [
        (1, 2000, 2000, "linear_few"),
        (4, 2000, 2000, "sm90, teams 2"),
    ]
    assert [row["floor_us"] for row in table] == [1.125, 1.125]
    assert [row["over_floor"] for row in table] == [2.0, 4.0]


@pytest.mark.parametrize("tokens", [1, 16, 512, 8192])
def test_routing_is_distinct_and_the_same_for_all(tokens):
    case = CASES["qwen3-30b-a3b"]
    ids = moe_cases.draw_ids(case, tokens)
    assert ids.shape == (moe_cases.calls_of(tokens), tokens, case.top_k)
    assert ids.dtype == np.int32
    assert ids.min() >= 0
    assert ids.max() < case.experts
    assert (np.diff(np.sort(ids), axis=-1) > 0).all()
    np.testing.assert_array_equal(ids, moe_cases.draw_ids(case, tokens))


def test_calls_differ_and_active_experts_are_counted():
    ids = moe_cases.draw_ids(CASES["qwen3-30b-a3b"], 1)
    assert len({call.tobytes() for call in ids}) > 1
    assert moe_cases.count_active(ids) == 8
    assert moe_cases.count_active(np.array([[[0, 1]], [[2, 2]]])) == 1.5


def test_a_step_on_a_cpu_reads_what_its_tokens_touch():
    sizes = cpu_model.SyntheticSizes(
        layers=3,
        num_experts=4,
        top_k=2,
        hidden=64,
        intermediate=32,
        vocab=100,
        heads=2,
        kv_heads=1,
        head_dim=16,
    )
    # Queries and outputs [32, 64], keys and values [16, 64], a router [4, 64] and a head [100, 64].
    linears, router, head = 2 * (32 + 16) * 64, 2 * 4 * 64, 2 * 100 * 64
    for batch, touched in ((1, 2), (2, 3)):  # the second token finds half of its experts read
        layer = (touched * 3 * 64 * 32 + linears) * 9 / 16 + router
        assert cpu_model.step_bytes(sizes, batch) == 3 * layer + head
    seconds = {"prefill": {512: [2.0, 1.0]}, "decode": {1: [0.002, 0.001]}}
    peer = {"prefill": {"512": [4.0]}, "decode": {}}
    prefill, step = cpu_model.make_rows(seconds, peer, sizes, 1.0)
    assert (prefill["tokens_per_s"], prefill["times_llama"]) == (512, 4)
    assert "times_llama" not in step
    assert step["over_floor"] == pytest.approx(0.001 / (cpu_model.step_bytes(sizes, 1) / 1e9))


def test_targets_name_cells_that_are_timed():
    assert moe_cases.TARGETS.keys() == set(moe_cases.REAL_CASES)
    assert all(set(cells) <= set(moe_cases.TOKENS) for cells in moe_cases.TARGETS.values())


def timed(contestant, tokens, us):
    line = {"contestant": contestant, "case": "qwen3-30b-a3b", "tokens": tokens, "us": us}
    return moe.describe(line | {"low": us, "high": us, "host_share": 0.1}, H200)


def result():
    rows = [
        timed("moe_w4a16_sm90", 1, 15.0),
        timed("moe_w4a16_sm90", 16, 80.0),
        timed("marlin", 1, 30.0),
        timed("marlin", 16, 60.0),
    ]
    ceilings = {"copy_tb_per_s": 4.24, "matmul_tflop_per_s": 797.0}
    return {"device": "H200", "commit": "0", "ceilings": ceilings, "rows": rows, "errors": []}


def test_rows_carry_rates_and_the_fraction_of_the_floor():
    row = timed("moe_w4a16_sm90", 1, 10.0)
    assert row["tb_per_s"] == pytest.approx(8 * 4718592 * 0.5625 / 10e6)
    assert row["tflop_per_s"] == pytest.approx(2 * 8 * 4718592 / 10e6)
    assert row["of_floor"] == pytest.approx(row["floor_us"] / 10)


def test_targets_and_peers_are_compared():
    rows = result()["rows"]
    checked = moe.check_targets(rows, "moe_w4a16_sm90")
    assert checked == [("qwen3-30b-a3b", 1, 15.0, 16), ("qwen3-30b-a3b", 16, 80.0, 68)]
    assert moe.slower_than_peers(rows, "moe_w4a16_sm90") == [("qwen3-30b-a3b", 16, "marlin", 0.75)]


def test_table_shows_ratios_and_says_what_is_missing():
    console = Console(width=160, record=True, file=io.StringIO())
    moe.show(result(), console, targets=True)
    text = console.export_text()
    for wanted in ("marlin us", "2.00", "0.75", "pass", "miss by 18%", "1 of 2 targets met"):
        assert wanted in text
    assert "no column for humming" in text
    assert "no column for marlin" not in text


def test_random_weights_keep_values_near_one():
    case = CASES["tiny"]
    params = layer.random_params(case)
    assert params.gate_up.shape == (case.experts, case.gate_up_rows, case.hidden)
    assert params.down.shape == (case.experts, case.hidden, case.intermediate)
    spread = np.asarray(params.gate_up.dequantize()).std() * case.hidden**0.5
    assert 0.8 < spread < 1.25


def test_quantizer_reads_values_again_to_find_their_scale():
    assert quantize.moved_bytes(3, 64, "bfloat16", given=True) == 3 * (128 + 32 + 4)
    assert quantize.moved_bytes(3, 64, "bfloat16", given=False) == 3 * (256 + 32 + 4)


def test_time_program_counts_in_microseconds():
    figures = time_program(lambda x: x + 1, jnp.zeros(8))
    assert 0 < figures["us"] < 1e5
    assert figures["low"] <= figures["us"] <= figures["high"]


def test_kernels_are_told_apart():
    assert decode.kind_of("void nvfp4::(anonymous namespace)::ExpertGemm<2>(Args)") == "ours"
    assert decode.kind_of("_ZN5nvfp412_GLOBAL__N_110ExpertGemmE") == "ours"
    assert decode.kind_of("MemcpyD2H") == "copy"
    assert decode.kind_of("gemm_fusion_dot_40") == "matmul"
    assert decode.kind_of("loop_add_fusion_1") == "other"


def test_a_step_is_described_by_its_profile():
    counts = collections.Counter(nvfp4=4, MemcpyD2H=4)
    step = decode.describe_device(counts, collections.Counter(nvfp4=6000, MemcpyD2H=2000))
    assert step["busy_us"] == pytest.approx(8.0)
    assert step["outside_our_kernels"] == pytest.approx(0.25)
    assert step["copies_to_host"] == 4
    assert step["launches"] == 8


@pytest.fixture(scope="module")
def tiny():
    """Return the smallest whole model, and the same with its weights."""
    whole = whole_model.MODELS["tiny"]
    return whole, whole_model.build_model(whole, "nvfp4")


def test_a_dense_model_reads_its_mlps_and_no_experts():
    whole = whole_model.MODELS["tiny-dense"]
    built = whole_model.build_model(whole, "nvfp4")
    # Computed by hand: queries and outputs, keys and values, three matrices of the MLP. Joined
    # matrices have a global scale for each row, at most.
    weights, rows = 2 * 256 * 256 + 2 * 128 * 256 + 3 * 256 * 256, 2 * 256 + 2 * 128 + 3 * 256
    assert built.linear_weights == weights
    head_and_norms = 64 * 256 * 2 + 3 * 256 * 2
    assert 0 <= built.read_bytes - weights * 9 / 16 - head_and_norms <= 4 * rows
    floor = whole_model.step_floor(whole, built, 3, 10, H200)
    assert floor["experts"] == 0
    assert floor["dense"] == pytest.approx(built.read_bytes / 4.24e6)
    assert whole_model.prefill_floor(whole, built, 1, 2048, H200)["experts"] == 0


@pytest.mark.eight_devices
def test_random_weights_do_not_depend_on_the_mesh():
    """Each value is made whole from its own seed, and then sharded."""
    whole = whole_model.MODELS["tiny"]
    # Along `tensor`, each shard needs whole blocks of 16 of the intermediate channels.
    case = dataclasses.replace(whole.case, intermediate=64)
    config = {**whole.config, "moe_intermediate_size": 64}
    whole = dataclasses.replace(whole, case=case, config=config)
    alone = whole_model.build_model(whole, "nvfp4").model
    for shape in ((2, 1), (1, 2)):
        model = whole_model.build_model(whole, "nvfp4", mesh=make_mesh(shape)).model
        (module,), (whole_module,) = map(whole_model.expert_modules, (model, alone))
        packed = module.params.get_value().down.packed
        assert packed.addressable_shards[0].data.size == packed.size / 2
        np.testing.assert_array_equal(model.embedding.get_value(), alone.embedding.get_value())
        # Each shard along `tensor` has its rows and columns in an order of its own.
        own, other = (np.asarray(m.params.get_value().down.packed) for m in (module, whole_module))
        np.testing.assert_array_equal(*(np.sort(x, axis=None) for x in (own, other)))


def test_step_floor_adds_what_a_step_reads(tiny):
    whole, built = tiny
    # Computed by hand: NVFP4 projections with 129 global scales, head, float32 router, norms.
    projections, head, router, norms = 12288 * 0.5625 + 129 * 4, 64 * 64 * 2, 8 * 64 * 4, 512
    assert built.read_bytes == projections + head + router + norms
    assert built.linear_weights == 12288
    floor = whole_model.step_floor(whole, built, 3, 10, H200)
    assert floor["dense"] == pytest.approx(built.read_bytes / 4.24e6)
    assert floor["cache"] == pytest.approx(2 * 2 * 3 * 10 * 32 / 4.24e6)
    assert floor["states"] == 0
    assert floor["sum"] == pytest.approx(sum(floor.values()) / 2)
    assert whole_model.expected_active(whole.case, 1) == pytest.approx(2)


def test_sizes_of_models_are_computed_by_hand():
    found = model_sizes.sizes(whole_model.MODELS["tiny"])
    # Queries and outputs, keys and values, a router, embedding and head, and four norms.
    attention, router, tables, norms = 12288, 8 * 64, 2 * 64 * 64, 2 * 64 + 64 + 2 * 32
    case = CASES["tiny"]
    experts = case.experts * 3 * 64 * 48
    assert found["parameters"] == experts + attention + router + tables + norms
    assert found["vocabulary_bytes"] == 2 * tables
    assert experts * 9 / 16 <= found["experts_bytes"] <= experts * 9 / 16 + 64 * case.experts
    saved = found["weights_bytes"]["bfloat16"] - found["weights_bytes"]["nvfp4"]
    assert saved == pytest.approx(attention * (2 - 9 / 16), rel=0.03)  # but for global scales
    assert found["cache_bytes"] == 2 * 2 * 32 * found["cache_tokens"]


@pytest.mark.slow
def test_stored_sizes_of_models_are_those_of_the_code():
    """`python benchmarks/model_sizes.py` computes them again."""
    stored = json.loads((HERE / "results" / "model_sizes.json").read_text())["rows"]
    assert [row["model"] for row in stored] == list(model_sizes.SIZED)
    name = "nemotron3-nano"
    assert model_sizes.sizes(model_sizes.SIZED[name]) in stored


def test_the_computed_size_is_what_loading_took():
    """A GPU's peak while a model is loaded is at most a layer above its weights."""
    rows = json.loads((HERE / "results" / "decode_parallel.NVIDIA-H200.json").read_text())["rows"]
    peak = next(row["peak_bytes"] for row in rows if row["mesh"] == "1x1")
    stored = json.loads((HERE / "results" / "model_sizes.json").read_text())["rows"]
    row = next(row for row in stored if row["model"] == "qwen3-30b-a3b")
    layer = row["experts_bytes"] / 48
    assert 0 < peak - row["weights_bytes"]["nvfp4"] < layer


def test_recurrent_states_are_read_and_written():
    cut = whole_model.MODELS["qwen3.6-35b-a3b"].cut(4)
    row = find_architecture(cut.config)
    table = whole_model.RandomWeights(cut.case, "bfloat16")
    make = Builder(table, row.keys, Settings(Target.current()))
    model = nnx.eval_shape(lambda: row.build_model(row.read_config(cut.config), make))
    kept, states = whole_model.cache_bytes(model, 1, 100)
    assert kept == 2 * 2 * 2 * 256 * 100
    # Three delta nets: 32 value heads of 128 x 128 in float32, and three tokens before the next.
    assert states == 3 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)


def test_a_pattern_of_layers_is_cut_and_counted():
    whole = whole_model.MODELS["nemotron3-nano"]
    assert (whole.layers, whole.layers_of_experts) == (52, 23)
    # Six attentions of 32 heads, whose queries and values have 256 channels together.
    assert whole.attention_flops(10) == pytest.approx(6 * 32 * 256 * 100)
    assert whole.cut(6).config["hybrid_override_pattern"] == "MEMEM*"


def test_a_prefill_is_measured(tiny):
    whole, built = tiny
    row = prefill.measure(whole, built, 16, types.SimpleNamespace(batch=2, chunk=16), H200)
    assert row["cache_gb"] == pytest.approx(2 * 2 * 2 * 16 * 32 / 1e9)
    # Two query heads of 32 channels: half of 16 x 16 pairs, two products of two FLOPs.
    assert row["floor_us"]["attention"] == pytest.approx(2 * (2 * 64 * 16 * 16) / 797e6)
    assert row["floor_us"]["linears"] == pytest.approx(2 * 12288 * 32 / 797e6)
    assert 0 < row["low"] <= row["ms"] <= row["high"]


def test_a_step_is_measured_with_the_tokens_of_generate(tiny):
    whole, built = tiny
    arguments = types.SimpleNamespace(new=4)
    row = decode.measure(whole, built, (2, 8), arguments, H200, compilations.Compilations())
    prompt = np.random.default_rng(2).integers(0, whole.config["vocab_size"], (2, 8), np.int32)
    tokens = np.asarray(nvfp4.generate(built.model, prompt, max_new_tokens=4))
    assert row["tokens_sha256"] == hashlib.sha256(tokens.tobytes()).hexdigest()
    assert 0 < row["low"] <= row["step_us"] <= row["high"]
    assert row["compilations"] == 0


@pytest.mark.parametrize("remat", [True, False])
def test_a_training_step_is_measured(remat):
    """A step learns, and the forward pass keeps less if layers are computed again."""
    whole = whole_model.MODELS["tiny"].cut(2)
    model = whole_model.build_model(whole, "nvfp4").model
    nvfp4.add_lora(model, 2, targets=["mixers", "experts"], rngs=nnx.Rngs(0))
    arguments = types.SimpleNamespace(
        batch=1, tokens=32, rank=2, targets=["mixers", "experts"], compile_only=False
    )
    # Each token keeps what enters the two layers and what leaves them, as a pair in bfloat16.
    few, many = (train.kept_bytes(model, 1, tokens, remat) for tokens in (32, 64))
    streams = 32 * 3 * 2 * 64 * 2
    assert (many - few < 2 * streams) == remat
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # for optax
        row = train.measure(model, arguments, remat, 64)
    assert row["kept_gb"] == few / 1e9
    assert row["tokens_per_s"] == pytest.approx(32 / row["step_ms"] * 1e3)
    assert 0 < row["forward_ms"] < row["step_ms"]
    experts = 8 * 2 * (64 + 96 + 48 + 64)
    mixers = 2 * (64 + 64 + 2 * (64 + 32) + 64 + 64)
    assert row["adapter_parameters"] == 2 * (experts + mixers)
    assert row["weights_gb"] > 0
    assert train.show([{"model": "tiny", **row}]).count("\n") == 2


@pytest.mark.slow
def test_prompts_of_unequal_length_are_measured(tiny):
    rows = prefill.measure_ragged(*tiny, [9, 3], 16)
    assert [row["tokens"] for row in rows] == [12, 18, 12, 12]
    assert all(0 < row["low"] <= row["ms"] <= row["high"] for row in rows)
    head = prefill.head_of(tiny[0], "nvfp4", False)
    table = prefill.make_ragged_table([head | row for row in rows])
    assert table.row_count == 4


PEER = """#!/bin/sh
cp "$2" config.json
echo "$@" >> commands
case "$1" in *transformers*) echo no room >&2; exit 1;; esac
echo '{"device": "H200", "method": "NVFP4", "rows": [
  {"batch": 1, "prompt": 8, "first_token_s": [3, 9, 4], "step_s": [0.5, 0.1, 0.2]}]}'
"""


def test_peers_time_the_same_cells_of_the_same_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    python = tmp_path / "python"
    python.write_text(PEER)
    python.chmod(0o755)
    arguments = types.SimpleNamespace(
        model=["tiny", "deepseek-v3-4-layers"],
        layers=3,
        llama=pathlib.Path("build"),
        transformers=True,
        peer_python=python,
    )
    results = model_peers.time_peers(arguments, [(1, 8), (2, 16)], 4)
    llama, transformers = (tmp_path / "commands").read_text().splitlines()
    assert "llama_cuda.py" in llama
    assert llama.endswith("--build build --new 4 --cells 1x8 2x16")
    assert transformers.endswith("--new 4 --cells 1x8 2x16")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {**whole_model.MODELS["tiny"].cut(3).config, "rms_norm_eps": 1e-6}
    assert [("rows" in result, result.get("error")) for result in results] == [
        (True, None),
        (False, "no room"),
        *2 * [(False, "no model of the kind DeepseekV3ForCausalLM")],
    ]
    assert "transformers, tiny: no room" in capsys.readouterr().err

    def times(*cell, figure="step_s"):
        return model_peers.times_as_fast(results, *cell, 0.1, figure)

    assert times("tiny", 1, 8) == {"llama.cpp": pytest.approx(2)}
    assert times("tiny", 1, 8, figure="first_token_s") == {"llama.cpp": pytest.approx(40)}
    assert times("tiny", 2, 16) == times("deepseek-v3-4-layers", 1, 8) == {}
    assert model_peers.headings(results) == ["x llama.cpp", "x transformers"]
    assert model_peers.cells_of(results, {"times": {"llama.cpp": 2.0}}) == ["2.00", "-"]
    caption = model_peers.caption(results).splitlines()
    assert caption[:2] == ["x llama.cpp: NVFP4, on H200", "transformers, tiny: no room"]


class Graph:
    """Stand-in for `torch.cuda.CUDAGraph` that counts how many graphs were freed."""

    freed = 0

    def replay(self):
        pass

    def __del__(self):
        Graph.freed += 1


EVENT = types.SimpleNamespace(
    record=lambda: None, synchronize=lambda: None, elapsed_time=lambda _: 3.0
)


@pytest.fixture
def time_graph(monkeypatch):
    """Return `torch_timing.time_graph` with a stand-in for torch that does nothing."""
    cuda = types.SimpleNamespace(
        CUDAGraph=Graph,
        Event=lambda **_: EVENT,
        Stream=lambda: None,
        graph=lambda _: contextlib.nullcontext(),
        stream=lambda _: contextlib.nullcontext(),
        synchronize=lambda: None,
    )
    torch = types.SimpleNamespace(cuda=cuda, zeros=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.delitem(sys.modules, "peers.torch_timing", raising=False)
    yield importlib.import_module("peers.torch_timing").time_graph
    monkeypatch.delitem(sys.modules, "peers.torch_timing")


def test_torch_calls_are_timed_in_a_graph(time_graph):
    assert time_graph(lambda: None, 3) == {"us": 1000.0, "low": 1000.0, "high": 1000.0}


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failed_capture_is_an_error_and_its_graph_is_kept(time_graph, failing):
    """torch aborts the process if it frees such a graph. The first call is not captured."""
    calls = []

    def launch():
        calls.append(None)
        if len(calls) == failing:
            raise RuntimeError("no kernel image")

    before = Graph.freed
    with collects_new_objects_alone():
        with pytest.raises(RuntimeError, match="no kernel image"):
            time_graph(launch, 1)
        gc.collect(0)
    assert Graph.freed == before


SMALL_MODEL = (
    "--layers=1 --experts=4 --top-k=2 --hidden=64 --intermediate=48 --vocab=64 --heads=2 "
    "--kv-heads=1 --head-dim=32 --batch 1 --prompt=8 --new=4"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("moe.py", "--case tiny --tokens 4097 8192 --small-ceilings"),
        ("parallel.py", "--smoke"),
        ("decode_parallel.py", f"{SMALL_MODEL} --mesh 1x1"),
        ("long_text.py", "--tokens 64 --new 2"),
    ],
)
def test_scripts_that_start_others_run(script, arguments, tmp_path):
    output = tmp_path / "result.json"
    common = ["--commit", "abc", "--output", output]
    command = [sys.executable, HERE / script, *arguments.split(), *common]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=user_environment()
    )
    assert process.returncode == 0, process.stderr[-3000:]
    written = json.loads(output.read_text())
    assert written["commit"] == "abc"
    assert len(written["rows"]) == {"moe.py": 2, "parallel.py": 2, "long_text.py": 3}.get(script, 1)
    if script == "moe.py":
        assert (tmp_path / "result.png").exists()


@pytest.mark.slow
def test_a_model_with_random_weights_is_decoded_over_meshes(tmp_path):
    output = tmp_path / "result.json"
    command = [sys.executable, HERE / "decode_parallel.py", "--commit", "abc", "--output", output]
    options = "--model tiny-dense --layers 2 --mesh 1x1 1x2 --batch 1 --prompt 8 --new 4"
    process = subprocess.run(
        [*command, *options.split(), "--prefill", "16"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=user_environment() | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"},
    )
    assert process.returncode == 0, process.stderr[-3000:]
    written = json.loads(output.read_text())
    assert [row["mesh"] for row in written["rows"]] == ["1x1", "1x2"]
    assert all((row["model"], row["layers"]) == ("tiny-dense", 2) for row in written["rows"])
    assert all(len(bytes.fromhex(row["tokens_sha256"])) == 32 for row in written["rows"])
    found = [(row["mesh"], row["devices"], row["prefill"]) for row in written["prefill"]]
    assert found == [("1x1", 1, 16), ("1x2", 2, 16)]
    assert all(row["first_token_ms"] > 0 for row in written["prefill"])


@pytest.mark.parametrize(
    ("script", "arguments", "rows"),
    [
        (
            "decode.py",
            "--model tiny --format nvfp4 --cells 1x8 --new 4 --fp8-cache --small-ceilings "
            "--transformers --peer-python false",  # a peer that fails must not end the run
            1,
        ),
        (
            "decode.py",
            "--model tiny --format nvfp4 --cells 1x8 --new 8 --small-ceilings --draft mtp "
            "--draft-tokens 3 --draft-head exact nvfp4",
            1,
        ),
        pytest.param(
            "cpu_attention.py", "--calls 1,8,16 2,1,20", 2, marks=pytest.mark.slow
        ),  # it compiles a program that measures the peak
        ("layout.py", "--case tiny --backend moe_w4a16_cpu", 1),
        ("ragged_products.py", "--case tiny --tokens 1 5", 2),
        ("backward.py", "--case tiny --tokens 1 5 --contestant nvfp4 xla", 4),
        ("quantize.py", "--case given --tokens 7 130 --k 64 --copy-gibibytes 0.01", 2),
    ],
)
def test_scripts_run(script, arguments, rows, tmp_path, monkeypatch):
    """They run in this process."""
    output = tmp_path / "result.json"
    common = ["--commit", "abc", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", [script, *arguments.split(), *common])
    status = None
    try:
        runpy.run_path(str(HERE / script), run_name="__main__")
    except SystemExit as end:
        status = end.code
    assert not status
    written = json.loads(output.read_text())
    assert written["commit"] == "abc"
    assert len(written["rows"]) == rows
    heads = [row["draft_head"] for row in written["rows"][0].get("drafts", ())]
    assert heads == (["exact", "nvfp4"] if "--draft-head" in arguments else [])


def test_a_page_of_a_device_keeps_its_name(tmp_path):
    write_page(tmp_path / "backward.cpu", {}, "page")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["backward.cpu.json", "backward.cpu.md"]


def test_predictions_of_blackwell_are_the_longest_bound():
    case, counts = (
        CASES["qwen3-30b-a3b"],
        [{"dtype": "bfloat16", "rows": 128, "issued_per_omma": 3}],
    )
    spark = next(device for device in blackwell.DEVICES if device.name == "DGX Spark")
    few = blackwell.predict(spark, counts, case, 1, {})
    assert few["bound"] == "memory"
    assert few["floor"] * spark.tb_per_s * 1e6 >= case.packed_bytes(8)
    many = blackwell.predict(dataclasses.replace(spark, fp4_tflop_per_s=1), counts, case, 8192, {})
    assert many["bound"] == "tensor"
    assert many["tensor"] >= case.flops(8192) * 1e-6
    row = {"us": 30.0, "floor_us": 5.0, "of_floor": 0.5}
    measured = {(case.name, 1): row, (case.name, "starts"): row}
    known = blackwell.predict(spark, counts, case, 1, measured)
    assert known["expected"] == (few["floor"] + 25, few["floor"] * 2)


def test_runs_of_instructions_end_at_branches():
    code = ["LDS", "OMMA.SF", "OMMA.SF", "BRA.U", "OMMA.SF", "IADD3", "BAR.SYNC", "LDS"]
    assert blackwell.largest_run(code, "OMMA") == (3, 2)
