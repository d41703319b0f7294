"""`python -m tests.reference.compare references/*`: this package against what the tools computed.

Needs jax and no torch. Prints one line of Markdown for each checkpoint, with four relative errors:
routed experts and whole MoE blocks, each the largest over all layers and on the tool's own input;
logits, as rms over rms; and decoding token by token with a cache against the whole prompt at once.
"""

import json
import pathlib
import struct
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jax_nvfp4_moe import CheckpointError, load_model, load_moe

EXACT = {"scheme": "checkpoint", "dtype": jnp.float32, "backend": "reference"}
DTYPES = {"F32": np.float32, "I64": np.int64}


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Read the tensors of a safetensors file that holds float32 and int64."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            first, last = (8 + length + offset for offset in entry["data_offsets"])
            values = np.frombuffer(data[first:last], DTYPES[entry["dtype"]])
            tensors[name] = values.reshape(entry["shape"])
    return tensors


def relative(actual: jax.Array, expected: np.ndarray) -> float:
    """Return |actual - expected| / |expected| in Euclidean norms."""
    difference = np.asarray(actual, np.float64).reshape(expected.shape) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


def compare(folder: pathlib.Path) -> list[float]:
    """Return the errors of experts, blocks, logits and decoding."""
    tensors = read(folder / "reference.safetensors")
    ids = jnp.asarray(tensors["input_ids"], jnp.int32)
    experts, blocks = [0.0], [0.0]
    for layer in sorted({int(n.split(".")[1]) for n in tensors if n.endswith(".moe.input")}):
        given = {n.split(".moe.")[1]: v for n, v in tensors.items() if f"s.{layer}.moe." in n}
        moe = load_moe(folder, layer, **EXACT)
        names = ("experts_input", "topk_indices", "topk_weights", "input")
        x, expert_ids, weights, block_x = (jnp.asarray(given[name]) for name in names)
        routed = moe.experts(x, expert_ids.astype(jnp.int32), weights)
        experts.append(relative(routed, given["experts_output"]))
        blocks.append(relative(moe(block_x, ids), given["output"]))
    model = load_model(folder, **EXACT)
    whole = jax.jit(lambda model, ids: model(ids))(model, ids)
    errors = [max(experts), max(blocks), relative(whole, tensors["logits"])]
    step = jax.jit(lambda model, ids, cache: model(ids, cache))
    cache, pieces, half = model.init_cache(*ids.shape), [], ids.shape[1] // 2
    for piece in (ids[:, :half], *jnp.split(ids[:, half:], ids.shape[1] - half, axis=1)):
        logits, cache = step(model, piece, cache)
        pieces.append(logits)
    decoded = jnp.concatenate(pieces, axis=1)
    return [*errors, relative(decoded, np.asarray(whole))]


def main(folders: list[str]) -> int:
    """Print the table, and return how many checkpoints did not load."""
    print("| checkpoint | experts | blocks | logits | decoding |\n| --- | --- | --- | --- | --- |")
    failed = 0
    for folder in map(pathlib.Path, folders):
        try:
            cells = [f"{error:.1e}" for error in compare(folder)]
        except (CheckpointError, ValueError) as error:
            cells, failed = [" ".join(str(error).split())[:200]], failed + 1
        print("|", " | ".join([folder.name, *cells]), "|", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
