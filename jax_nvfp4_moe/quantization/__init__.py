"""Quantize checkpoints: calibration, the selection of matrices, the pipeline, and layer errors."""
