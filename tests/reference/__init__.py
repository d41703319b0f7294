"""Tiny checkpoints that the real tools write, with what transformers computes from them."""
