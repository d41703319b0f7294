"""Run the dense model with the tools' roundings, and record every mixture of experts."""

import contextlib
import dataclasses
import sys
import unittest.mock
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode

from tests.reference.dense import Dense, check_pair
from tests.reference.rounding import Rounding

PRODUCTS = (
    torch.nn.functional.linear,
    torch.bmm,
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
)
# Blocks that multiply the output of their experts by `routed_scaling_factor`.
SCALED_AFTER = ("MiniMaxM3VLSparseMoeBlock", "Step3p7SparseMoeBlock", "LagunaSparseMoeBlock")
GATE_AND_UP = (("gate_proj.weight", "up_proj.weight"), ("w1.weight", "w3.weight"))


def key(weight: torch.Tensor) -> bytes:
    """Return the values of a weight as bytes, which identify it under any name and place."""
    return weight.detach().contiguous().numpy().tobytes()


def known_by_value(dense: Dense) -> dict[bytes, Rounding]:
    """Return weight -> rounding. Gate and up also count as the one matrix that transformers makes.

    Raises:
        ValueError: gate and up round the same input differently.
    """
    known = {key(weight): activation for weight, activation in dense.stacked}
    for name, activation in dense.inputs.items():
        weight = dense.tensors[name]
        known[key(weight)] = activation
        for index in range(len(weight) if weight.ndim == 3 else 0):
            known[key(weight[index])] = activation
        for gate, up in GATE_AND_UP:
            other = name.removesuffix(gate) + up
            if name.endswith(gate) and other in dense.tensors:
                check_pair(dense, name, other)
                known[key(torch.cat([weight, dense.tensors[other]]))] = activation
    return known


