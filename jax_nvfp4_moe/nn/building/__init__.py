"""Building of a model without its weights, and filling it from a checkpoint."""
