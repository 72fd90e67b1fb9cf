"""Speculative decoding: drafted tokens that the model verifies in one pass."""
