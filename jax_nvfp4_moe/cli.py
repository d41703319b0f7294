"""The command ``jax-nvfp4-moe``: results on standard output, all else on standard error."""

import contextlib
import importlib.resources
import json
import logging
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import typer

from jax_nvfp4_moe.backends.choice import explain_problem
from jax_nvfp4_moe.evaluate import evaluate
from jax_nvfp4_moe.generate import stream
from jax_nvfp4_moe.inspection import inspect, table
from jax_nvfp4_moe.models.loading import find_dtype, load_model
from jax_nvfp4_moe.ops.moe import moe_mlp
from jax_nvfp4_moe.ops.prepare import prepare
from jax_nvfp4_moe.scheme import Problem, Scheme, Target, choose_scheme
from jax_nvfp4_moe.testing import random_moe_params, random_routing
from jax_nvfp4_moe.tokenizer import load_tokenizer

EXAMPLE = "tiny-python-moe"
PROMPT = "import jax\nimport jax.numpy as jnp\n\n\ndef softmax("
_NEW_TOKENS = 128

app = typer.Typer(
    name="jax-nvfp4-moe",
    help="NVFP4 mixture-of-experts inference for JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Folder = Annotated[pathlib.Path, typer.Argument(help="Folder of a checkpoint.")]
SchemeOption = Annotated[
    str | None,
    typer.Option("--scheme", help="checkpoint, w4a16, w4a4, w4a4_unit_scale, w4a4_token_scale."),
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="bfloat16, float16 or float32.")]
BackendOption = Annotated[str | None, typer.Option("--backend", help="Name of a backend.")]


@app.command("inspect")
def inspect_command(
    path: Folder, scheme: SchemeOption = None, dtype: DtypeOption = "bfloat16"
) -> None:
    """Show layers, formats, bytes, and the scheme and backend that each layer gets and why."""
    logging.getLogger("jax_nvfp4_moe").setLevel(logging.WARNING)  # the table says it all
    print(inspect(path, scheme=scheme, dtype=dtype))