class RoundInputs(TorchFunctionMode):
    """A mode in which a product with a quantized weight rounds its other operand first."""

    def __init__(self, model: torch.nn.Module, dense: Dense):
        super().__init__()
        known = known_by_value(dense)
        self.roundings: dict[tuple[int, torch.Size], Rounding] = {}
        self.used: set[tuple[int, torch.Size]] = set()
        for parameter in model.parameters():
            slices = [parameter, *(parameter if parameter.ndim == 3 else ())]
            for weight in slices:
                if weight.ndim > 1 and key(weight) in known:
                    self.roundings[weight.data_ptr(), weight.shape] = known[key(weight)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS and isinstance(args[1], torch.Tensor):
            place = (args[1].data_ptr(), args[1].shape)
            if place in self.roundings:
                self.used.add(place)
                args = (self.roundings[place](args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def rounded_cache(model: torch.nn.Module, dense: Dense) -> Iterator[None]:
    """Let attention see keys and values as a cache of 8 bits returns them.

    Raises:
        ValueError: a layer with a scale did not run the attention function that this replaces.
    """
    if not dense.cache:
        yield
        return
    attention = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "o_proj")]
    module = sys.modules[type(attention[0]).__module__]
    plain, seen = module.eager_attention_forward, set()

    def forward(layer: Any, query: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        seen.add(layer.layer_idx)
        k = dense.cache[layer.layer_idx, "k"](k)
        v = dense.cache[layer.layer_idx, "v"](v)
        return plain(layer, query, k, v, *args, **kwargs)

    with unittest.mock.patch.object(module, "eager_attention_forward", forward):
        yield
    if seen != {layer for layer, _ in dense.cache}:
        raise ValueError(f"expected rounded keys in {sorted(dense.cache)}, got layers {seen}.")


def first(value: Any) -> torch.Tensor:
    return value[0] if isinstance(value, tuple) else value


@dataclasses.dataclass
class Recorder:
    """Hooks that copy what passes through decoder layers, MoE blocks, routers and experts."""

    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    handles: list[Any] = dataclasses.field(default_factory=list)

    def attach(self, model: transformers.PreTrainedModel) -> None:
        layers = decoder_layers(model)
        for index, layer in enumerate(layers):
            self.hook(layer, self.output(f"layers.{index}.output"))
            for block in layer.modules():
                if type(block).__name__ == "Gemma4TextDecoderLayer" and block.enable_moe_block:
                    self.attach_gemma4(block, f"layers.{index}.moe")
                elif hasattr(block, "experts"):
                    self.attach_block(block, f"layers.{index}.moe")
            shared = getattr(layer, "shared_mlp", None)
            if shared is not None and getattr(layer, "has_experts", True):
                self.hook(shared, self.added(f"layers.{index}.moe.output"))

    def detach(self) -> None:
        for handle in self.handles:
            handle.remove()

    def hook(self, module: torch.nn.Module, function: Any, with_kwargs: bool = False) -> None:
        self.handles.append(module.register_forward_hook(function, with_kwargs=with_kwargs))

    def keep(self, name: str, value: torch.Tensor) -> None:
        self.tensors[name] = value.detach().clone().contiguous()

    def output(self, name: str) -> Any:
        return lambda module, args, out: self.keep(name, first(out))

    def added(self, name: str) -> Any:
        """Add the output of Granite's shared experts, which run after the block and outside it."""

        def add(module: Any, args: Any, out: Any) -> None:
            self.keep(name, self.tensors[name] + out)

        return add

    def attach_block(self, block: Any, name: str) -> None:
        def whole(module: Any, args: Any, kwargs: Any, out: Any) -> None:
            self.keep(f"{name}.input", args[0] if args else kwargs["hidden_states"])
            self.keep(f"{name}.output", first(out).reshape(self.tensors[f"{name}.input"].shape))

        self.hook(block, whole, with_kwargs=True)
        router = getattr(block, "gate", None) or block.router
        if type(block).__name__ == "Llama4TextMoe":
            self.hook(router, self.llama4_router(block, name))
            self.hook(block.experts, self.llama4_experts(block, name))
            return

        self.hook(router, self.output(f"{name}.router_logits"))
        after = block.routed_scaling_factor if type(block).__name__ in SCALED_AFTER else 1.0
        self.hook(block.experts, self.routed(name, after), with_kwargs=True)

    def routed(self, name: str, after: float = 1.0) -> Any:
        """Record the experts. Blocks that multiply their output by `after` scale the weights."""

        def kept(module: Any, args: Any, kwargs: Any, out: Any) -> None:
            x, ids, weights = [*args, *kwargs.values()][:3]
            self.keep(f"{name}.experts_input", x)
            self.keep(f"{name}.topk_indices", ids)
            self.keep(f"{name}.topk_weights", weights * after)
            self.keep(f"{name}.experts_output", out * after)

        return kept

    def attach_gemma4(self, layer: Any, name: str) -> None:
        """Record the block of a Gemma 4 layer, which has the parts of the block itself.

        The router's input is that of the block. The output of the block is the sum of the dense
        MLP and of the experts, which a norm reads.
        """

        def given(part: str) -> Any:
            return lambda module, args, out: self.keep(f"{name}.{part}", args[0])

        self.hook(layer.router, given("input"))
        self.hook(layer.router.proj, self.output(f"{name}.router_logits"))
        self.hook(layer.experts, self.routed(name), with_kwargs=True)
        self.hook(layer.post_feedforward_layernorm, given("output"))

    def llama4_router(self, block: Any, name: str) -> Any:
        """Record the experts' input before Llama 4 multiplies it by the router's weights."""

        def kept(module: Any, args: Any, out: Any) -> None:
            logits = out[1]
            values, indices = torch.topk(logits, block.top_k, dim=1)
            self.keep(f"{name}.experts_input", args[0])
            self.keep(f"{name}.router_logits", logits)
            self.keep(f"{name}.topk_indices", indices)
            self.keep(f"{name}.topk_weights", torch.sigmoid(values.float()))

        return kept

    def llama4_experts(self, block: Any, name: str) -> Any:
        def kept(module: Any, args: Any, out: Any) -> None:
            total = out.reshape(block.num_experts, -1, out.shape[-1]).sum(0)
            self.keep(f"{name}.experts_output", total)

        return kept


def decoder_layers(model: transformers.PreTrainedModel) -> Any:
    """Return the layers beside the token embeddings, because a vision tower has layers too."""
    table = model.get_input_embeddings()
    owners = [m for m in model.modules() if table in m.children() and hasattr(m, "layers")]
    return owners[0].layers


def run(
    model: transformers.PreTrainedModel, dense: Dense, input_ids: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return `input_ids`, `logits` and what `Recorder` keeps."""
    recorder = Recorder()
    recorder.attach(model)
    result = logits(model, dense, input_ids)
    recorder.detach()
    return {"input_ids": input_ids, "logits": result, **recorder.tensors}


def logits(
    model: transformers.PreTrainedModel, dense: Dense, input_ids: torch.Tensor
) -> torch.Tensor:
    """Return logits [b, t, v] with the tools' roundings.

    Raises:
        ValueError: a weight whose input is rounded was not found in the model.
    """
    rounder = RoundInputs(model, dense)
    with torch.no_grad(), rounder, rounded_cache(model, dense):
        result = model(input_ids, use_cache=False).logits
    there = {id(rounding) for rounding in rounder.roundings.values()}
    used = {id(rounder.roundings[place]) for place in rounder.used}
    ups = tuple(up for _, up in GATE_AND_UP)  # an expert's up is a part of gate's matrix
    missing = [
        name
        for name, rounding in dense.inputs.items()
        if id(rounding) not in (there if ".experts." in name else used)
        and not (".experts." in name and name.endswith(ups))
    ]
    missing += [tuple(w.shape) for w, rounding in dense.stacked if id(rounding) not in there]
    if missing:
        raise ValueError(f"expected products with these quantized weights: {missing}.")
    return result
