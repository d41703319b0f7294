"""Time transformers in bfloat16: a model of random weights, with the sizes of a Qwen3-MoE config.

    python benchmarks/peers/transformers_model.py CONFIG --cells 1x128 16x128 --new 64

It needs torch and ``transformers``. A prompt is one call of the model without a mask, so that the
attention is causal and fused, for as many rows at once as `_TOKENS_AT_ONCE` allows. Steps use a
`StaticCache`. A step is captured in one CUDA graph; on a CPU, or if the capture fails, it runs
eagerly. Of `_EXPERTS`, the two implementations of experts that `generate` of transformers uses, the
faster in a short trial is timed.

Prints one JSON object: the device, the method, and a row for each cell.
"""

import argparse
import json
import pathlib
import sys
import time

import torch
import transformers

_EXPERTS = ("grouped_mm", "batched_mm")
_PREFILLS = 2
_TRIAL_STEPS = 4
_TOKENS_AT_ONCE = 1 << 14
_FAILED = []  # graphs whose capture failed: torch aborts the process if it frees one


def make_model(config, device):
    """Make the model on the meta device, then fill its weights on `device`."""
    config = transformers.Qwen3MoeConfig(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model = model.to_empty(device=device).eval()
    rotary = model.model.rotary_emb  # its buffers are no weights, and are empty now
    with torch.device(device):
        model.model.rotary_emb = type(rotary)(model.config)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, weight.shape[-1] ** -0.5)
        else:
            weight.fill_(1)
    return model


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def read_prompts(model, prompts, cache=None):
    """Return the first new token of each row, and store keys and values in a static `cache`."""
    firsts, at_once = [], max(1, _TOKENS_AT_ONCE // prompts.shape[1])
    for begin in range(0, len(prompts), at_once):
        rows = slice(begin, begin + at_once)
        read = transformers.DynamicCache(config=model.config)
        logits = model(prompts[rows], past_key_values=read, logits_to_keep=1).logits
        firsts.append(logits[:, -1:].argmax(-1))
        for source, target in zip(read.layers, cache.layers if cache else (), strict=bool(cache)):
            target.keys[rows, :, : prompts.shape[1]] = source.keys
            target.values[rows, :, : prompts.shape[1]] = source.values
    return torch.cat(firsts)


class Steps:
    """Steps of decoding from a filled cache."""

    def __init__(self, model, prompts, new):
        """Fill a cache with room for `new` more tokens."""
        self._model, self._length = model, prompts.shape[1]
        batch, device, config = len(prompts), prompts.device, model.config
        room = self._length + new
        self._cache = transformers.StaticCache(config=config, max_cache_len=room)
        self._cache.early_initialization(
            batch_size=batch,
            num_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=model.dtype,
            device=device,
        )
        self._slots = torch.arange(room, device=device)
        self._first = read_prompts(model, prompts, self._cache)
        self._token = self._first.clone()
        self._position = torch.empty((1, 1), dtype=torch.int64, device=device)
        self._graph = None

    def capture(self):
        """Record a step as a CUDA graph, and return the reason if that fails."""
        self.run(2)  # libraries choose their kernels and allocate outside the capture
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._step()
        except RuntimeError as error:
            _FAILED.append(graph)
            return str(error).splitlines()[0]
        self._graph = graph
        return None

    def run(self, steps):
        """Return the seconds that a step takes."""
        self._token.copy_(self._first)
        self._position.fill_(self._length)
        for layer in self._cache.layers:
            layer.cumulative_length.fill_(self._length)
        replay = self._graph.replay if self._graph else self._step
        synchronize(self._token.device.type)
        start = time.perf_counter()
        for _ in range(steps):
            replay()
        synchronize(self._token.device.type)
        return (time.perf_counter() - start) / steps

    def _step(self):
        logits = self._model(
            self._token,
            position_ids=self._position,
            attention_mask=(self._slots <= self._position)[None, None],
            past_key_values=self._cache,
        ).logits
        self._token.copy_(logits[:, -1:].argmax(-1))
        self._position.add_(1)


def time_prompts(model, prompts):
    """Return the seconds of each run but the first."""
    seconds = []
    for _ in range(_PREFILLS + 1):
        synchronize(prompts.device.type)
        start = time.perf_counter()
        read_prompts(model, prompts)
        synchronize(prompts.device.type)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def time_steps(model, prompts, arguments):
    """Return the figures of the faster implementation of the experts."""
    steps, trials = Steps(model, prompts, arguments.new), {}
    for name in _EXPERTS:
        model.set_experts_implementation(name)
        try:
            steps.run(_TRIAL_STEPS)
            trials[name] = steps.run(_TRIAL_STEPS)
        except torch.OutOfMemoryError:  # batched_mm copies the weights of each token's experts
            torch.cuda.empty_cache()
    if not trials:
        raise torch.OutOfMemoryError("no implementation of the experts has room")
    fastest = min(trials, key=trials.get)
    model.set_experts_implementation(fastest)
    failure = steps.capture() if arguments.device == "cuda" else "there are none on a CPU"
    how = f"eager (no CUDA graph: {failure})" if failure else "CUDA graph"
    steps.run(arguments.new - 1)
    seconds = [steps.run(arguments.new - 1) for _ in range(arguments.rounds)]
    return {"experts": fastest, "eager_s": trials, "steps": how, "step_s": seconds}


def time_cell(model, cell, arguments):
    batch, length = map(int, cell.split("x"))
    row = {"batch": batch, "prompt": length}
    prompts = torch.randint(
        model.config.vocab_size,
        (batch, length),
        generator=torch.Generator().manual_seed(batch),
    ).to(arguments.device)
    model.set_experts_implementation(_EXPERTS[0])
    try:
        row["first_token_s"] = time_prompts(model, prompts)
        if arguments.new > 1:
            row |= time_steps(model, prompts, arguments)
    except torch.OutOfMemoryError as error:
        row["error"] = str(error).splitlines()[0]
    return row


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=pathlib.Path)
    parser.add_argument("--cells", nargs="+", required=True, metavar="BATCHxPROMPT")
    parser.add_argument("--new", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    model = make_model(json.loads(arguments.config.read_text(encoding="utf-8")), arguments.device)
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    rows = [time_cell(model, cell, arguments) for cell in arguments.cells]
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    result = {"device": name, "method": "bfloat16 weights and cache", "versions": versions}
    json.dump(result | {"rows": rows}, sys.stdout)


if __name__ == "__main__":
    main()
