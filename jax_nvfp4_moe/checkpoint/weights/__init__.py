"""Find the tensors of linears, norms and caches in the headers, in any format."""
