"""Find the tensors of routed experts in the headers, under any names."""
