"""The command ``jax-nvfp4-moe``: results on standard output, all else on standard error."""

import contextlib
import importlib.resources
import json
import logging
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax.sharding import Mesh

from jax_nvfp4_moe.checkpoint.folder import find_folder
from jax_nvfp4_moe.cli.bench import layer_times
from jax_nvfp4_moe.cli.errors import reporting_errors
from jax_nvfp4_moe.cli.inspection import inspect, table
from jax_nvfp4_moe.cli.process_options import over_devices
from jax_nvfp4_moe.inference.evaluation import evaluate, summary_rows, window_rows
from jax_nvfp4_moe.inference.generation import stream
from jax_nvfp4_moe.inference.tokenizer import TOKENIZER, load_tokenizer
from jax_nvfp4_moe.models.loading import abstract_model, load_model
from jax_nvfp4_moe.parallel import processes as distributed
from jax_nvfp4_moe.quantization.layer_errors import (
    check_original,
    check_plot,
    error_report,
    error_rows,
    measure_errors,
    plot_errors,
)
from jax_nvfp4_moe.quantization.pipeline import quantize_model

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
SchemesOption = Annotated[
    list[str] | None, typer.Option("--scheme", help="As elsewhere; repeat it to compare.")
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="bfloat16, float16 or float32.")]
BackendOption = Annotated[str | None, typer.Option("--backend", help="Name of a backend.")]
ExchangeOption = Annotated[
    str, typer.Option("--dispatch", help="Over a mesh, as load_model takes it: psum or all_to_all.")
]


@app.command("inspect")
@reporting_errors
def inspect_command(
    path: Folder,
    errors: Annotated[
        bool, typer.Option("--errors", help="Show the error of each layer's experts instead.")
    ] = False,
    original: Annotated[
        pathlib.Path | None,
        typer.Option(help="Errors against this unquantized checkpoint, not dequantized weights."),
    ] = None,
    text: Annotated[
        pathlib.Path | None, typer.Option(help="Text to run, UTF-8; some Python by default.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the text, at most.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Errors as JSON, by token too.")] = False,
    plot: Annotated[
        pathlib.Path | None, typer.Option(help="Draw the errors too, such as errors.png.")
    ] = None,
    scheme: SchemesOption = None,
    dtype: DtypeOption = "bfloat16",
    backend: BackendOption = None,
) -> None:
    """Show layers, formats, bytes, and the scheme and backend that each layer gets and why.

    With --errors: what each scheme costs each layer's routed experts, all on the same inputs: those
    of --scheme, else w4a16, and w4a4 where the checkpoint has input scales.
    """
    logging.getLogger("jax_nvfp4_moe").setLevel(logging.WARNING)  # the table says it all
    if not errors:
        _only_with_errors(original=original, text=text, json=as_json, plot=plot, backend=backend)
        only, *others = _each(scheme)
        if others:
            raise ValueError(f"--scheme: expected one without --errors, got {only}, {others[0]}")
        print(inspect(path, scheme=only, dtype=dtype))
        return
    if plot is not None:
        check_plot(plot)  # now, not after minutes
    ids, words = _sample(path, text, tokens)
    found = measure_errors(
        path,
        ids,
        original=original,
        schemes=dict.fromkeys(scheme) if scheme else None,
        dtype=dtype,
        backend=backend,
        progress=_progress,
    )
    truth = "its weights dequantized" if original is None else f"{original.resolve().name}"
    if plot is not None:
        plot_errors(found, plot, truth=truth)
        _say(f"wrote {plot}")
    if as_json:
        print(json.dumps({"truth": truth, "tokens": len(ids), "errors": error_report(found)}))
        return
    print(f"errors of routed experts against {truth}, in float32, of {len(ids)} tokens\n")
    print("\n".join(table(error_rows(found, words))))


