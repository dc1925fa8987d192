"""pagedinfer: an LLM inference engine on hand-written paged-attention, cache and sampling kernels."""

__version__ = "0.1.0"
