"""Layers with experts: the router, the routed experts, and gated MLPs."""
