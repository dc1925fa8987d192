"""swap_blocks against its oracle, within the CPU and between a GPU and pinned memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagedinfer import ops
from tests import reference


def pairs(*mapping: tuple[int, int]) -> Tensor:
    return torch.tensor(mapping, dtype=torch.int64).view(-1, 2)


def host_blocks(num_blocks: int, first: int = 0, width: int = 6) -> Tensor:
    """Blocks in CPU memory, pinned if there is a GPU; every element has its own number."""
    blocks = torch.arange(first, first + num_blocks * width, dtype=torch.int32).view(num_blocks, width)
    return blocks.pin_memory() if torch.cuda.is_available() else blocks


def check(source: Tensor, destination: Tensor, mapping: Tensor) -> None:
    expected = reference.swap_blocks(source, destination, mapping)
    ops.swap_blocks(source, destination, mapping)
    if source.is_cuda or destination.is_cuda:
        torch.cuda.synchronize()
    torch.testing.assert_close(destination, expected, rtol=0, atol=0)


@st.composite
def mappings(draw: st.DrawFn) -> tuple[int, int, Tensor]:
    """(source blocks, destination blocks, any valid mapping): runs are as likely as single blocks."""
    num_sources, num_destinations = draw(st.integers(1, 30)), draw(st.integers(1, 30))
    mapping: dict[int, int] = {}
    for _ in range(draw(st.integers(0, 6))):
        source = draw(st.integers(0, num_sources - 1))
        destination = draw(st.integers(0, num_destinations - 1))
        for i in range(draw(st.integers(1, 5))):
            if source + i < num_sources and destination + i < num_destinations:
                mapping.setdefault(destination + i, source + i)
    order = draw(st.permutations(sorted(mapping)))
    return num_sources, num_destinations, pairs(*((mapping[d], d) for d in order))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=mappings())
def test_any_mapping_both_ways(device: torch.device, case: tuple[int, int, Tensor]) -> None:
    num_sources, num_destinations, mapping = case
    on_device = host_blocks(num_sources).to(device)
    on_host = host_blocks(num_destinations, first=-1000)
    check(on_device, on_host, mapping)
    check(on_host, on_device, mapping.flip(1) if is_injective(mapping) else mapping[:1].flip(1))


def is_injective(mapping: Tensor) -> bool:
    """Whether no source comes twice: only then can the mapping be turned round."""
    return len(set(mapping[:, 0].tolist())) == len(mapping)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", [(3, 2, 2, 8, 64), (5, 7), (1,), (400_000,)], ids=str)
def test_every_dtype_and_block_size(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    on_device = torch.randint(0, 200, (9, *shape)).to(dtype).to(device)
    on_host = torch.zeros(7, *shape, dtype=dtype)
    if device.type == "cuda":
        on_host = on_host.pin_memory()
    check(on_device, on_host, pairs((2, 3), (3, 4), (4, 5), (8, 0), (2, 6)))
    check(on_host, on_device, pairs((3, 0), (4, 1), (6, 8)))


def test_empty_is_a_no_op(device: torch.device) -> None:
    check(host_blocks(3).to(device), host_blocks(3, first=50), pairs())


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    source, destination = host_blocks(4).to(device), host_blocks(6, first=50)
    before = destination.clone()
    with pytest.raises(ValueError, match=r"mapping\[1\] is \(4, 0\); .* source in \[0, 4\) .* \[0, 6\)"):
        ops.swap_blocks(source, destination, pairs((0, 1), (4, 0)))
    with pytest.raises(ValueError, match=r"mapping\[0\] is \(0, 6\)"):
        ops.swap_blocks(source, destination, pairs((0, 6)))
    with pytest.raises(ValueError, match=r"mapping\[1\] is \(3, 1\) and mapping\[0\] is \(0, 1\)"):
        ops.swap_blocks(source, destination, pairs((0, 1), (3, 1)))
    with pytest.raises(ValueError, match="destination has dtype float32; expected source's int32"):
        ops.swap_blocks(source, destination.float(), pairs((0, 1)))
    with pytest.raises(ValueError, match=r"\[4, 6\] and destination \[6, 5\]; .* equal trailing shapes"):
        ops.swap_blocks(source, destination[:, :5], pairs((0, 1)))
    with pytest.raises(ValueError, match=r"destination has .* strides .* expected contiguous"):
        ops.swap_blocks(source, destination.T.contiguous().T, pairs((0, 1)))
    assert torch.equal(destination, before)


def test_refuses_a_swap_within_one_cache(device: torch.device) -> None:
    blocks = host_blocks(6).to(device)
    with pytest.raises(ValueError, match="source and destination share memory"):
        ops.swap_blocks(blocks[:4], blocks[3:], pairs((0, 0)))


@pytest.mark.gpu
def test_refuses_memory_that_is_not_pinned() -> None:
    on_device = host_blocks(4).cuda()
    unpinned = torch.zeros(4, 6, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"destination is CPU memory that is not pinned.*pin_memory"):
        ops.swap_blocks(on_device, unpinned, pairs((0, 1)))
    with pytest.raises(ValueError, match="source is CPU memory that is not pinned"):
        ops.swap_blocks(unpinned, on_device, pairs((0, 1)))
    assert not unpinned.any()


@pytest.mark.gpu
@pytest.mark.parametrize("num_blocks", [3, 64], ids=["one-by-one", "batched"])
def test_waits_for_its_stream_and_for_nobody_else(num_blocks: int) -> None:
    """The host goes on at once; the transfer reads what an earlier kernel of the stream wrote."""
    on_device, on_host = host_blocks(num_blocks).cuda(), host_blocks(2 * num_blocks, first=-5000)
    mapping = pairs(*((i, 2 * i) for i in range(num_blocks)))
    on_device += 0  # loads the kernel, for which the host would wait below
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # cycles: about 0.1 s
        on_device += 7
        ops.swap_blocks(on_device, on_host, mapping)
    assert not stream.query()
    stream.synchronize()
    assert torch.equal(on_host[::2], host_blocks(num_blocks, first=7))


@pytest.mark.gpu
def test_memory_outlives_its_tensors_until_the_stream_has_passed() -> None:
    on_device, on_host = host_blocks(64, width=4096).cuda(), host_blocks(64, width=4096)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        ops.swap_blocks(on_device, on_host, pairs(*((i, 63 - i) for i in range(64))))
    addresses = on_device.data_ptr(), on_host.data_ptr()
    del on_device, on_host
    on_device = torch.empty(64, 4096, dtype=torch.int32, device="cuda")
    on_host = torch.empty(64, 4096, dtype=torch.int32, pin_memory=True)
    assert not stream.query()
    assert on_device.data_ptr() != addresses[0]
    assert on_host.data_ptr() != addresses[1]


@pytest.mark.gpu
def test_both_ways_at_once_on_two_streams() -> None:
    out_of, into = host_blocks(32, width=1 << 18).cuda(), host_blocks(32, first=9, width=1 << 18).cuda()
    host_out, host_in = torch.empty_like(out_of, device="cpu").pin_memory(), host_blocks(32, width=1 << 18)
    mapping = pairs(*((i, (5 * i) % 32) for i in range(32)))
    expected_out = reference.swap_blocks(out_of, host_out, mapping)
    expected_in = reference.swap_blocks(host_in, into, mapping)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        ops.swap_blocks(out_of, host_out, mapping)
    with torch.cuda.stream(torch.cuda.Stream()):
        ops.swap_blocks(host_in, into, mapping)
    torch.cuda.synchronize()
    assert torch.equal(host_out, expected_out)
    assert torch.equal(into, expected_in)


@pytest.mark.gpu
def test_between_two_caches_of_one_gpu() -> None:
    source, destination = host_blocks(6).cuda(), host_blocks(9, first=100).cuda()
    check(source, destination, pairs((0, 4), (1, 5), (5, 0)))


def test_opcheck() -> None:
    """On the CPU alone: opcheck copies its arguments, and a copy of pinned memory is not pinned."""
    args = (torch.randn(4, 24), torch.randn(6, 24), pairs((0, 1), (1, 2), (3, 0)))
    torch.library.opcheck(torch.ops.pagedinfer.swap_blocks.default, args)
