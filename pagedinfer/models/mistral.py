"""Mistral: Llama with a sliding window (Jiang et al., 2023), which the configuration says."""

from __future__ import annotations

from pagedinfer.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    pass
