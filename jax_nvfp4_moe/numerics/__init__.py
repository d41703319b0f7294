"""Number formats, weights, routers and activations: pure functions and pytrees."""
