"""Sums over peer memory: ranks are threads on the CPU, streams of one GPU, or processes that share one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from pagedinfer import ops
from pagedinfer.distributed.peer_all_reduce import MOST_BYTES_VARIABLE, most_bytes
from tests.distributed.rank_pool import RankPool
from tests.distributed.rank_tasks import check_alone, connect_peers, sum_over_peers

MAX_BYTES = 1 << 20
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def random_inputs(call: int, num_ranks: int) -> list[Tensor]:
    """Of a random size and dtype, the same for all ranks."""
    generator = torch.Generator().manual_seed(call)
    dtype = DTYPES[call % 3]
    most = MAX_BYTES // 16 if call % 4 else 40  # vectors of 16 bytes
    count = int(torch.randint(1, most + 1, (1,), generator=generator)) * 16 // dtype.itemsize
    return [torch.randn(count, generator=generator).to(dtype) for _ in range(num_ranks)]


def sum_in_order(inputs: list[Tensor]) -> Tensor:
    total = torch.zeros(inputs[0].shape)
    for each in inputs:
        total = total + each.float()
    return total.to(inputs[0].dtype)


class Ranks:
    """Memory of several ranks in this process."""

    def __init__(self, num_ranks: int, device: torch.device) -> None:
        size = ops.peer_memory_bytes(MAX_BYTES)
        self.memory = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(num_ranks)]
        self.addresses = torch.tensor([each.data_ptr() for each in self.memory])


@pytest.mark.parametrize("num_ranks", ops.NUMBERS_OF_PEERS)
def test_threads(num_ranks: int) -> None:
    ranks = Ranks(num_ranks, torch.device("cpu"))
    inputs = [random_inputs(call, num_ranks) for call in range(24)]

    def run(rank: int) -> list[Tensor]:
        data = [each[rank].clone() for each in inputs]
        for each in data:
            ops.peer_all_reduce(each, ranks.addresses, rank, MAX_BYTES)
        return data

    with ThreadPoolExecutor(num_ranks) as pool:
        results = list(pool.map(run, range(num_ranks)))
    for call, each in enumerate(inputs):
        for rank in range(num_ranks):
            assert torch.equal(results[rank][call], sum_in_order(each))


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 2])  # more might not all find room at once, and wait for ever
def test_streams(num_ranks: int) -> None:
    device = torch.device("cuda")
    ranks = Ranks(num_ranks, device)
    inputs = [random_inputs(call, num_ranks) for call in range(60)]
    data = [[each.to(device) for each in of_ranks] for of_ranks in inputs]
    streams = [torch.cuda.Stream() for _ in range(num_ranks)]
    torch.cuda.synchronize()
    for each in data:
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                ops.peer_all_reduce(each[rank], ranks.addresses, rank, MAX_BYTES)
    torch.cuda.synchronize()
    for each, of_ranks in zip(data, inputs, strict=True):
        for found in each:
            assert torch.equal(found.cpu(), sum_in_order(of_ranks))


@pytest.mark.gpu
def test_processes(rank_pool: Callable[..., RankPool]) -> None:
    """Two processes map each other's memory. On one GPU they take turns, which is slow, but right."""
    inputs = [random_inputs(call, 2) for call in range(12)]
    for results in rank_pool(2).run(sum_over_peers, inputs=inputs, max_bytes=MAX_BYTES):
        for found, of_ranks in zip(results, inputs, strict=True):
            assert torch.equal(found, sum_in_order(of_ranks))


@pytest.mark.gpu
def test_a_check_ends_where_nothing_arrives(rank_pool: Callable[..., RankPool]) -> None:
    assert rank_pool(2).run(check_alone) == ["GPUs are said to reach each other's memory, and do not", ""]


@pytest.mark.parametrize(
    ("breaks", "closed", "logged"),
    [
        ({}, [False, False], [[], []]),
        ({1: "open"}, [True, False], [[], ["sums over GPUs are left to NCCL: rank 1 cannot open"]]),
        ({0: "check"}, [True, True], [["sums over GPUs are left to NCCL: rank 0 sums wrong"], []]),
        (
            {0: "check", 1: "check"},
            [True, True],
            [["sums over GPUs are left to NCCL: rank 0 sums wrong"], []],
        ),
    ],
)
def test_all_ranks_have_peers_or_none(
    breaks: dict[int, str],
    closed: list[bool],
    logged: list[list[str]],
    rank_pool: Callable[..., RankPool],
) -> None:
    results = rank_pool(2).run(connect_peers, breaks=breaks)
    assert [each[0] for each in results] == [not breaks] * 2
    assert [each[1] for each in results] == closed
    assert [each[2] for each in results] == logged


