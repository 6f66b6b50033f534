"""What an operator sets for the server, beside the engine's configuration."""

from __future__ import annotations

from dataclasses import dataclass

from minillm.core.errors import ConfigError

MIB = 1 << 20
METRICS_PREFIXES = ("vllm", "minillm")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Read once, validated, immutable.

    - ``api_keys``: any of them must come as `Authorization: Bearer KEY`; empty asks for none. Never printed.
    - ``served_model_names``: names that clients may use; empty takes the engine's own.
    - ``max_body_size``: bytes of a request's body.
    - ``header_timeout``: seconds within which a request's headers must have come in.
    - ``body_timeout``: the same of a body, from there on.
    - ``priority_range``: what clients' `priority` is clamped to; lower runs first.
    - ``grace``: seconds that running requests have to finish in after the first SIGTERM.
    - ``cors_origins``: origins whose pages may call the server; empty sends no CORS headers.
    - ``show_prompts``: explanations of live requests show their prompts and outputs to whoever has a key.
    - ``metrics_prefix``: first part of the metrics' names, as `vllm` or `minillm`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    max_body_size: int = 8 * MIB
    header_timeout: float = 30.0
    body_timeout: float = 60.0
    priority_range: tuple[int, int] = (0, 100)
    grace: float = 30.0
    cors_origins: tuple[str, ...] = ()
    show_prompts: bool = False
    metrics_prefix: str = "vllm"

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics_prefix", self.metrics_prefix.removesuffix(":"))
        if self.metrics_prefix not in METRICS_PREFIXES:
            raise ConfigError(f"metrics_prefix={self.metrics_prefix!r} must be one of {', '.join(METRICS_PREFIXES)}")
        low, high = self.priority_range
        if low > high or not -(2**63) <= low <= high < 2**63:
            raise ConfigError(f"priority_range={low}:{high} must be LOW:HIGH with LOW <= HIGH, each of 64 bits")
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port={self.port} must be in [0, 65535]")
        if self.max_body_size < 1:
            raise ConfigError(f"max_body_size={self.max_body_size} must be at least 1 byte")
        if not 0 <= self.grace < 1e9:
            raise ConfigError(f"grace={self.grace} must be a number of seconds >= 0")
        for name in ("header_timeout", "body_timeout"):
            if not 0 < getattr(self, name) < 1e9:
                raise ConfigError(f"{name}={getattr(self, name)} must be a number of seconds > 0")
        if any(not key or not key.isascii() or not key.isprintable() for key in self.api_keys):
            raise ConfigError("api_key must be printable ASCII and not empty")
        if not all(self.served_model_names):
            raise ConfigError("served_model_name='' must name a model")

    def __repr__(self) -> str:
        return f"ServerConfig(host={self.host!r}, port={self.port}, api_keys=<{len(self.api_keys)} set>)"
