"""Batches and results come out of their bytes as they went in; nothing but the known types can."""

from __future__ import annotations

import pickle
import socket
from dataclasses import fields, replace

import msgspec
import numpy as np
import pytest

from pagedinfer import EngineConfig, SamplingParams
from pagedinfer.distributed.channel import Channel, Kind
from pagedinfer.distributed.messages import (
    BatchDecoder,
    BatchEncoder,
    Start,
    decode_result,
    decode_start,
    encode,
    encode_result,
)
from pagedinfer.engine.batch import (
    AdmittedRequest,
    Batch,
    BestTokens,
    ScheduledRequest,
    SharedPrefix,
    StepOutput,
)

LENGTHS = ("max_tokens", "min_tokens", "truncate_prompt_tokens")
PARAMS = SamplingParams(
    temperature=0.5,
    top_p=0.9,
    stop=["a", "b"],
    stop_token_ids=[7],
    logit_bias={3: 1.5},
    seed=-5,
    allowed_token_ids=[1, 2],
    max_tokens=None,
    logprobs=3,
    bad_words=["bad"],
)
ADMITTED = AdmittedRequest(
    request_id="é",
    slot=4,
    token_ids=[1, 2, 3],
    num_prompt_tokens=2,
    block_ids=[5],
    sampling_params=PARAMS,
    seed=2**64 - 1,
    num_logprobs=3,
    stop_token_ids=frozenset([1, 2]),
    bad_word_ids=((1, 2), (3,)),
)
FULL = Batch(
    step=3,
    released_slots=[1, 2],
    admitted=[ADMITTED],
    requests=[ScheduledRequest("é", 4, 1, 3, True, [9])],
    swaps_out=[(1, 2)],
    swaps_in=[(3, 4)],
    copies=[(5, 6)],
    shared_prefixes=[SharedPrefix(2, 128)],
)


def test_no_field_of_a_batch_is_lost() -> None:
    for whole in (FULL, ADMITTED):
        assert all(getattr(whole, field.name) for field in fields(whole)), "the test must fill every field"
    assert all(msgspec.structs.astuple(FULL.requests[0])), "the test must fill every field"
    assert BatchDecoder().decode(BatchEncoder().encode(FULL)) == FULL


def test_lengths_beyond_all_integers() -> None:
    params = replace(PARAMS, max_tokens=10**30, min_tokens=10**20, truncate_prompt_tokens=2**64)
    batch = replace(FULL, admitted=[replace(ADMITTED, sampling_params=params)])
    found = BatchDecoder().decode(BatchEncoder().encode(batch)).admitted[0].sampling_params
    assert found == replace(params, **dict.fromkeys(LENGTHS, 2**63 - 1))


def test_a_request_keeps_its_name_until_another_has_its_slot() -> None:
    encoder, decoder = BatchEncoder(), BatchDecoder()
    decoder.decode(encoder.encode(FULL))
    later = Batch(4, requests=[ScheduledRequest("é", 4, 4, 1, False, [])])
    assert decoder.decode(encoder.encode(later)) == later
    other = replace(ADMITTED, request_id="other")  # and where it is as far as the first would be
    last = Batch(5, admitted=[other], requests=[ScheduledRequest("other", 4, 5, 1, True, [])])
    assert decoder.decode(encoder.encode(last)) == last


def test_new_blocks_stay_with_their_requests() -> None:
    requests = [
        ScheduledRequest("é", 4, 16, 8, False, [7, 8]),
        ScheduledRequest("é", 4, 24, 1, True, []),
        ScheduledRequest("é", 4, 25, 3, False, [9]),
    ]
    batch = Batch(3, admitted=[ADMITTED], requests=requests)
    assert BatchDecoder().decode(BatchEncoder().encode(batch)) == batch


