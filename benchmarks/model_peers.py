"""Time other engines with whole models of the same sizes, for `decode.py` and `prefill.py`.

Each engine is a program of ``peers`` that prints one JSON object: the device, the method, and a row
for each cell ``(batch, tokens of the prompt)``. A row has the seconds until the first token
(``first_token_s``) and those of a step (``step_s``), a figure for each round. The programs run one
after the other, before this process uses the GPU, since JAX keeps most of its memory.
"""

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

from whole_model import MODELS

HERE = pathlib.Path(__file__).resolve().parent
# The architectures of the models that each program makes.
ARCHITECTURES = {
    "llama.cpp": (
        *("Qwen3MoeForCausalLM", "LlamaForCausalLM"),
        *("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    ),
    "transformers": ("Qwen3MoeForCausalLM",),
}


def add_peers(parser):
    """Add the options that choose peers."""
    parser.add_argument("--llama", type=pathlib.Path, help="folder with the program `llama_steps`")
    parser.add_argument("--transformers", action="store_true", help="time transformers")
    parser.add_argument(
        "--peer-python", default=sys.executable, help="Python that has torch, transformers and gguf"
    )


def commands(arguments) -> dict[str, list]:
    """Return the command of each peer that `arguments` ask for."""
    chosen = {}
    if arguments.llama:
        chosen["llama.cpp"] = ["llama_cuda.py", "--build", arguments.llama]
    if arguments.transformers:
        chosen["transformers"] = ["transformers_model.py"]
    return chosen


def time_peers(arguments, cells, new: int) -> list[dict]:
    """Return what each peer printed for each model, or its error.

    Args:
      arguments: those of the command line.
      cells: pairs of batch and tokens of the prompt.
      new: number of tokens to generate. One means that no step is timed.
    """
    results = []
    for name in arguments.model:
        whole = MODELS[name].cut(arguments.layers)
        for peer, command in commands(arguments).items():
            (kind,) = whole.config["architectures"]
            result = {"error": f"no model of the kind {kind}"}
            if kind in ARCHITECTURES[peer]:
                result = _run(arguments.peer_python, command, whole.config, cells, new)
            results.append({"peer": peer, "model": name, **result})
            if "error" in result:
                print(f"{peer}, {name}: {result['error']}", file=sys.stderr)
    return results


def _run(python, command, config, cells, new):
    """Return the JSON object that the program prints."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "config.json"
        path.write_text(json.dumps({"rms_norm_eps": 1e-6, **config}), encoding="utf-8")
        line = [python, HERE / "peers" / command[0], path, *command[1:], "--new", new]
        line += ["--cells", *(f"{batch}x{prompt}" for batch, prompt in cells)]
        done = subprocess.run(list(map(str, line)), capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr.strip()[-2000:] or f"status {done.returncode}"}
    return json.loads(done.stdout)


def times_as_fast(results, model, batch, prompt, seconds, figure) -> dict[str, float]:
    """Return the time of each peer divided by ours.

    Args:
      results: what `time_peers` returned.
      model: name of the model.
      batch: number of prompts.
      prompt: tokens of a prompt.
      seconds: our time.
      figure: name of the peers' time to compare with: ``first_token_s`` or ``step_s``.
    """
    return {
        result["peer"]: statistics.median(row[figure]) / seconds
        for result in results
        if result["model"] == model
        for row in result.get("rows", ())
        if (row["batch"], row["prompt"]) == (batch, prompt) and row.get(figure)
    }


def headings(results) -> list[str]:
    """Return the headings of the columns of `cells_of`."""
    return [f"x {peer}" for peer in _names(results)]


def cells_of(results, row) -> list[str]:
    """Return the ratios of a row as text, one for each heading."""
    return [
        f"{row['times'][peer]:.2f}" if peer in row["times"] else "-" for peer in _names(results)
    ]


def caption(results) -> str | None:
    """Return a line for each peer that says how it was timed, or the last line of its error."""
    lines = [
        f"x {result['peer']}: {result['method']}, on {result['device']}"
        if "rows" in result
        else f"{result['peer']}, {result['model']}: {result['error'].splitlines()[-1]}"
        for result in results
    ]
    return "\n".join(dict.fromkeys(lines)) or None


def _names(results):
    return dict.fromkeys(result["peer"] for result in results)
