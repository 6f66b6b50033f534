"""A server for `minillm bench serve`: ``python -m minillm.bench.serve_target MODEL DEVICE DTYPE [NAME=JSON ...]``.

Takes the model names of the other programs (`random:tiny` too) and fields of `EngineConfig`, prints its URL in one
line, and ends on SIGTERM.
"""

from __future__ import annotations

import json
import sys


def main(model: str, device: str, dtype: str, *fields: str) -> None:
    """Serve until a signal."""
    from minillm import EngineConfig, Runtime
    from minillm.bench.models import open_model
    from minillm.bench.random_tokenizer import random_tokenizer
    from minillm.engine.factory import build_engine
    from minillm.server.app import create_app
    from minillm.server.config import ServerConfig
    from minillm.server.lifecycle import address, listen, serve
    from minillm.server.metrics import EngineMetrics

    config = ServerConfig(port=0, grace=5.0)
    with listen(config) as listener:
        loaded = open_model(model, dtype, device)
        tokenizer = random_tokenizer(loaded.config.vocab_size) if loaded.kind == "random" else None
        options = {name: json.loads(value) for name, _, value in (field.partition("=") for field in fields)}
        engine = EngineConfig(model, dtype=dtype, device=device, **{"max_waiting": 100_000, **options})
        metrics = EngineMetrics()
        parts = build_engine(engine, observer=metrics, model=loaded, tokenizer=tokenizer)
        with Runtime(parts=parts) as runtime:
            app = create_app(runtime, config, metrics)
            serve(app, listener, on_ready=lambda: print(address(listener), flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
