"""``python -m jax_nvfp4_moe``: the command line."""

from jax_nvfp4_moe.cli.app import main

main()