def test_of_requests_that_go_on_nothing_is_sent() -> None:
    """What comes out must be right all the same, and when one of them does something else."""
    encoder, decoder = BatchEncoder(), BatchDecoder()
    admitted = [replace(ADMITTED, request_id=f"cmpl-{slot}", slot=slot) for slot in range(256)]
    ends = [4000 + slot for slot in range(256)]

    def decodes(step: int, num_requests: int = 256, **changes: object) -> Batch:
        requests = [
            ScheduledRequest(f"cmpl-{slot}", slot, ends[slot], 1, True, []) for slot in range(num_requests)
        ]
        for name, value in changes.items():
            setattr(requests[7], name, value)
        for request in requests:
            ends[request.slot] += request.num_tokens
        return Batch(step, requests=requests)

    def check(batch: Batch, most_bytes: int) -> None:
        contents = encoder.encode(batch)
        assert decoder.decode(contents) == batch
        assert len(contents) < most_bytes

    first = decodes(100_000, num_tokens=30)
    first.admitted = admitted
    check(first, 10**6)
    check(decodes(100_001), 120)
    check(decodes(100_002, new_block_ids=[70_000, 70_001]), 140)
    check(decodes(100_003), 120)
    check(decodes(100_004, new_block_ids=[70_002]), 140)
    check(decodes(100_005, sample=False), 256 * 8 + 120)
    check(decodes(100_006), 120)
    check(decodes(100_007, num_tokens=2), 256 * 8 + 120)
    check(decodes(100_008, start=17), 256 * 8 + 120)
    check(decodes(100_009, num_requests=255), 256 * 8 + 120)
    check(decodes(100_010, num_requests=255), 120)
    check(Batch(100_011, copies=[(1, 2)]), 160)
    check(decodes(100_012), 256 * 8 + 120)


@pytest.mark.parametrize("with_logprobs", [False, True])
def test_results(with_logprobs: bool) -> None:
    output = StepOutput(np.array([5, -1]), np.array([-0.5, np.nan], np.float32))
    best = BestTokens(
        output.logprobs,
        np.array([1, 0]),
        np.array([[5, 6], [-1, -1]]),
        np.array([[-0.5, -1.0], [-np.inf, -np.inf]], np.float32),
    )
    if with_logprobs:
        output.best = best
        output.prompts = {"a": (1, best)}
    output.swaps_in_done = 5 if with_logprobs else None
    step, found, timings = decode_result(encode_result(7, output, [(3, 0.25)]))
    assert (step, timings) == (7, [(3, 0.25)])
    assert found.swaps_in_done == output.swaps_in_done
    np.testing.assert_equal(found.token_ids, output.token_ids)
    np.testing.assert_equal(found.logprobs, output.logprobs)
    assert (found.best is not None) == with_logprobs
    assert found.prompts.keys() == output.prompts.keys()
    if with_logprobs:
        first, rated = found.prompts["a"]
        assert first == 1
        for each in (found.best, rated):
            for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
                np.testing.assert_equal(getattr(each, name), getattr(best, name))


def test_a_configuration() -> None:
    config = EngineConfig(model="somewhere", seed=2**64 - 1, swap_space=0.5, tensor_parallel_size=2)
    start = Start(1, 2, 1, 2, "/tmp/store", "cpu", False, 1, None, "folder", config)
    assert decode_start(encode(start)) == start


# CVE-2025-30165
def test_a_pickle_is_refused_and_never_run() -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (pytest.fail, ("a pickle was run",))

    for decode in (BatchDecoder().decode, decode_result, decode_start):
        with pytest.raises(msgspec.MsgspecError):
            decode(pickle.dumps(Trap()))


def test_a_function_cannot_be_sent() -> None:
    params = SamplingParams(logits_processors=[lambda tokens, logits: logits])
    admitted = AdmittedRequest("a", 0, [1], 1, [0], params, 0)
    with pytest.raises((TypeError, msgspec.MsgspecError)):
        BatchEncoder().encode(Batch(0, admitted=[admitted]))


def test_a_channel_keeps_messages_apart() -> None:
    one, other = (Channel(end) for end in socket.socketpair())
    one.send(Kind.STEP, b"first")
    one.send(Kind.PING)
    assert list(other.receive_arrived()) == [(Kind.STEP, b"first"), (Kind.PING, b"")]
    assert list(other.receive_arrived()) == []
    other.send(Kind.RESULT, bytes(100_000))
    assert one.receive() == (Kind.RESULT, bytes(100_000))
    one.send(Kind.STATUS, b"last")
    one.close()
    arrived = other.receive_arrived()
    assert next(arrived) == (Kind.STATUS, b"last")
    with pytest.raises(EOFError):
        next(arrived)
    other.close()
