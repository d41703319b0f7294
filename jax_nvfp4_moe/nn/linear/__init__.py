"""Linear layers: NVFP4, FP8 or not quantized, merged, and with scaled inputs."""
