"""Token mixers that carry a state from token to token."""
