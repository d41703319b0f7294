"""Experts and layers over the devices of a mesh with axes named `expert` and `tensor`."""

from jax_nvfp4_moe.parallel.exchange import EXCHANGES, run_exchanged, share_rows
from jax_nvfp4_moe.parallel.experts import ShardedExperts, run_sharded, shard_experts
from jax_nvfp4_moe.parallel.grid import Grid, find_grid

__all__ = [
    "EXCHANGES",
    "Grid",
    "ShardedExperts",
    "find_grid",
    "run_exchanged",
    "run_sharded",
    "shard_experts",
    "share_rows",
]
