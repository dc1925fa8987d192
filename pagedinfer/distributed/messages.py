"""What an engine and its ranks say to each other, as MessagePack of known types.

Decoding builds the types below and nothing else, and checks them; no message can run code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import add
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pagedinfer.config import EngineConfig
from pagedinfer.engine.batch import (
    AdmittedRequest,
    Batch,
    BestTokens,
    ScheduledRequest,
    SharedPrefix,
    StepOutput,
)


@dataclass(slots=True)
class Start:
    """All that a rank has to know."""

    rank: int
    num_ranks: int
    local_rank: int  # among those of its machine
    num_local_ranks: int
    store: str  # where the ranks find each other: the path of a file, or host:port
    device: str  # "cuda" or "cpu"
    nccl: bool
    num_threads: int  # of a CPU, for torch
    num_known_tokens: int | None
    folder: str  # of the model
    config: EngineConfig


@dataclass(slots=True)
class Ready:
    """What all ranks' workers have agreed on; see `Worker`."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    num_cpu_blocks: int
    block_bytes: int
    dtype: str
    cascade_attention: bool


@dataclass(slots=True)
class Status:
    """How far a rank is."""

    step: int  # the last that it has begun
    in_step: bool  # whether it is still launching that; on a CPU, computing
    num_collectives: int  # begun since the start
    cpu_seconds: float  # that its main thread has computed since the start
    traceback: str  # where its main thread is


@dataclass(slots=True)
class Failure:
    """What has ended a rank."""

    kind: str  # name of the exception
    message: str
    traceback: str


@dataclass(slots=True)
class Hello:
    """One connection from another node."""

    node: int
    local_rank: int
    num_local_ranks: int
    is_control: bool


@dataclass(slots=True)
class _Requests:
    """Of all requests, field by field, which is faster; the ranks know the ids by the slots."""

    slots: list[int]
    starts: list[int]
    nums_tokens: list[int]
    samples: list[bool]


@dataclass(slots=True)
class _Batch:
    step: int
    released_slots: list[int]
    admitted: list[AdmittedRequest]
    requests: _Requests | None  # None: those of the batch before, each a decode of the token after
    new_block_ids: dict[int, list[int]]  # by position among the requests; few of a step have any
    swaps_out: list[tuple[int, int]]
    swaps_in: list[tuple[int, int]]
    copies: list[tuple[int, int]]
    shared_prefixes: list[SharedPrefix]


@dataclass(slots=True)
class _Array:
    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(slots=True)
class _Result:
    step: int
    token_ids: _Array
    logprobs: _Array
    best: tuple[_Array, _Array, _Array, _Array] | None
    prompts: dict[str, tuple[int, tuple[_Array, _Array, _Array, _Array]]]
    swap_timings: list[tuple[int, float]]
    swaps_in_done: int | None


_LARGEST = 2**63 - 1
_LENGTHS = ("max_tokens", "min_tokens", "truncate_prompt_tokens")  # of SamplingParams

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
"""Any of the types above as bytes."""

decode_start = msgspec.msgpack.Decoder(Start).decode
decode_ready = msgspec.msgpack.Decoder(Ready).decode
decode_status = msgspec.msgpack.Decoder(Status).decode
decode_failure = msgspec.msgpack.Decoder(Failure).decode
decode_hello = msgspec.msgpack.Decoder(Hello).decode


def _refuse(kind: type, value: Any) -> Any:
    raise ValueError(f"a message cannot hold {kind}, got {value!r}")


_decode_batch = msgspec.msgpack.Decoder(_Batch, dec_hook=_refuse).decode
_decode_result = msgspec.msgpack.Decoder(_Result).decode


class BatchEncoder:
    """Writes the batches of an engine. All go to the same `BatchDecoder`s, in this order."""

    def __init__(self) -> None:
        self._expected = _Requests([], [], [], [])

    def encode(self, batch: Batch) -> bytes:
        """A step: some 7 bytes for each request, and none for those that go on as they did."""
        requests = batch.requests
        sent = _Requests(
            [request.slot for request in requests],
            [request.start for request in requests],
            [request.num_tokens for request in requests],
            [request.sample for request in requests],
        )
        as_expected = not batch.admitted and sent == self._expected  # who is admitted changes a slot's name
        contents = _encoder.encode(
            _Batch(
                batch.step,
                batch.released_slots,
                list(map(_within_64_bits, batch.admitted)),
                None if as_expected else sent,
                {i: request.new_block_ids for i, request in enumerate(requests) if request.new_block_ids},
                batch.swaps_out,
                batch.swaps_in,
                batch.copies,
                batch.shared_prefixes,
            )
        )
        # In the next step perhaps a decode each, of which there is nothing to say.
        starts = list(map(add, sent.starts, sent.nums_tokens))
        self._expected = _Requests(sent.slots, starts, [1] * len(starts), [True] * len(starts))
        return contents


