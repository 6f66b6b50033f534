"""The engine: step loop, runtime thread, text output."""
