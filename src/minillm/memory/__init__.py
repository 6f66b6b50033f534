"""Device memory: the paged KV cache and the host swap space."""
