"""Recurrent mixers: the ops of their decoding steps, and of their recurrences over prompts."""
