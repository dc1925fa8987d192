"""Reading what ptxas says about kernels."""

from __future__ import annotations

from kernel_resources import Kernel, parse_report, readable, table

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