@app.command("generate")
def generate_command(
    path: Annotated[
        pathlib.Path | None, typer.Argument(help="Folder of a checkpoint; the example where none.")
    ] = None,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = PROMPT,
    max_new_tokens: Annotated[int | None, typer.Option(help="128, or what room there is.")] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest.")] = None,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest up to this.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the random numbers.")] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt as a user's message; print the answer.")
    ] = False,
    scheme: SchemeOption = None,
    dtype: DtypeOption = "bfloat16",
    backend: BackendOption = None,
) -> None:
    """Print a prompt and its continuation, token by token."""
    with _example_or(path) as folder:
        tokenizer = load_tokenizer(folder)
        text = tokenizer.chat([{"role": "user", "content": prompt}]) if chat else prompt
        ids = tokenizer.encode(text, special=not chat)
        model = load_model(folder, scheme=scheme, dtype=dtype, backend=backend)
    room = model.config.max_positions - len(ids)
    if max_new_tokens is None:
        max_new_tokens = max(1, min(_NEW_TOKENS, room))
    arrivals: list[float] = []

    def tokens():
        for token in stream(
            model,
            jnp.asarray(ids)[None, :],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            stop_ids=tokenizer.stop_ids,
            key=jax.random.key(seed),
        ):
            arrivals.append(time.perf_counter())
            yield token[0]

    pieces = tokenizer.decode_stream(tokens())
    first = next(pieces, "")  # so that an error comes before any output
    for piece in (*([] if chat else [text]), first):
        print(piece, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print(flush=True)
    # The first token waits for two compilations, the second for the rest of them.
    if len(arrivals) > 2:
        rate = (len(arrivals) - 2) / (arrivals[-1] - arrivals[1])
        _say(f"{len(arrivals)} tokens, {rate:.1f} tokens/s after the second")


@app.command("eval")
def eval_command(
    path: Folder,
    text: Annotated[pathlib.Path, typer.Option(help="Text to predict, UTF-8.")],
    window: Annotated[int, typer.Option(help="Tokens in a window, each on its own.")] = 512,
    skip_tokens: Annotated[int, typer.Option(help="Leading tokens to leave out.")] = 0,
    max_windows: Annotated[int | None, typer.Option(help="At most so many windows.")] = None,
    scheme: SchemeOption = None,
    dtype: DtypeOption = "float32",
    backend: BackendOption = None,
) -> None:
    """Print the mean cross-entropy on a text as one JSON object.

    In float32 unless asked otherwise, as quantization tools state theirs.
    """
    ids = load_tokenizer(path).encode(text.read_text(encoding="utf-8"))
    model = load_model(path, scheme=scheme, dtype=dtype, backend=backend)
    start = time.perf_counter()
    with _progress("windows") as progress:
        result = evaluate(
            model,
            ids,
            window=window,
            skip_tokens=skip_tokens,
            max_windows=max_windows,
            progress=progress,
        )
    seconds = time.perf_counter() - start
    _say(
        f"{result['windows'] * window} tokens, {result['windows'] * window / seconds:.0f} tokens/s"
    )
    print(json.dumps(result))


@app.command("bench")
def bench_command(
    tokens: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,16,64",
    experts: Annotated[int, typer.Option(help="Number of experts.")] = 128,
    hidden: Annotated[int, typer.Option(help="Width of tokens.")] = 2048,
    intermediate: Annotated[int, typer.Option(help="Width of an expert.")] = 768,
    top_k: Annotated[int, typer.Option(help="Experts per token.")] = 8,
    scheme: SchemeOption = None,
    dtype: DtypeOption = "bfloat16",
    backend: BackendOption = None,
) -> None:
    """Time one expert layer (of Qwen3-30B-A3B's sizes) on this device."""
    counts = _positive_numbers("tokens", tokens)
    target, kind = Target.current(), find_dtype(dtype)
    chosen, _ = choose_scheme(Scheme.W4A4, scheme, target)
    problem = Problem(
        "moe_mlp", chosen, target, kind.name, experts, top_k, hidden, intermediate, "silu"
    )
    choice = explain_problem(problem, backend=backend)
    _say("making random weights")
    params = random_moe_params(
        jax.random.key(0), num_experts=experts, hidden=hidden, intermediate=intermediate
    )
    arguments = {"scheme": chosen, "target": target, "backend": choice.backend}
    params = prepare(params, **arguments)

    @jax.jit
    def layer(x, params, ids, weights):
        return moe_mlp(x, params, ids, weights, **arguments)

    rows = [("tokens", "us", "GB/s of weights", "scheme", "backend")]
    for count in counts:
        ids, weights = random_routing(jax.random.key(1), count, experts, top_k)
        x = jax.random.normal(jax.random.key(2), (count, hidden), jnp.float32).astype(kind)
        seconds = _median_seconds(lambda x=x, i=ids, w=weights: layer(x, params, i, w))
        read = params.nbytes / experts * len(np.unique(ids))
        rate = f"{read / seconds / 1e9:.1f}"
        rows.append((str(count), f"{seconds * 1e6:.1f}", rate, str(chosen), choice.backend))
    print("\n".join(table(rows)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an error is one message and exit status 2.

    Args:
      arguments: without the program's name; those of the process where None.
    """
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("jax_nvfp4_moe").setLevel(logging.INFO)
    try:
        app(args=None if arguments is None else list(arguments))
    except BrokenPipeError:
        # The reader has gone, as with `| head`: nobody to tell. Python would try to flush again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (ValueError, OSError, MemoryError) as error:
        _fail(str(error) or type(error).__name__)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        _fail(f"out of memory on {Target.current()} while the model ran: {error}")


def _fail(message):
    _say(f"error: {message}")
    sys.exit(2)


def _say(message):
    print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _example_or(path) -> Iterator[pathlib.Path]:
    """Give `path`, or the example model as a folder on disk."""
    if path is not None:
        yield path
        return
    example = importlib.resources.files("jax_nvfp4_moe") / "examples" / EXAMPLE
    with importlib.resources.as_file(example) as folder:
        yield folder


@contextlib.contextmanager
def _progress(what):
    """Draw a bar on standard error where it is a terminal; give the function that advances it."""
    if not sys.stderr.isatty():
        yield None
        return
    import rich.console
    import rich.progress

    with rich.progress.Progress(console=rich.console.Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _positive_numbers(name, text) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{name}: expected positive numbers separated by commas, got {text!r}")
    return [int(part) for part in parts]


def _median_seconds(call) -> float:
    """Return the median time of one call of several, the first ones left out."""
    jax.block_until_ready(call())
    times = []
    begin = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - begin < 1.0 and len(times) < 200):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return float(np.median(times))
