"""MiniLLM Runtime: a compact LLM inference and serving runtime."""
