"""The calls that compute-sanitizer watches: they cover every op, and run."""

from __future__ import annotations

import pytest
import torch

from tests.every_op import CALLS, registered_ops


def test_every_registered_op_has_a_call() -> None:
    assert registered_ops() == set(CALLS)


@pytest.mark.parametrize("name", sorted({call.__name__ for call in CALLS.values()}))
def test_runs(device: torch.device, name: str) -> None:
    next(call for call in CALLS.values() if call.__name__ == name)(device)
    if device.type == "cuda":
        torch.cuda.synchronize()
