"""Training: low-rank adapters beside frozen weights, and their files."""
