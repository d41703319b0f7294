"""The subcommand `generate`: print a prompt and its continuation, token by token."""

import time
from typing import Annotated

import jax
import jax.numpy as jnp
import typer
from jax.sharding import Mesh

from jax_nvfp4_moe.cli.options import (
    BackendOption,
    DispatchOption,
    DraftOption,
    DraftTokensOption,
    DtypeOption,
    ModelPath,
    SchemeOption,
    SeedOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
    example_or,
    number,
    read_argument,
    read_drafting,
)
from jax_nvfp4_moe.cli.output import report, write
from jax_nvfp4_moe.cli.process_options import over_devices
from jax_nvfp4_moe.inference.drafting import layers_to_load
from jax_nvfp4_moe.inference.generation import stream
from jax_nvfp4_moe.inference.tokenizer import load_tokenizer
from jax_nvfp4_moe.models.loading import load_model

PROMPT = "import jax\nimport jax.numpy as jnp\n\n\ndef softmax("
_NEW_TOKENS = 128


@over_devices
def generate_command(
    *,
    devices: Mesh | str,
    path: ModelPath = None,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = PROMPT,
    max_new_tokens: Annotated[
        int | None,
        number(
            help="Number of tokens to generate; by default 128, or fewer if the model has fewer "
            "positions left."
        ),
    ] = None,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = None,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Send the prompt as a chat message of the user; print only the answer."
        ),
    ] = False,
    scheme: SchemeOption = None,
    dtype: DtypeOption = "bfloat16",
    backend: BackendOption = None,
    dispatch: DispatchOption = "psum",
    draft: DraftOption = None,
    draft_tokens: DraftTokensOption = "auto",
) -> None:
    """Print a prompt and its continuation, token by token."""
    prompt = read_argument("prompt", prompt)
    with example_or(path) as folder:
        tokenizer = load_tokenizer(folder)
        text = tokenizer.chat([{"role": "user", "content": prompt}]) if chat else prompt
        ids = tokenizer.encode(text, special=not chat)
        how = {"dtype": dtype, "backend": backend, "mesh": devices, "dispatch": dispatch}
        model = load_model(folder, scheme=scheme, draft=layers_to_load(draft), **how)
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
            **read_drafting(draft, draft_tokens),
        ):
            arrivals.append(time.perf_counter())
            yield token[0]

    # A continuation keeps the space before its first word. An answer begins without one.
    pieces = tokenizer.decode_stream(tokens(), () if chat else ids)
    first = next(pieces, "")  # an error in the arguments must come before any output
    for piece in (*([] if chat else [text]), first):
        write(piece)
    for piece in pieces:
        write(piece)
    write("\n")
    # The first two tokens wait for compilations, so they are not part of the speed.
    if len(arrivals) > 2:
        rate = (len(arrivals) - 2) / (arrivals[-1] - arrivals[1])
        report(f"{len(arrivals)} tokens, {rate:.1f} tokens/s after the second token")
