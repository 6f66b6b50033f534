"""MiniLLM Runtime: a compact LLM inference and serving runtime.

The public names below are imported when they are first used, so that `import minillm` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minillm.core.request import Request as Request
    from minillm.core.sampling_params import SamplingParams as SamplingParams
    from minillm.core.structured_outputs import StructuredOutputs as StructuredOutputs
    from minillm.engine.config import EngineConfig as EngineConfig
    from minillm.engine.llm import LLM as LLM
    from minillm.engine.outputs import CompletionOutput as CompletionOutput
    from minillm.engine.outputs import RequestOutput as RequestOutput
    from minillm.engine.outputs import TokenEvent as TokenEvent
    from minillm.engine.runtime import Runtime as Runtime

_MODULES = {
    "LLM": "minillm.engine.llm",
    "Runtime": "minillm.engine.runtime",
    "EngineConfig": "minillm.engine.config",
    "SamplingParams": "minillm.core.sampling_params",
    "StructuredOutputs": "minillm.core.structured_outputs",
    "Request": "minillm.core.request",
    "RequestOutput": "minillm.engine.outputs",
    "CompletionOutput": "minillm.engine.outputs",
    "TokenEvent": "minillm.engine.outputs",
}

__all__ = [*_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("minillm-runtime")
        except PackageNotFoundError:  # run from a source tree that is not installed
            return "0.0.0+source"
    if name not in _MODULES:
        raise AttributeError(f"module 'minillm' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