@app.command("generate")
@reporting_errors
@over_devices
def generate_command(
    *,
    devices: Mesh | None,
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
    dispatch: ExchangeOption = "psum",
) -> None:
    """Print a prompt and its continuation, token by token."""
    with _example_or(path) as folder:
        tokenizer = load_tokenizer(folder)
        text = tokenizer.chat([{"role": "user", "content": prompt}]) if chat else prompt
        ids = tokenizer.encode(text, special=not chat)
        how = {"dtype": dtype, "backend": backend, "mesh": devices, "dispatch": dispatch}
        model = load_model(folder, scheme=scheme, **how)
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
        _report(f"{len(arrivals)} tokens, {rate:.1f} tokens/s after the second")


@app.command("eval")
@reporting_errors
@over_devices
def eval_command(
    *,
    devices: Mesh | None,
    path: Folder,
    text: Annotated[pathlib.Path, typer.Option(help="Text to predict, UTF-8.")],
    window: Annotated[int, typer.Option(help="Tokens in a window, each on its own.")] = 512,
    skip_tokens: Annotated[int, typer.Option(help="Leading tokens to leave out.")] = 0,
    max_windows: Annotated[int | None, typer.Option(help="At most so many windows.")] = None,
    by_window: Annotated[
        bool, typer.Option("--by-window", help="Each window's figures too, and a table of them.")
    ] = False,
    original: Annotated[
        pathlib.Path | None, typer.Option(help="Unquantized checkpoint, to compare with.")
    ] = None,
    scheme: SchemesOption = None,
    dtype: DtypeOption = "float32",
    backend: BackendOption = None,
    dispatch: ExchangeOption = "psum",
) -> None:
    """Print the mean cross-entropy and the perplexity on a text, a JSON object for each scheme.

    In float32 unless asked otherwise, as quantization tools state theirs.
    """
    how = {"dtype": dtype, "mesh": devices, "dispatch": dispatch}
    runs = [(path, {"scheme": one, "backend": backend, **how}) for one in _each(scheme)]
    if original is not None:
        check_original(path, original)
        runs.insert(0, (original, how))
    ids = load_tokenizer(path).encode(_read_text(text))
    windows = {"window": window, "skip_tokens": skip_tokens, "max_windows": max_windows}
    results = {}
    for folder, options in runs:
        used, result = _evaluate(folder, options, ids, windows)
        name = "original" if folder is original else options["scheme"] or used or "not quantized"
        results[name] = result
        shown = {"path": str(folder), "scheme": used, **result}
        hidden = () if by_window else ("cross_entropies", "perplexities")
        print(json.dumps({k: v for k, v in shown.items() if k not in hidden}), flush=True)
    if by_window:
        _report("\n".join(table(window_rows(results))))
    if len(results) > 1:
        _report("\n".join(table(summary_rows(results))))


def _evaluate(folder, options, ids, windows):
    """Return the scheme of a model, None of one without NVFP4, and what `evaluate` says of it.

    The model is freed on the way out: one at a time is in memory.
    """
    model = load_model(folder, **options)
    used = sorted({str(problem.scheme) for _, problem, *_ in model.nvfp4_problems()})
    label = " and ".join(used)
    start = time.perf_counter()
    with _progress(f"windows, {label or folder.name}") as progress:
        result = evaluate(model, ids, **windows, by_window=True, progress=progress)
    tokens = result["windows"] * result["window"]
    _report(f"{tokens} tokens, {tokens / (time.perf_counter() - start):.0f} tokens/s")
    return label or None, result


