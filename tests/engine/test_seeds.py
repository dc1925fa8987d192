"""Seeds of random streams."""

from __future__ import annotations

from pagedinfer.engine.seeds import mix64, request_seed


def test_mix64_is_splitmix64() -> None:
    # The first outputs of SplitMix64 from the seed 1234567, as published with the algorithm.
    assert [mix64(1234567, i) for i in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_a_given_seed_does_not_depend_on_the_engine_or_the_request() -> None:
    assert request_seed(7, 0, 0) == request_seed(7, 5, 9) == 7
    assert request_seed(-2, 0, 0) == 2**64 - 2


def test_without_a_seed_every_request_of_every_engine_has_its_own() -> None:
    seeds = {request_seed(None, engine, number) for engine in range(8) for number in range(100)}
    assert len(seeds) == 800
    assert request_seed(None, 3, 4) == request_seed(None, 3, 4)
