"""Test the command line: stdout has only results; an error is one message and status 2."""

import contextlib
import json
import os
import pathlib
import pty
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.files import letters
from support.files.given import (
    CHECKPOINTS,
    EXAMPLE,
    EXAMPLE_REFERENCE,
    ROOT,
    copy_with_config,
    reference_facts,
)

from jax_nvfp4_moe.checkpoint.reading.lazy_array import overlap
from jax_nvfp4_moe.checkpoint.safetensors import Tensors
from jax_nvfp4_moe.cli import app as cli
from jax_nvfp4_moe.cli.generate import PROMPT
from jax_nvfp4_moe.cli.inspection import TARGETS
from jax_nvfp4_moe.figures import check_plot
from jax_nvfp4_moe.quantization.layer_errors import LayerErrors, plot_errors
from jax_nvfp4_moe.scheme import Scheme, Target, choose_scheme

TEXT = EXAMPLE_REFERENCE / "heldout.txt"
GREEDY = reference_facts(EXAMPLE_REFERENCE)["mean_cross_entropy"]["w4a16_greedy"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Return a checkpoint with a tokenizer that compiles in half the time of the example."""
    folder = tmp_path_factory.mktemp("small") / "m"
    copy_with_config(CHECKPOINTS / "qwen3moe-modelopt-w4a4", folder)
    letters.write_tokenizer(folder)
    return folder


def test_generate_streams_the_prompt_and_its_continuation(run):
    exact = ("--temperature", 0, "--dtype", "float32", "--scheme", "w4a16")
    new = ("--max-new-tokens", 48)
    status, out, err = run("generate", EXAMPLE, "--prompt", GREEDY["prompt"], *new, *exact)
    assert status == 0
    assert out == GREEDY["text"] + "\n"
    assert "tokens/s" in err


@pytest.mark.parametrize("exact", [True, False], ids=["float32", "default"])
def test_the_text_that_ci_expects_of_an_installed_package(run, exact):
    expected = (ROOT / ".ci" / "greedy.txt").read_text()
    how = ("--dtype", "float32") if exact else ()
    command = ("generate", "--prompt", "def softmax(x", "--max-new-tokens", 24)
    assert run(*command, *how)[:2] == (0, expected)


def test_the_drafting_layer_of_the_example_keeps_the_text(run):
    """It needs no option but `--draft`, and standard error has the speed alone."""
    expected = (ROOT / ".ci" / "greedy.txt").read_text()
    command = ("generate", "--prompt", "def softmax(x", "--max-new-tokens", 24, "--draft", "mtp")
    status, out, err = run(*command)
    assert (status, out) == (0, expected)
    assert len(err.splitlines()) == 1
    assert "tokens/s" in err


def test_generate_without_arguments_runs_the_example(run):
    status, out, _ = run("generate", "--max-new-tokens", 3)
    assert status == 0
    assert out.startswith(PROMPT)
    assert len(out) > len(PROMPT) + 1


@pytest.mark.slow  # starts two processes
def test_backends_are_named_where_the_user_asks():
    """Without `--verbose`, standard error has one line, which gives the speed."""
    command = [sys.executable, "-m", "jax_nvfp4_moe", "generate", "--max-new-tokens", "3"]
    quiet, verbose = (
        subprocess.run([*command, *more], capture_output=True, text=True, check=True)
        for more in ((), ("--verbose",))
    )
    (line,) = quiet.stderr.splitlines()
    assert "tokens/s" in line
    lines = verbose.stderr.splitlines()
    assert any(line.startswith("scheme w4a16 for weights declared w4a4: cpu has") for line in lines)
    assert any(line.startswith("backend moe_w4a16_cpu for moe_mlp") for line in lines)


def test_a_seed_decides_a_sample(run, small):
    options = (small, "--prompt", "Text", "--max-new-tokens", 12)
    options += ("--temperature", 1.2, "--top-p", 0.9)
    texts = [run("generate", *options, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("tokens", [2, "auto"])
def test_drafts_do_not_change_the_text(run, small, tokens):
    options = (small, "--prompt", "Text", "--max-new-tokens", 12, "--dtype", "float32")
    _, plain, _ = run("generate", *options)
    status, text, _ = run("generate", *options, "--draft", "lookup", "--draft-tokens", tokens)
    assert (status, text) == (0, plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--draft", "eagle"), 'draft: expected None or one of "lookup", "mtp"; got \'eagle\''),
        (("--draft", "mtp"), "the file has no drafting layers; looked for mtp.fc.weight"),
        (("--draft", "lookup", "--draft-tokens", "0"), "draft_tokens: expected 1 to 16"),
        (("--draft", "lookup", "--draft-tokens", "²"), "draft_tokens: expected 1 to 16"),
        (("--draft", "lookup", "--draft-tokens", "9" * 400), "draft_tokens: expected 1 to 16"),
    ],
)
def test_wrong_drafting_is_named(run, small, options, message):
    status, out, err = run("generate", small, "--prompt", "Text", *options)
    assert (status, out) == (2, "")
    assert message in " ".join(err.split())


def test_chat_prints_the_answer_alone(run, tmp_path):
    folder = copy_with_config(EXAMPLE, tmp_path / "m")
    (folder / "chat_template.jinja").write_text("# {{ messages[0].content }}\nimport")
    status, out, _ = run("generate", folder, "--chat", "--prompt", "A test.", "--max-new-tokens", 4)
    assert status == 0
    assert out.strip()
    assert "A test." not in out


def test_eval_prints_one_json_object(run):
    status, out, err = run(
        "eval", EXAMPLE, "--text", TEXT, "--window", 64,
        "--skip-tokens", 4096, "--max-windows", 3,
    )  # fmt: skip
    assert status == 0
    (line,) = out.splitlines()
    result = json.loads(line)
    assert 0 < result["mean_cross_entropy"] < 5
    assert (result["windows"], result["window"], result["skip_tokens"]) == (3, 64, 4096)
    picked = choose_scheme(Scheme.W4A4, None, Target.current())[0]  # the example declares w4a4
    assert (result["path"], result["scheme"]) == (str(EXAMPLE), picked)
    assert "tokens/s" in err


def test_eval_compares_schemes(run, small, tmp_path):
    """Standard output has one JSON line for each scheme. Tables for people go to standard error."""
    (tmp_path / "t.txt").write_text(letters.TEXT * 6)
    status, out, err = run(
        "eval", small, "--text", tmp_path / "t.txt", "--window", 64,
        "--max-windows", 3, "--by-window", "--scheme", "w4a16", "--scheme", "w4a4",
    )  # fmt: skip
    assert status == 0
    results = [json.loads(line) for line in out.splitlines()]
    assert [result["scheme"] for result in results] == ["w4a16", "w4a4"]
    means = [result["mean_cross_entropy"] for result in results]
    assert means == [pytest.approx(sum(r["cross_entropies"]) / 3) for r in results]
    rows = [line.split() for line in err.splitlines()]
    at = next(i for i, row in enumerate(rows) if row[:2] == ["scheme", "cross-entropy"])
    assert rows[at + 2][:2] == ["w4a4", f"{means[1]:.5f}"]
    assert float(rows[at + 2][4]) == pytest.approx(means[1] - means[0], abs=1e-5)
    assert sum(row[0] in ("0", "1", "2") for row in rows if row) == 3


def test_inspect_shows_errors_of_the_schemes_that_are_asked_for(run, small):
    options = ("--errors", "--tokens", 8, "--scheme", "w4a4_unit_scale", "--scheme", "w4a16")
    status, out, _ = run("inspect", small, *options)
    assert status == 0
    (head,) = [line for line in out.splitlines() if line.startswith("experts")]
    found = re.findall(r"(\S+) NRMSE", head)
    assert found == ["w4a4_unit_scale", "w4a16"]


def test_inspect_reads_headers_alone(run, tmp_path):
    """A copy filled with 0xFF bytes gives a report, although its NaN scales would fail a load."""
    source = CHECKPOINTS / "deepseekv3-modelopt-w4a4"
    folder = copy_with_config(source, tmp_path / "m")
    raw = bytearray((folder / "model.safetensors").read_bytes())
    header = 8 + int.from_bytes(raw[:8], "little")
    raw[header:] = b"\xff" * (len(raw) - header)
    (folder / "model.safetensors").write_bytes(raw)
    status, out, err = run("inspect", folder)
    assert status == 0
    assert err == ""
    assert "16 experts 256 > 96, top 4; NVFP4 w4a4" in out
    assert "layers.*.mlp.shared_experts.down" in out
    for target in TARGETS:
        assert f"\n{target}\n" in out
    blackwell = out[out.index("cuda 10.0\n") : out.index("cuda 12.0\n")]
    assert "scheme  w4a4: the weights are declared w4a4 and cuda 10.0 has FP4 tensor" in blackwell
    assert "backend moe_w4a4_sm100" in blackwell
    hopper = out[out.index("cuda 9.0\n") : out.index("cuda 10.0\n")]
    assert "scheme  w4a16" in hopper
    assert "backend moe_w4a16_sm90" in hopper
    assert "not moe_w4a4_sm100: needs compute capability in [10.0, 11.0)" in hopper
    assert run("eval", folder, "--text", folder / "config.json")[0] == 2


def test_inspect_shows_errors_by_layer(run, small, tmp_path):
    options = ("--errors", "--tokens", 8, "--plot", tmp_path / "errors.png")
    status, out, err = run("inspect", small, *options)
    assert status == 0
    assert "errors of routed experts against its dequantized weights, in float32, on 8 " in out
    rows = [line.split() for line in out.splitlines() if line.startswith("layers.")]
    assert [row[0] for row in rows] == [f"layers.{i}.mlp" for i in range(2)]
    assert "w4a4 NRMSE" in out
    assert "wrote" in err
    assert (tmp_path / "errors.png").stat().st_size > 10_000


def test_inspect_gives_errors_as_json(run):
    """Without a tokenizer, errors are measured on random tokens, and standard error says so."""
    folder = CHECKPOINTS / "deepseekv3-modelopt-w4a4"
    options = ("--errors", "--json", "--tokens", 8, "--scheme", "w4a4", "--dtype", "float32")
    status, out, err = run("inspect", folder, *options)
    assert status == 0
    report = json.loads(out)
    assert [error["module"] for error in report["errors"]] == ["layers.1.mlp", "layers.2.mlp"]
    assert all(0.05 < error["nrmse"] < 0.4 for error in report["errors"])
    assert report["tokens"] == len(report["errors"][0]["rows"]) == 8
    assert "8 random token ids" in err


def test_bench_prints_a_table(run):
    sizes = ("--experts", 4, "--hidden", 64, "--intermediate", 32, "--top-k", 2)
    status, out, _ = run("bench", *sizes, "--tokens", "1,8", "--backend", "reference")
    assert status == 0
    rows = [line.split() for line in out.splitlines()]
    assert [row[0] for row in rows] == ["tokens", "1", "8"]
    assert all(float(row[1]) > 0 for row in rows[1:])
    assert rows[1][-1] == "reference"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", EXAMPLE, "--text", "/nowhere.txt"], "No such file or directory: '/nowhere.txt'"),
        (["generate", EXAMPLE, "--scheme", "w8a8"], "scheme: expected"),
        (["generate", EXAMPLE, "--dtype", "int8"], "dtype: expected"),
        (
            ["generate", EXAMPLE, "--backend", "moe_w4a4_sm120", "--scheme", "w4a16"],
            "backend 'moe_w4a4_sm120' cannot",
        ),
        (["generate", EXAMPLE, "--prompt", ""], "at least one token"),
        (["generate", EXAMPLE, "--top-p", "2"], "'--top-p': expected a number above 0"),
        (["generate", EXAMPLE, "--chat"], "no chat template"),
        (
            ["inspect", EXAMPLE, "--text", "t.txt", "--backend", "b"],
            "--text, --backend: expected tog",
        ),
        (
            ["inspect", EXAMPLE, "--scheme", "w4a4", "--scheme", "w4a16"],
            "--scheme: expected at most one without --errors, got w4a4, w4a16",
        ),
        (
            ["eval", EXAMPLE, "--text", TEXT, "--original", CHECKPOINTS / "qwen3moe-modelopt-w4a4"],
            "original: expected the model from which",
        ),
        (["generate", EXAMPLE, "--mesh", "data=1"], "mesh: expected expert=N"),
        (["generate", EXAMPLE, "--dispatch", "all_to_all"], "dispatch: expected a mesh"),
        (["eval", EXAMPLE, "--text", TEXT, "--process-id", "1"], "expected all three, or none"),
        (["inspect", EXAMPLE, "--errors", "--plot", "e.xyz"], "plot: expected a name ending in"),
        (["inspect", EXAMPLE, "--errors", "--tokens", "0"], "'--tokens': expected a number from"),
        (["bench", "--tokens", "1,x"], "--tokens: expected numbers from 1"),
        (["train"], "No such command"),
        (["quantize"], "Missing argument"),
        (["eval", EXAMPLE], "Missing option"),
    ],
)
def test_errors_are_one_message_and_status_2(run, arguments, message):
    status, out, err = run(*arguments)
    assert status == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err


COMMANDS = (
    ["inspect", "{}"],
    ["inspect", "{}", "--errors"],
    ["inspect", "{small}", "--errors", "--original", "{}"],
    ["generate", "{}"],
    ["eval", "{}", "--text", TEXT],
    ["eval", "{small}", "--text", TEXT, "--original", "{}"],
    ["quantize", "{}", "destination"],
    ["quantize", "{}", "destination", "--text", TEXT],
)
HOME = pathlib.Path.home()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: " ".join(map(str, c[:1] + c[-1:])))
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/nowhere", "'/nowhere' is not a folder that exists; pass the folder of a checkpoint"),
        ("./nowhere", "'nowhere' is not a folder that exists; pass the folder of a checkpoint"),
        ("~/nowhere", f"'{HOME}/nowhere' is not a folder that exists; pass"),
        ("~nobody-of-that-name/m", "'~nobody-of-that-name/m': "),
        ("nvidia/Qwen3-30B-A3B-FP4", "run `hf download nvidia/Qwen3-30B-A3B-FP4 --local-dir F"),
        (__file__, "is a file; pass the folder"),
    ],
)
def test_a_path_that_is_not_there_gets_one_sentence(run, small, command, path, message):
    status, out, err = run(*(str(word).format(path, small=small) for word in command))
    assert (status, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_a_home_is_expanded(run, small, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").symlink_to(small)
    (tmp_path / "t.txt").write_text(letters.TEXT * 6)
    status, _, err = run("eval", "~/m", "--text", "~/t.txt", "--window", 64, "--max-windows", 3)
    assert status == 0, err
    source = str(CHECKPOINTS / "sources" / "qwen3_moe-small" / "source")
    assert run("quantize", source, "~/q")[0] == 0
    assert (tmp_path / "q" / "config.json").exists()


def test_a_home_is_expanded_where_a_picture_goes(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    check_plot("~/errors.png")
    errors = [LayerErrors("layers.0", "w4a4", 0.15, np.array([0.1, 0.2]))]
    plot_errors(errors, "~/errors.png", truth="its weights")
    assert (tmp_path / "errors.png").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["quantize", EXAMPLE, "~nobody-of-that-name/q"],
        ["eval", EXAMPLE, "--text", "~nobody-of-that-name/t"],
        ["inspect", EXAMPLE, "--errors", "--plot", "~nobody-of-that-name/e.png"],
    ],
    ids=lambda command: command[0],
)
def test_the_home_of_nobody_is_the_users_error(run, command):
    status, out, err = run(*command)
    assert (status, out) == (2, "")
    assert "error: '~nobody-of-that-name/" in err


# A terminal that supports only ASCII. Python reads the arguments as UTF-8, or as ASCII.
ASCII_TERMINALS = {
    "encoding": {"PYTHONIOENCODING": "ascii"},
    "locale": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}


@pytest.fixture(params=["encoding", pytest.param("locale", marks=pytest.mark.slow)])
def in_a_terminal(request):
    """Return a function that runs a command in an ASCII terminal and returns status and output.

    Each command is a process, so that one of the terminals runs by default.
    """

    def call(*arguments):
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "jax_nvfp4_moe", *map(str, arguments)]
        environment = os.environ | ASCII_TERMINALS[request.param] | {"TERM": "xterm"}
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        process = subprocess.Popen(command, env=environment, **streams)
        os.close(theirs)
        shown = b""
        with open(ours, "rb", buffering=0) as terminal, contextlib.suppress(OSError):
            while block := terminal.read(1 << 16):  # OSError: the other end is closed
                shown += block
        return process.wait(), shown

    return call


def test_text_in_a_terminal_that_knows_ascii_alone(in_a_terminal):
    status, shown = in_a_terminal("generate", "--prompt", "# größe ∑", "--max-new-tokens", 3)
    assert status == 0, shown
    assert rb"# gr\xf6\xdfe \u2211" in shown
    assert shown.isascii()


def test_a_bar_in_a_terminal_that_knows_ascii_alone(in_a_terminal, tmp_path):
    source = CHECKPOINTS / "sources" / "qwen3_moe-small" / "source"
    status, shown = in_a_terminal("quantize", source, tmp_path / "größe")
    assert status == 0, shown
    assert b"quantizing" in shown
    assert b"-----" in shown
    assert shown.isascii()


def test_a_prompt_that_is_not_utf8_is_the_users_error(run):
    status, out, err = run("generate", "--prompt", "caf\udce9")
    assert (status, out) == (2, "")
    assert "prompt: expected text in UTF-8" in err


def test_a_file_that_shrinks_while_a_model_loads(run, tmp_path, monkeypatch):
    folder = copy_with_config(EXAMPLE, tmp_path / "m")
    original, reads = Tensors.read_bytes, []

    def shrinking(self, *given):
        reads.append(1)
        if len(reads) == 100:
            os.truncate(folder / "model.safetensors", 100_000)
        return original(self, *given)

    monkeypatch.setattr(Tensors, "read_bytes", shrinking)
    status, out, err = run("generate", folder)
    assert (status, out) == (2, "")
    assert "error: " in err
    assert "'model.safetensors' shrank while it was read" in err


def test_text_that_is_not_utf8_is_the_users_error(run, tmp_path):
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    status, _, err = run("eval", EXAMPLE, "--text", tmp_path / "latin")
    assert status == 2
    assert "latin: expected text in UTF-8" in err


def test_a_fault_of_the_package_is_no_error_of_the_user(small, monkeypatch):
    """A `ValueError` from a library or from Python can come from a mistake in our code."""
    faults = (
        lambda: np.zeros(3) + np.zeros(4),
        lambda: jax.jit(jnp.add)(jnp.zeros(3), jnp.zeros(4)),
        lambda: overlap((0,), (2, 3), (slice(0, 1),)),  # zip(..., strict=True) inside
    )
    for fault in faults:
        monkeypatch.setattr(
            "jax_nvfp4_moe.inference.generation.start_decoding", lambda *_, f=fault: f()
        )
        with pytest.raises((ValueError, TypeError)) as caught:
            cli.main(["generate", str(small), "--prompt", "Text"])
        assert "This is a fault of jax-nvfp4-moe" in caught.value.__notes__[-1]


def test_a_traceback_is_shown_on_request(run):
    status, out, err = run("inspect", "/nowhere", "--traceback")
    assert (status, out) == (2, "")
    assert err.startswith("Traceback")
    assert "in open_checkpoint" in err
    assert err.splitlines()[-1].startswith("error: '/nowhere' is not a folder")


def test_commands_over_devices_declare_their_options_once(run):
    """Help shows all options of devices, and none of the internal options."""
    for command in ("generate", "eval"):
        status, out, _ = run(command, "--help")
        assert status == 0
        plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
        options = set(re.findall(r"--[a-z-]+", plain))
        assert {
            "--mesh",
            "--distributed",
            "--coordinator",
            "--processes",
            "--process-id",
        } <= options
        assert {"--peer-timeout", "--start-timeout", "--dtype"} <= options
        assert not {"--devices", "--detect", "--supervised"} & options


def test_generate_shares_tokens_out(run, small):
    """The mesh has all devices of this process."""
    arguments = ("generate", small, "--prompt", "Text", "--dtype", "float32")
    arguments += ("--max-new-tokens", "4")
    _, expected, _ = run(*arguments)
    over = ("--mesh", f"expert={len(jax.devices())}", "--dispatch", "all_to_all")
    assert len(expected) > len("Text\n")
    status, out, err = run(*arguments, *over)
    assert (status, out) == (0, expected), err


def test_out_of_memory_names_the_tensor_and_its_size(run, monkeypatch):
    def full(value):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr("jax_nvfp4_moe.nn.building.filling.jax.device_put", full)
    status, _, err = run("generate", EXAMPLE, "--dtype", "float32")
    assert status == 2
    assert re.search(r"out of memory on .+: 4\.0 MiB for model\.embed_tokens\.weight", err)


def test_a_process_of_its_own():
    command = [sys.executable, "-m", "jax_nvfp4_moe", "inspect", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: '/nowhere' is not a folder that exists; pass the folder")
