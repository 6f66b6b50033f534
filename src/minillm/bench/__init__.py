"""Benchmarks: each a `minillm bench NAME`."""
