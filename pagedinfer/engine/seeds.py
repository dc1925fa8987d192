"""The 64-bit seeds of random streams: one for each choice of each request; no torch here."""

from __future__ import annotations

_MASK = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def mix64(seed: int, index: int) -> int:
    """Output `index` of the SplitMix64 generator that starts at `seed` (Steele et al., 2014).

    In the arithmetic of 64-bit unsigned integers: z = seed + (index + 1) * 0x9E3779B97F4A7C15, then
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9, z = (z ^ z >> 27) * 0x94D049BB133111EB, z ^ z >> 31. For one
    seed, different indices give different results.
    """
    z = (seed + (index + 1) * _GOLDEN_GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def request_seed(given: int | None, engine_seed: int, request_number: int) -> int:
    """The seed from which a request's choices take theirs: choice i draws with mix64(this, i).

    It is the one in the request's SamplingParams, or else is drawn from the engine's seed and how many
    requests that engine was given before.
    """
    return mix64(engine_seed, request_number) if given is None else given & _MASK
