"""Time one expert layer over the devices of this process. `parallel.py` starts this program.

python -m sharded_layer --case qwen3-30b-a3b --tokens 1 16 --devices 2 [--form psum all_to_all]
"""

import functools

import contestant
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from layer import PER_CALL, call_operands, random_params
from moe_cases import FORMS, Case, draw_ids

import jax_nvfp4_moe as nvfp4
from jax_nvfp4_moe.backends import _ffi
from jax_nvfp4_moe.cli.timing import time_program
from jax_nvfp4_moe.ops.preparation import find_checkpoint_scheme, plan_experts
from jax_nvfp4_moe.parallel import ExpertMesh, connect_peers, run_dispatched, shard_experts
from jax_nvfp4_moe.parallel.dispatch import choose_wire_format
from jax_nvfp4_moe.parallel.whole_steps import from_first_device
from jax_nvfp4_moe.scheme import Scheme


def make_grid(form: str, devices: int, peers: bool) -> ExpertMesh:
    shape = (1, devices) if form == "tensor" else (devices, 1)
    kinds = (AxisType.Auto,) * 2
    grid = np.array(jax.devices()[:devices]).reshape(shape)
    mesh = ExpertMesh(Mesh(grid, ("expert", "tensor"), axis_types=kinds))
    return connect_peers(mesh, timeout=60.0) if peers else mesh


def sent_bytes(form, case, tokens, devices, scheme) -> float:
    """Return the bytes that a device sends in one call.

    "psum" and "tensor" count a ring all-reduce of float32. "all_to_all" sends as many rows to every
    other device as a device has tokens. "ragged" sends the rows that the ids of the timed calls
    need; the figure is the mean over devices and calls.
    """
    if form in ("psum", "tensor"):
        return 2 * (devices - 1) / devices * 4 * tokens * case.hidden
    row = {"hidden": case.hidden, "top_k": case.top_k, "dtype": jnp.bfloat16}
    wire = choose_wire_format(scheme, **row, shards=devices, rounds=False)
    own = -(-tokens // devices)
    rows = (devices - 1) * own  # the room for all own tokens, on each other device
    if form == "ragged":
        rows = _needed_rows(case, tokens, devices, own)
    return rows * (wire.row_bytes(**row) + 2 * case.hidden)


def _needed_rows(case, tokens, devices, own) -> float:
    owner = draw_ids(case, tokens) // (case.experts // devices)  # [calls, t, k]
    home = np.arange(tokens)[None, :, None] // own
    away = owner != home
    visits = (owner[..., None] == np.arange(devices)) & away[..., None]
    return float(visits.any(axis=2).sum() / len(owner) / devices)


def make_layer(form: str, devices: int, scheme: Scheme, peers: bool, case: Case):
    """Return a function from a number of tokens to the figures of one form."""
    expert_mesh = make_grid(form, devices, peers)
    how = {"scheme": scheme, "target": expert_mesh.target}
    whole = random_params(case)
    local = {"top_k": case.top_k, "shards": (expert_mesh.expert, expert_mesh.tensor)}
    plan = plan_experts(whole, checkpoint_scheme=find_checkpoint_scheme(whole), **how, **local)
    experts = shard_experts(whole, expert_mesh, layout=plan.layout)
    one = nvfp4.prepare(whole, **how)
    del whole
    run_one = functools.partial(nvfp4.ops.moe_mlp, activation=case.activation, **how)
    dispatch = "psum" if form == "tensor" else form
    split = PartitionSpec() if dispatch == "psum" else PartitionSpec("expert")

    def over(run):
        how = {"expert_mesh": expert_mesh, "dispatch": dispatch, "scheme": scheme}
        return functools.partial(run_dispatched, run, **how)

    def time_tokens(tokens):
        padded = -(-tokens // devices) * devices if dispatch != "psum" else tokens
        xs, ids, weights = call_operands(case, tokens)
        if padded > tokens:
            fill = [(0, padded - tokens), (0, 0)]
            xs = [jnp.pad(x, fill) for x in xs]
            ids = [jnp.pad(one_call, fill, constant_values=-1) for one_call in ids]
            weights = jnp.pad(weights, fill)
        placed = jax.device_put((xs, ids, weights), NamedSharding(expert_mesh.mesh, split))
        kept = jax.device_put((xs, ids, weights), jax.devices()[0])
        figures, y = time_layer(over(run_one), experts, *placed, mesh=expert_mesh)
        alone, expected = time_layer(run_one, one, *kept)
        exchange = over(lambda x, params, ids, weights: x)
        nothing, _ = time_layer(exchange, experts, *placed, mesh=expert_mesh)
        sent = sent_bytes(form, case, tokens, devices, scheme)
        y, expected = (np.asarray(each, np.float64) for each in (y, expected))
        return figures | {
            "one_device_us": alone["us"],
            "efficiency": alone["us"] / (devices * figures["us"]),
            "exchange_us": nothing["us"],
            "sent_bytes": sent,
            "wire_gb_per_s": sent / nothing["us"] * 1e-3,
            "difference": float(np.abs(y - expected).max() / np.abs(expected).max()),
        }

    return time_tokens


def time_layer(run, params, xs, ids, weights, mesh=None):
    """Time ``run(x, params, ids, weights)``; return the figures of one call, and its result.

    Connected GPUs start each program together, by a collective of XLA.
    """

    @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
    def program(outputs, params, xs, ids, weights):
        del outputs  # donated: the new outputs take their memory
        if mesh is not None and mesh.peers:
            xs = [x * from_first_device(jnp.ones((), x.dtype), mesh) for x in xs[:1]] + xs[1:]
        return [run(x, params, chosen, weights) for x, chosen in zip(xs, ids, strict=True)]

    last = []

    def step(outputs):
        last[:] = program(outputs, params, xs, ids, weights)
        return list(last)

    figures = time_program(step, [jnp.zeros_like(x) for x in xs])
    return figures | {name: figures[name] / len(xs) for name in PER_CALL}, last[0]


def main():
    parser = contestant.parser(__doc__)
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--form", nargs="+", default=FORMS, choices=FORMS)
    parser.add_argument("--scheme", nargs="+", default=[Scheme.W4A16], type=Scheme)
    parser.add_argument("--peers", action="store_true")
    arguments = parser.parse_args()
    here = nvfp4.Target.current()
    _ffi.load("_nvfp4_cuda" if here.platform == "cuda" else "_nvfp4_cpu")
    contestant.emit(device=jax.devices()[0].device_kind, devices=arguments.devices)
    for scheme in arguments.scheme:
        for form in arguments.form:
            make = functools.partial(make_layer, form, arguments.devices, scheme, arguments.peers)
            name = f"{form}{'+peers' * arguments.peers} {scheme} x{arguments.devices}"
            contestant.time_cells(name, arguments.case, arguments.tokens, make)


if __name__ == "__main__":
    main()
