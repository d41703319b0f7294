"""Quantize a model: calibration, choice of matrices, the pipeline, layer errors."""
