"""`minillm serve`: the OpenAI-compatible server."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from minillm.cli import console
from minillm.cli.options import ENGINE, Options, with_options
from minillm.cli.session import open_runtime
from minillm.core.errors import ConfigError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
DEFAULT_MAX_WAITING = 1024


def parse_size(text: str) -> int:
    """Bytes of a size such as 8MiB, 512K or 1000."""
    match = re.fullmatch(r"(\d{1,15})\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"max_body_size={text!r} is not a size; write for example 8MiB")
    return int(match[1]) * _UNITS[match[2].upper()]


def parse_range(text: str) -> tuple[int, int]:
    """LOW:HIGH as two integers."""
    match = re.fullmatch(r"([+-]?\d{1,19}):([+-]?\d{1,19})", text.strip())
    if match is None:
        raise ConfigError(f"priority_range={text!r} is not a range; write LOW:HIGH, for example -10:10")
    return int(match[1]), int(match[2])


@with_options(engine=ENGINE)
def serve(
    engine: Options,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 8000,
    uds: Annotated[str | None, typer.Option(help="Unix socket to listen on instead.")] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="MINILLM_API_KEY",
            show_envvar=True,
            help="Key that clients must send; may be repeated. In the environment it is not in the list of processes.",
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name of the model for clients; may be repeated. Default: --model.")
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may wait; one more is told 429 and when to come again.")
    ] = DEFAULT_MAX_WAITING,
    max_body_size: Annotated[str, typer.Option(help="Largest body of a request.")] = "8MiB",
    priority_range: Annotated[
        str, typer.Option(help="LOW:HIGH that clients' priority is clamped to; lower runs first.")
    ] = "0:100",
    grace: Annotated[float, typer.Option(help="Seconds for running requests after SIGTERM or Ctrl-C.")] = 30.0,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may call the server; may be repeated.")
    ] = None,
    show_prompts: Annotated[
        bool,
        typer.Option(
            "--show-prompts", help="Show texts of live requests in /v1/requests/ID/explain and on the dashboard."
        ),
    ] = False,
    metrics_prefix: Annotated[str, typer.Option(help="First part of the metrics' names: vllm or minillm.")] = "vllm",
) -> None:
    """Serve a model over HTTP, compatible with the OpenAI API."""
    try:
        from minillm.server.app import create_app
        from minillm.server.lifecycle import address, listen
        from minillm.server.lifecycle import serve as serve_app
        from minillm.server.metrics import EngineMetrics
    except ModuleNotFoundError as error:
        hint = "pip install 'minillm-runtime[server]'"
        raise ConfigError(f"the server needs the package {error.name}: {hint}") from None
    from minillm.server.config import ServerConfig

    config = ServerConfig(
        host=host,
        port=port,
        uds=uds,
        api_keys=tuple(api_key or ()),
        served_model_names=tuple(served_model_name or ()),
        max_body_size=parse_size(max_body_size),
        priority_range=parse_range(priority_range),
        grace=grace,
        cors_origins=tuple(cors_origin or ()),
        show_prompts=show_prompts,
        metrics_prefix=metrics_prefix,
    )
    listener = listen(config)  # before the model is loaded: a port that is taken is known at once
    metrics = EngineMetrics()
    with listener, open_runtime({"max_waiting": max_waiting, **engine}, metrics) as runtime:
        app = create_app(runtime, config, metrics)
        names = ", ".join(app.state.server.model_names)
        serve_app(app, listener, on_ready=lambda: console.info(f"serving {names} at {address(listener)}"))
