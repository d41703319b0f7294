"""The command line, `jax-nvfp4-moe`."""
