"""The command `jax-nvfp4-moe`."""
