"""Attention over paged KV: the reference, and the fast path of each device."""
