"""Experts and layers on a mesh of devices with the axes `expert` and `tensor`."""

from jax_nvfp4_moe.parallel.dispatch import DISPATCHES, run_dispatched, share_rows
from jax_nvfp4_moe.parallel.expert_mesh import ExpertMesh, find_expert_mesh
from jax_nvfp4_moe.parallel.experts import run_sharded, shard_experts
from jax_nvfp4_moe.parallel.peers import connect_peers
from jax_nvfp4_moe.parallel.whole_steps import start_together

__all__ = [
    "DISPATCHES",
    "ExpertMesh",
    "connect_peers",
    "find_expert_mesh",
    "run_dispatched",
    "run_sharded",
    "shard_experts",
    "share_rows",
    "start_together",
]
