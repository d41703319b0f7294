"""Time llama.cpp on a CPU: a model of random NVFP4 weights, with the sizes of a Qwen3-MoE config.

    python benchmarks/peers/llama_model.py CONFIG --threads 2 --prompts 512 2048 --batches 1 8

It needs the packages ``llama-cpp-python``, built from source for this CPU
(``CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python``), and ``gguf``. The program
`benchmarks/cpu_model.py` starts it with a Python that has both. `llama_gguf.py` makes the model, in
the formats of the checkpoint that the benchmark times beside it.

Prints one JSON object: seconds of each prefill and of each step of decoding, a list for each size.
"""

import argparse
import json
import pathlib
import sys
import tempfile
import time

import llama_cpp.llama_cpp as llama
import numpy as np
from llama_gguf import write_model

# llama.cpp keeps only the address of this function.
_SILENT = llama.llama_log_callback(lambda level, text, data: None)


def decode(context, batch, tokens, positions, sequences, last_only):
    """Run one batch of tokens, and wait for the logits."""
    batch.n_tokens = len(tokens)
    for index, (token, position, sequence) in enumerate(
        zip(tokens, positions, sequences, strict=True)
    ):
        batch.token[index] = int(token)
        batch.pos[index] = position
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = sequence
        batch.logits[index] = not last_only or index == len(tokens) - 1
    if llama.llama_decode(context, batch):
        raise SystemExit("llama_decode failed")
    llama.llama_synchronize(context)


def make_context(model, arguments, length, sequences):
    parameters = llama.llama_context_default_params()
    parameters.n_ctx = length * sequences
    parameters.n_batch = parameters.n_ubatch = max(length, 32)
    parameters.n_seq_max = sequences
    parameters.n_threads = parameters.n_threads_batch = arguments.threads
    context = llama.llama_init_from_model(model, parameters)
    if not context:
        raise SystemExit("llama.cpp could not make a context")
    return context


def time_prefill(model, arguments, length, vocab):
    context = make_context(model, arguments, length, 1)
    batch = llama.llama_batch_init(length, 0, 1)
    rng, seconds = np.random.default_rng(0), []
    for _ in range(arguments.rounds + 1):  # the first is not counted
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        tokens = rng.integers(0, vocab, length)
        start = time.perf_counter()
        decode(context, batch, tokens, range(length), [0] * length, last_only=True)
        seconds.append(time.perf_counter() - start)
    llama.llama_batch_free(batch)
    llama.llama_free(context)
    return seconds[1:]


def time_decoding(model, arguments, rows, vocab):
    prompt, steps = arguments.prompt, arguments.steps
    context = make_context(model, arguments, prompt + steps, rows)
    batch = llama.llama_batch_init(max(prompt, rows), 0, rows)
    rng, seconds = np.random.default_rng(0), []
    for row in range(rows):
        tokens = rng.integers(0, vocab, prompt)
        decode(context, batch, tokens, range(prompt), [row] * prompt, last_only=True)
    for step in range(steps):
        tokens = rng.integers(0, vocab, rows)
        start = time.perf_counter()
        decode(context, batch, tokens, [prompt + step] * rows, range(rows), last_only=False)
        seconds.append(time.perf_counter() - start)
    llama.llama_batch_free(batch)
    llama.llama_free(context)
    return seconds[4:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=pathlib.Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--prompts", type=int, nargs="*", default=[])
    parser.add_argument("--batches", type=int, nargs="*", default=[])
    parser.add_argument("--prompt", type=int, default=128, help="tokens before the timed steps")
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    config = json.loads(arguments.config.read_text(encoding="utf-8"))
    vocab = config["vocab_size"]
    llama.llama_log_set(_SILENT, None)
    llama.llama_backend_init()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.gguf"
        write_model(path, config)
        parameters = llama.llama_model_default_params()
        parameters.use_mmap = False
        model = llama.llama_model_load_from_file(str(path).encode(), parameters)
    if not model:
        raise SystemExit("llama.cpp could not load the model")
    result = {
        "prefill": {n: time_prefill(model, arguments, n, vocab) for n in arguments.prompts},
        "decode": {n: time_decoding(model, arguments, n, vocab) for n in arguments.batches},
    }
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
