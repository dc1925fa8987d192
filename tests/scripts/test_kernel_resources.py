"""Reading what ptxas says about kernels."""

from __future__ import annotations

import pytest
from kernel_resources import (
    Kernel,
    kernels_of,
    parse_report,
    readable,
    reports_of_latest_build,
    spills_too_much,
    table,
)

from pagedinfer.kernel_library import build_info

REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN10pagedinfer6kernelILi64EEEvPf' for 'sm_90a'
ptxas info    : Function properties for _ZN10pagedinfer6kernelILi64EEEvPf
    24 bytes stack frame, 24 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 24 bytes cumulative stack size, 1088 bytes smem
ptxas info    : Compile time = 15.810 ms
ptxas info    : Function properties for helper
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Compiling entry function 'plain' for 'sm_80'
ptxas info    : Function properties for plain
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, used 0 barriers, 480 bytes cmem[0]
"""


def test_every_kernel_of_a_report_is_read() -> None:
    assert parse_report(REPORT) == [
        Kernel("_ZN10pagedinfer6kernelILi64EEEvPf", "sm_90a", 255, 1088, 24, 24, 16),
        Kernel("plain", "sm_80", 30, 0, 0, 0, 0),
    ]


def test_names_are_as_in_the_source() -> None:
    assert readable(["_ZN10pagedinfer6kernelILi64EEEvPf", "plain"]) == ["kernel<64>", "plain"]


def test_columns_line_up() -> None:
    rows = [("kernel", "arch", "registers"), ("k", "sm_80", "7")]
    assert table(rows) == "kernel  arch   registers\nk       sm_80          7"


def test_a_kernel_that_is_not_listed_may_not_spill() -> None:
    spilling, plain = parse_report(REPORT)
    assert spills_too_much(spilling, "kernel<64>")
    assert not spills_too_much(plain, "plain")


@pytest.mark.parametrize(
    ("arch", "stores", "too_much"),
    [("sm_80", 4, False), ("sm_80", 8, True), ("sm_90a", 4, True), ("sm_86", 400, False)],
)
def test_a_listed_kernel_may_spill_so_much_on_that_architecture(
    arch: str, stores: int, too_much: bool
) -> None:
    kernel = Kernel("", arch, spill_stores=stores)
    assert spills_too_much(kernel, "top_logprobs_kernel<sampling::BFloat16, false>") == too_much


def test_no_kernel_of_the_latest_build_spills_more_than_it_may() -> None:
    reports = reports_of_latest_build()
    if not reports:
        pytest.skip("the latest build compiled no CUDA kernel")
    info = build_info()
    if info is None or info.cuda is None or not info.cuda.startswith("13.0."):
        pytest.skip("the kernels are fitted for CUDA 13.0: another nvcc allocates registers otherwise")
    for report in reports:
        spilling = [
            f"{name} ({kernel.arch}): {kernel.spill_stores} bytes"
            for kernel, name in kernels_of(report)
            if spills_too_much(kernel, name)
        ]
        assert not spilling, f"{report.name}: {spilling}"
