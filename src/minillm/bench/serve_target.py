"""A server for `minillm bench serve` to measure: ``python -m minillm.bench.serve_target MODEL DEVICE DTYPE``.

Takes the model names of the other programs (`random:tiny` too), prints its URL in one line, and ends on SIGTERM.
"""

from __future__ import annotations

import sys


def main(model: str, device: str, dtype: str) -> None:
    """Serve until a signal."""
    from minillm import EngineConfig, Runtime
    from minillm.bench.models import open_model
    from minillm.bench.random_tokenizer import random_tokenizer
    from minillm.engine.factory import build_engine
    from minillm.server.app import create_app
    from minillm.server.config import ServerConfig
    from minillm.server.lifecycle import address, listen, serve

    config = ServerConfig(port=0, grace=5.0)
    with listen(config) as listener:
        loaded = open_model(model, dtype, device)
        tokenizer = random_tokenizer(loaded.config.vocab_size) if loaded.kind == "random" else None
        engine = EngineConfig(model, dtype=dtype, device=device, max_waiting=100_000)
        with Runtime(parts=build_engine(engine, model=loaded, tokenizer=tokenizer)) as runtime:
            serve(create_app(runtime, config), listener, on_ready=lambda: print(address(listener), flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
