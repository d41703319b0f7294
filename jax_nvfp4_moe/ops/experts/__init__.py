"""Expert layers and grouped GEMMs with NVFP4 weights: what they compute, and their kernels."""
