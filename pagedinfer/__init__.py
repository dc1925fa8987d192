"""pagedinfer: an LLM inference engine on hand-written paged-attention, cache and sampling kernels."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# On a CPU, OpenMP's threads wait for each other at every layer. libgomp lets them spin for 300,000 rounds,
# tens of milliseconds, before they sleep; where other programs want the cores, those hold up the rest. It
# reads this when torch loads it. docs/troubleshooting.md has the figures.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

_EXPORTS = {
    "LLM": "llm",
    "LLMEngine": "engine.engine",
    "AsyncEngine": "server.async_engine",
    "EngineConfig": "config",
    "SamplingParams": "sampling_params",
    "RequestOutputKind": "sampling_params",
    "StructuredOutputsParams": "structured_outputs",
    "BeamSearchParams": "beam_search",
    "BeamSearchOutput": "beam_search",
    "BeamSearchSequence": "beam_search",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "Logprob": "outputs",
    "RequestMetrics": "outputs",
    "TextPrompt": "engine.input_processor",
    "TokensPrompt": "engine.input_processor",
    "PagedinferError": "errors",
    "RequestTooLargeError": "errors",
    "OutOfMemoryError": "errors",
    "WeightsError": "errors",
    "DeviceError": "errors",
    "DownloadError": "errors",
    "EngineStartError": "errors",
    "EngineDeadError": "errors",
    "RequestFailedError": "errors",
    "QueueFullError": "errors",
}
"""What is exported, and the module that has it, imported when it is first asked for: torch is slow."""

__all__ = ["__version__", *_EXPORTS]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from pagedinfer.beam_search import BeamSearchOutput as BeamSearchOutput
    from pagedinfer.beam_search import BeamSearchParams as BeamSearchParams
    from pagedinfer.beam_search import BeamSearchSequence as BeamSearchSequence
    from pagedinfer.config import EngineConfig as EngineConfig
    from pagedinfer.engine.engine import LLMEngine as LLMEngine
    from pagedinfer.engine.input_processor import TextPrompt as TextPrompt
    from pagedinfer.engine.input_processor import TokensPrompt as TokensPrompt
    from pagedinfer.errors import DeviceError as DeviceError
    from pagedinfer.errors import DownloadError as DownloadError
    from pagedinfer.errors import EngineDeadError as EngineDeadError
    from pagedinfer.errors import EngineStartError as EngineStartError
    from pagedinfer.errors import OutOfMemoryError as OutOfMemoryError
    from pagedinfer.errors import PagedinferError as PagedinferError
    from pagedinfer.errors import QueueFullError as QueueFullError
    from pagedinfer.errors import RequestFailedError as RequestFailedError
    from pagedinfer.errors import RequestTooLargeError as RequestTooLargeError
    from pagedinfer.errors import WeightsError as WeightsError
    from pagedinfer.llm import LLM as LLM
    from pagedinfer.outputs import CompletionOutput as CompletionOutput
    from pagedinfer.outputs import Logprob as Logprob
    from pagedinfer.outputs import RequestMetrics as RequestMetrics
    from pagedinfer.outputs import RequestOutput as RequestOutput
    from pagedinfer.sampling_params import RequestOutputKind as RequestOutputKind
    from pagedinfer.sampling_params import SamplingParams as SamplingParams
    from pagedinfer.server.async_engine import AsyncEngine as AsyncEngine
    from pagedinfer.structured_outputs import StructuredOutputsParams as StructuredOutputsParams


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'pagedinfer' has no attribute {name!r}")
    value = getattr(import_module(f"pagedinfer.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
