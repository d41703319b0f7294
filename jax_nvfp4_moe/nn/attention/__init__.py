"""Attention modules, their sparse forms, and the cache of keys and values."""
