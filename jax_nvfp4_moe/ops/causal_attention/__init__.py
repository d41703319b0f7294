"""`attention`: causal attention to the keys and values of all positions so far."""
