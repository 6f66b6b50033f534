"""The scheduling core: a deterministic state machine in pure Python (imports no torch)."""
