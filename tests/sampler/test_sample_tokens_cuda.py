"""CPU and CUDA draw the same tokens, whatever the batch makes of the grid."""

from __future__ import annotations

import pytest
import torch

from pagedinfer import ops
from tests.sampler.slots import all_slots, mixed_parameters, slot_parameters, to_device

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def assert_devices_agree(logits: torch.Tensor, parameters: dict[str, torch.Tensor], vocab_size: int) -> None:
    num_rows = len(logits)
    logprobs = torch.empty(num_rows), torch.empty(num_rows, device="cuda")
    on_cpu = ops.sample_tokens(
        logits, all_slots(num_rows), **parameters, vocab_size=vocab_size, logprobs=logprobs[0]
    )
    on_cuda = ops.sample_tokens(
        logits.cuda(),
        all_slots(num_rows, "cuda"),
        **to_device(parameters, "cuda"),
        vocab_size=vocab_size,
        logprobs=logprobs[1],
    )
    assert on_cuda.tolist() == on_cpu.tolist()
    torch.testing.assert_close(logprobs[1].cpu(), logprobs[0], atol=1e-5, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0, 12.0])
@pytest.mark.parametrize(
    ("num_rows", "vocab_size"),
    [
        (1, 131_072),
        (3, 151_936),
        (17, 128_256),
        (40, 49_152),
        (100, 32_000),
        (140, 50_257),
        (300, 8_191),
        (300, 1_000),
    ],
)
def test_same_tokens(num_rows: int, vocab_size: int, spread: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    logits = (torch.randn(num_rows, vocab_size, generator=generator) * spread).to(dtype)
    parameters = mixed_parameters(num_rows, generator)
    assert_devices_agree(logits, parameters, vocab_size)
    assert_devices_agree(logits, parameters, vocab_size - 5)


@pytest.mark.parametrize("num_rows", [1, 9, 20, 80, 270])
def test_same_tokens_with_ties_and_masks(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    vocab_size = 40_000
    logits = torch.randn(num_rows, vocab_size, generator=generator).mul(2).round()
    logits[torch.rand(num_rows, vocab_size, generator=generator) < 0.3] = -torch.inf
    logits[::7] = 1.0
    logits[1::7] = -torch.inf
    logits[2::7, 123] = torch.nan
    assert_devices_agree(logits, mixed_parameters(num_rows, generator), vocab_size)


def test_graph_replays_follow_their_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    num_rows, vocab_size = 24, 32_000
    logits = torch.empty(num_rows, vocab_size, device="cuda")
    slots = all_slots(num_rows, "cuda")
    parameters = slot_parameters(num_rows, "cuda")
    token_ids = torch.empty(num_rows, dtype=torch.int64, device="cuda")
    logits.zero_()
    ops.sample_tokens(logits, slots, **parameters, token_ids=token_ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.sample_tokens(logits, slots, **parameters, token_ids=token_ids)
    for _ in range(5):
        new_logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
        new_parameters = mixed_parameters(num_rows, generator)
        logits.copy_(new_logits)
        for name, value in new_parameters.items():
            parameters[name].copy_(value)
        graph.replay()
        expected = ops.sample_tokens(new_logits, all_slots(num_rows), **new_parameters)
        assert token_ids.tolist() == expected.tolist()


def test_runs_on_the_current_stream() -> None:
    logits = torch.zeros(4, 32_000, device="cuda")
    parameters = slot_parameters(4, "cuda", temperature=0.0)
    slots = all_slots(4, "cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        logits[:, 777] = 1.0
        token_ids = ops.sample_tokens(logits, slots, **parameters)
    stream.synchronize()
    assert token_ids.tolist() == [777] * 4


def test_a_slot_out_of_range_is_padding() -> None:
    slots = torch.tensor([0, 4, -7], dtype=torch.int32, device="cuda")
    logits = torch.zeros(3, 100, device="cuda")
    token_ids = ops.sample_tokens(logits, slots, **slot_parameters(4, "cuda", temperature=0.0))
    assert token_ids.tolist() == [0, -1, -1]
