"""How much memory there is, and the size of the KV cache (vllm#2418)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from pagedinfer.errors import OutOfMemoryError
from pagedinfer.runner.memory import GIB, Memory, cpu_memory, describe_bytes, size_kv_cache


def size(**changes: Any) -> tuple[int, int]:
    options: dict[str, Any] = {
        "available_bytes": 100 * 1024,
        "block_bytes": 1024,
        "block_size": 16,
        "model_max_len": 512,
        "max_model_len": None,
        "num_blocks_override": None,
        "memory": Memory(total=4 * GIB, free=3 * GIB),
        "parameter": "kv_cache_memory_bytes",
    }
    result = size_kv_cache(**options | changes)
    return result.num_blocks, result.max_model_len


def test_all_that_fits() -> None:
    assert size() == (100, 512)
    assert size(available_bytes=100 * 1024 + 1023) == (100, 512)
    assert size(max_model_len=64) == (100, 64)
    assert size(num_blocks_override=40) == (40, 512)


def test_one_longest_request_must_fit() -> None:
    assert size(available_bytes=32 * 1024) == (32, 512)
    with pytest.raises(OutOfMemoryError) as error:
        size(available_bytes=6 * 1024 + 5, max_model_len=512)
    message = str(error.value)
    for part in (
        "max_model_len=512",
        "32 KiB",  # wanted
        "6 KiB",  # what there is
        "96 tokens",
        "4.0 GiB in total",
        "3.0 GiB were free",
        "largest max_model_len that fits is 96",
        "kv_cache_memory_bytes",
    ):
        assert part in message
    assert size(available_bytes=6 * 1024 + 5, max_model_len=96) == (6, 96)


def test_the_default_length_is_lowered_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pagedinfer"):
        assert size(available_bytes=6 * 1024) == (6, 96)
    assert "max_model_len is lowered to 96" in caplog.text


def test_no_block_at_all() -> None:
    for available in (1023, 0, -5):
        with pytest.raises(OutOfMemoryError, match="no room for a KV cache"):
            size(available_bytes=available)


def test_an_override_beyond_what_there_is() -> None:
    with pytest.raises(OutOfMemoryError, match=r"num_gpu_blocks_override=101 .*room for 100"):
        size(num_blocks_override=101)


def test_an_override_that_is_too_small_names_itself() -> None:
    with pytest.raises(OutOfMemoryError, match="raise num_gpu_blocks_override"):
        size(num_blocks_override=2, max_model_len=64)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_memory_of_the_machine_or_of_the_container(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", "MemTotal: 8000 kB\nMemFree: 1000 kB\nMemAvailable: 6000 kB\n")
    assert cpu_memory(tmp_path) == Memory(8000 * 1024, 6000 * 1024)
    write(tmp_path / "sys/fs/cgroup/memory.max", "max\n")
    write(tmp_path / "sys/fs/cgroup/memory.current", "2048\n")
    write(tmp_path / "sys/fs/cgroup/memory.stat", "anon 5\ninactive_file 1024\n")
    assert cpu_memory(tmp_path) == Memory(8000 * 1024, 6000 * 1024)
    write(tmp_path / "sys/fs/cgroup/memory.max", "10240\n")
    assert cpu_memory(tmp_path) == Memory(10240, 10240 - 2048 + 1024)


def test_memory_of_a_cgroup_v1(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", "MemTotal: 8000 kB\nMemAvailable: 6000 kB\n")
    write(tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes", "10240\n")
    write(tmp_path / "sys/fs/cgroup/memory/memory.usage_in_bytes", "20480\n")
    write(tmp_path / "sys/fs/cgroup/memory/memory.stat", "total_inactive_file 1024\n")
    assert cpu_memory(tmp_path) == Memory(10240, 0)


def test_this_machine() -> None:
    memory = cpu_memory()
    assert 0 < memory.free <= memory.total


def test_units() -> None:
    assert describe_bytes(int(4.8 * GIB)) == "4.8 GiB"
    assert describe_bytes(312 << 20) == "312 MiB"
    assert describe_bytes(20 << 10) == "20 KiB"
