"""Telling apart, in the text that a chat model writes, its answer, its reasoning and its tool calls."""