@app.command("quantize")
@reporting_errors
def quantize_command(
    source: Annotated[pathlib.Path, typer.Argument(help="Folder of an unquantized checkpoint.")],
    destination: Annotated[pathlib.Path, typer.Argument(help="Folder to write; new or empty.")],
    text: Annotated[
        pathlib.Path | None, typer.Option(help="Calibration text, UTF-8; w4a4 needs one.")
    ] = None,
    calibration_tokens: Annotated[int, typer.Option(help="Leading tokens that are used.")] = 4096,
    window: Annotated[int, typer.Option(help="Tokens in a window, each on its own.")] = 512,
    scheme: Annotated[
        str | None, typer.Option(help="w4a4 or w4a16; w4a4 where there is a text.")
    ] = None,
    form: Annotated[str, typer.Option(help="modelopt or compressed-tensors.")] = "modelopt",
    modules: Annotated[str, typer.Option(help="all or experts.")] = "all",
    exclude: Annotated[
        list[str] | None, typer.Option(help="Module to leave alone; wildcards; repeatable.")
    ] = None,
    algorithm: Annotated[str, typer.Option(help="max, search, four_or_six, ...")] = "max",
    dtype: Annotated[
        str | None, typer.Option(help="Of what is not quantized; as it is by default.")
    ] = None,
    shard_gb: Annotated[float, typer.Option(help="Largest file in GB.")] = 5.0,
) -> None:
    """Quantize a checkpoint to NVFP4; print what was done as one JSON object."""
    ids = None
    if text is not None:
        ids = load_tokenizer(source).encode(_read_text(text))
        if not 1 <= calibration_tokens <= len(ids):
            raise ValueError(
                f"calibration_tokens: expected 1 to {len(ids)}, the tokens of {text}; got "
                f"{calibration_tokens}"
            )
        ids = ids[:calibration_tokens]
    result = quantize_model(
        source,
        destination,
        token_ids=ids,
        scheme=scheme,
        form=form,
        modules=modules,  # type: ignore[arg-type] - checked there
        exclude=exclude or (),
        algorithm=algorithm,
        window=window,
        dtype=dtype,
        shard_bytes=int(min(max(shard_gb, 0.0), 1e9) * 1e9),
    )
    print(json.dumps(result))


@app.command("bench")
@reporting_errors
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
    rows = layer_times(
        counts,
        experts=experts,
        hidden=hidden,
        intermediate=intermediate,
        top_k=top_k,
        scheme=scheme,
        dtype=dtype,
        backend=backend,
    )
    print("\n".join(table(rows)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; an error that a user can mend is one message and exit status 2.

    Args:
      arguments: without the program's name; those of the process where None.
    """
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    logging.getLogger("jax_nvfp4_moe").setLevel(logging.INFO)
    given = list(sys.argv[1:] if arguments is None else arguments)
    with distributed.leaving_at_once():
        app(args=given, obj=given)  # commands find the arguments in the context


def _each(schemes: list[str] | None) -> list[str | None]:
    """Return the schemes that the user asks for, each once; None alone where they name none."""
    return [*dict.fromkeys(schemes or [None])]


def _only_with_errors(**options):
    given = [f"--{name}" for name, value in options.items() if value]
    if given:
        raise ValueError(f"{', '.join(given)}: expected together with --errors")


def _sample(path, text, tokens) -> tuple[np.ndarray, list[str] | None]:
    """Return the first tokens of a text, and each as text; random ones without a tokenizer."""
    if tokens < 1:
        raise ValueError(f"tokens: expected at least 1, got {tokens}")
    if text is None and not (find_folder(path) / TOKENIZER).exists():
        _say(f"{path} has no {TOKENIZER}: {tokens} random token ids")
        size = abstract_model(path).model.config.vocab_size
        return np.random.default_rng(0).integers(0, size, tokens), None
    tokenizer = load_tokenizer(path)
    if text is None:  # Python source that is always there
        source = importlib.resources.files("jax_nvfp4_moe") / "numerics" / "nvfp4.py"
        said = source.read_text(encoding="utf-8")
    else:
        said = _read_text(text)
    ids = tokenizer.encode(said)[:tokens]
    return ids, [tokenizer.decode([token]) for token in ids]


def _read_text(path) -> str:
    path = path.expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text in UTF-8, got {error}") from None


def _report(message):
    """Say what is worth saying once, however many processes there are."""
    if distributed.is_first():
        _say(message)


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
    if not (sys.stderr.isatty() and distributed.is_first()):
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