def test_most_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MOST_BYTES_VARIABLE, raising=False)
    assert [most_bytes(num_ranks) > 0 for num_ranks in (2, 3, 4)] == [True, False, False]
    monkeypatch.setenv(MOST_BYTES_VARIABLE, "4096")
    assert [most_bytes(num_ranks) for num_ranks in (2, 3, 4)] == [4096, 0, 4096]
    monkeypatch.setenv(MOST_BYTES_VARIABLE, "1 MiB")
    with pytest.raises(ValueError, match=r"must be a number of bytes, such as 1048576, got '1 MiB'"):
        most_bytes(2)


def test_bad_arguments() -> None:
    ranks = Ranks(2, torch.device("cpu"))

    def call(data: Tensor, rank: int = 0, max_bytes: int = MAX_BYTES, memories: Tensor | None = None) -> None:
        ops.peer_all_reduce(data, ranks.addresses if memories is None else memories, rank, max_bytes)

    good = torch.zeros(4)
    with pytest.raises(ValueError, match="data has 12 bytes; expected a multiple of 16"):
        call(torch.zeros(3))
    with pytest.raises(ValueError, match=r"data has 1048592 bytes; expected .*, at most 1048576"):
        call(torch.zeros(MAX_BYTES // 4 + 4))
    with pytest.raises(ValueError, match="rank is 2; expected 0 to 1"):
        call(good, rank=2)
    with pytest.raises(ValueError, match="max_bytes is 24; expected a multiple of 16"):
        call(good, max_bytes=24)
    with pytest.raises(ValueError, match="memories has 3 addresses; expected 1, 2, 4 or 8"):
        call(good, memories=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="data"):
        call(torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="data"):
        call(torch.zeros(4, 8).t())


# ---- with the norm ----

EPSILON = 1e-5
SHAPES = [(1, 4096), (1, 64), (3, 128), (70, 640), (256, 1024), (2, 8192), (5, 20_480)]


def norm_inputs(shape: tuple[int, int], dtype: torch.dtype, num_ranks: int) -> tuple[list[Tensor], ...]:
    """Of each rank its data, and for all the residual and the weight."""
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(shape, generator=generator).to(dtype) for _ in range(num_ranks)]
    residual = torch.randn(shape, generator=generator).to(dtype)
    return data, [residual, (1 + 0.1 * torch.randn(shape[1], generator=generator)).to(dtype)]


def check_norm(results: list[tuple[Tensor, Tensor]], inputs: tuple[list[Tensor], ...]) -> None:
    data, (residual, weight) = inputs
    wanted_residual = residual.clone()
    wanted = ops.rms_norm(sum_in_order(data), weight, EPSILON, wanted_residual)
    for found, found_residual in results:
        assert torch.equal(found_residual, wanted_residual)
        torch.testing.assert_close(
            found, wanted, rtol=2e-6 if found.dtype == torch.float32 else 1e-2, atol=1e-6
        )


def run_norm(ranks: Ranks, rank: int, data: Tensor, residual: Tensor, weight: Tensor) -> None:
    ops.peer_all_reduce_norm(data, residual, weight, EPSILON, ranks.addresses, rank, MAX_BYTES)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_by_threads(dtype: torch.dtype) -> None:
    ranks = Ranks(2, torch.device("cpu"))
    for shape in SHAPES:
        inputs = norm_inputs(shape, dtype, 2)
        results = [(each.clone(), inputs[1][0].clone()) for each in inputs[0]]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda r, o=results, w=inputs[1][1]: run_norm(ranks, r, *o[r], w), range(2)))
        check_norm(results, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_norm_by_streams(num_ranks: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    ranks = Ranks(num_ranks, device)
    streams = [torch.cuda.Stream() for _ in range(num_ranks)]
    for shape in SHAPES:
        inputs = norm_inputs(shape, dtype, num_ranks)
        weight = inputs[1][1].to(device)
        results = [(each.to(device), inputs[1][0].to(device)) for each in inputs[0]]
        torch.cuda.synchronize()
        for rank, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                run_norm(ranks, rank, *results[rank], weight)
        torch.cuda.synchronize()
        check_norm([(found.cpu(), residual.cpu()) for found, residual in results], inputs)
