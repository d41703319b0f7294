"""Pure functions and pytrees for number formats, weights, routers and activations."""
