"""What a backend is, how one is chosen for an op, and how its kernels are called."""