def _within_64_bits(admitted: AdmittedRequest) -> AdmittedRequest:
    """Lengths may be larger than any integer of MessagePack, and mean no more than that one then."""
    params = admitted.sampling_params
    changes: dict[str, Any] = {name: _LARGEST for name in _LENGTHS if (getattr(params, name) or 0) > _LARGEST}
    return replace(admitted, sampling_params=replace(params, **changes)) if changes else admitted


class BatchDecoder:
    """Reads the batches of an engine, all of them and in their order."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}  # of the requests in the slots
        self._requests: list[ScheduledRequest] = []
        self._grown: list[ScheduledRequest] = []  # those that had new blocks in the last batch
        self._all_decode = False

    def decode(self, contents: bytes) -> Batch:
        """What `BatchEncoder.encode` was given. Its requests change with the next call."""
        sent = _decode_batch(contents)
        for admitted in sent.admitted:
            self._names[admitted.slot] = admitted.request_id
        if sent.requests is None:
            self._go_on()
        else:
            self._requests = self._make(sent.requests)
            self._all_decode = False
        self._grown = [self._requests[position] for position in sent.new_block_ids]
        for request, block_ids in zip(self._grown, sent.new_block_ids.values(), strict=True):
            request.new_block_ids = block_ids
        return Batch(
            sent.step,
            sent.released_slots,
            sent.admitted,
            self._requests,
            sent.swaps_out,
            sent.swaps_in,
            sent.copies,
            sent.shared_prefixes,
        )

    def _make(self, sent: _Requests) -> list[ScheduledRequest]:
        names = map(self._names.__getitem__, sent.slots)
        columns = (sent.slots, sent.starts, sent.nums_tokens, sent.samples)
        return list(map(ScheduledRequest, names, *columns, [[] for _ in sent.slots]))

    def _go_on(self) -> None:
        for request in self._grown:
            request.new_block_ids = []
        if self._all_decode:
            for request in self._requests:
                request.start += 1
            return
        for request in self._requests:
            request.start += request.num_tokens
            request.num_tokens = 1
            request.sample = True
        self._all_decode = True


def encode_result(step: int, output: StepOutput, swap_timings: list[tuple[int, float]]) -> bytes:
    """What a step drew, and the swaps that have ended; see `Worker.take_swap_timings`."""
    best = None if output.best is None else _pack_best(output.best)
    prompts = {name: (first, _pack_best(best)) for name, (first, best) in output.prompts.items()}
    return _encoder.encode(
        _Result(
            step,
            _pack(output.token_ids),
            _pack(output.logprobs),
            best,
            prompts,
            swap_timings,
            output.swaps_in_done,
        )
    )


def _pack_best(best: BestTokens) -> tuple[_Array, _Array, _Array, _Array]:
    return _pack(best.logprobs), _pack(best.ranks), _pack(best.top_ids), _pack(best.top_logprobs)


def decode_result(contents: bytes) -> tuple[int, StepOutput, list[tuple[int, float]]]:
    """The step, and what `encode_result` was given."""
    result = _decode_result(contents)
    output = StepOutput(_unpack(result.token_ids), _unpack(result.logprobs))
    output.swaps_in_done = result.swaps_in_done
    if result.best is not None:
        output.best = BestTokens(*map(_unpack, result.best))
    output.prompts = {
        name: (first, BestTokens(*map(_unpack, arrays))) for name, (first, arrays) in result.prompts.items()
    }
    return result.step, output, result.swap_timings


def _pack(array: npt.NDArray[Any]) -> _Array:
    return _Array(array.dtype.str, array.shape, array.tobytes())


def _unpack(array: _Array) -> npt.NDArray[Any]:
    return np.frombuffer(array.data, np.dtype(array.dtype)).reshape(array.shape)
