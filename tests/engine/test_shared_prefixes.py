"""Requests that begin with the same blocks are put side by side, and what they share is read once.

On the CPU the attention op reads everything for each, and raises if what it was told of groups is not so.
"""

from __future__ import annotations

from typing import Any

import pytest

from pagedinfer import LLM, SamplingParams
from pagedinfer.engine import shared_prefixes
from pagedinfer.engine.batch import SharedPrefix
from pagedinfer.runner.worker import Worker
from tests.conftest import TinyModel
from tests.engine.rig import Rig, prompt_of
from tests.models.parity import random_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

SHARED, OTHER = random_prompts((150, 200), seed=31)
TAILS = random_prompts((1, 20, 33, 5, 2, 7), seed=32)
PROMPTS = [SHARED + TAILS[0], OTHER + TAILS[1], SHARED[:100] + TAILS[2], SHARED + TAILS[3], TAILS[4], OTHER]
PARAMS = [SamplingParams(temperature=0.9, seed=i, max_tokens=8 + 4 * i, ignore_eos=True) for i in range(6)]
PARAMS[3] = SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=30, ignore_eos=True)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Savings of any size are worth it."""
    monkeypatch.setattr(shared_prefixes, "_LEAST_SAVED", 1)
    monkeypatch.setattr(shared_prefixes, "_READS_LOST", 0)


def rig(**config: Any) -> Rig:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "block_size": 16, "max_model_len": 512}
    return Rig(**limits | {"num_blocks": 256, "cascade_attention": True} | config)


def groups_of(rig: Rig) -> list[tuple[set[str], int]]:
    """The last step's groups: who is in each, and how many tokens they share."""
    first, groups = 0, []
    for prefix in rig.batch.shared_prefixes:
        members = rig.batch.requests[first : first + prefix.num_requests]
        groups.append(({request.request_id for request in members}, prefix.num_tokens))
        first += prefix.num_requests
    return groups


def test_groups_stand_together_the_largest_first() -> None:
    engine = rig()
    engine.add("a", [*prompt_of(200), 1])
    engine.add("x", [*prompt_of(100, first=7), 2])
    engine.add("b", [*prompt_of(200), 3, 4])
    engine.add("alone", prompt_of(90, first=30))
    engine.add("y", [*prompt_of(100, first=7), 5])
    engine.add("c", prompt_of(150) + [6] * 20)
    engine.step()
    assert engine.batch.shared_prefixes == []  # prompts are computed in it
    engine.step()
    assert groups_of(engine) == [({"a", "b", "c"}, 128), ({"x", "y"}, 64)]
    engine.scheduler.abort_request("c")
    engine.step()
    assert groups_of(engine) == [({"a", "b"}, 192), ({"x", "y"}, 64)]
    engine.scheduler.abort_request("x")
    engine.step()
    assert groups_of(engine) == [({"a", "b"}, 192)]
    engine.run()
    engine.check_outputs()


def test_a_step_that_a_member_sits_out() -> None:
    """The step before it, which is under way, draws the last token of that request."""
    engine = rig()
    engine.add("a", prompt_of(140), max_tokens=3)
    engine.add("alone", prompt_of(90, first=30))
    engine.add("b", [*prompt_of(140), 3, 4])
    engine.add("c", [*prompt_of(140), 5])
    engine.step()
    engine.step()
    assert groups_of(engine) == [({"a", "b", "c"}, 128)]
    engine.batch = engine.scheduler.schedule()
    assert groups_of(engine) == [({"a", "b", "c"}, 128)]
    under_way, batch = engine.runner.execute(engine.batch), engine.batch
    engine.batch = engine.scheduler.schedule()
    assert groups_of(engine) == [({"b", "c"}, 128)]
    engine.apply(engine.scheduler.update(batch, under_way.result()))
    assert engine.ends["a"] == ("length", None)
    engine.apply(engine.scheduler.update(engine.batch, engine.runner.execute(engine.batch).result()))
    engine.step()
    assert groups_of(engine) == [({"b", "c"}, 128)]
    engine.run()
    engine.check_outputs()


def test_the_token_that_is_computed_is_not_shared() -> None:
    """Two equal prompts of 64 tokens: the second computes the last of them itself."""
    for length, shared in ((64, 0), (65, 64), (128, 64), (129, 128)):
        engine = rig()
        engine.add("a", prompt_of(length))
        engine.add("b", prompt_of(length))
        engine.step()
        engine.step()
        assert groups_of(engine) == ([({"a", "b"}, shared)] if shared else [])
        engine.run()
        engine.check_outputs()


def test_what_is_too_short_is_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefixes, "_LEAST_SAVED", 256)
    engine = rig()
    for name in "abc":
        engine.add(name, prompt_of(140))
    engine.step()
    engine.step()
    assert groups_of(engine) == [({"a", "b", "c"}, 128)]
    engine.scheduler.abort_request("c")
    engine.step()
    assert groups_of(engine) == []


def test_few_are_not_worth_it_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefixes, "_READS_LOST", 2)
    engine = rig()
    for name in "abcd":
        engine.add(name, prompt_of(140))
    engine.step()
    engine.step()
    assert groups_of(engine) == [({"a", "b", "c", "d"}, 128)]
    engine.scheduler.abort_request("d")
    engine.step()
    assert groups_of(engine) == []


def test_more_groups_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedPrefix, "MAX_GROUPS", 1)
    engine = rig()
    for name, first, length in (("a", 0, 70), ("b", 0, 70), ("c", 9, 140), ("d", 9, 140)):
        engine.add(name, prompt_of(length, first))
    engine.step()
    engine.step()
    assert groups_of(engine) == [({"c", "d"}, 128)]


def test_nothing_is_told_to_a_runner_that_cannot() -> None:
    engine = rig(cascade_attention=False)
    engine.add("a", prompt_of(140))
    engine.add("b", prompt_of(140))
    engine.run()
    assert engine.batch.shared_prefixes == []


def generate(path: str, **options: Any) -> tuple[list[list[list[int]]], list[int]]:
    """The tokens of all choices, and the sizes of the groups that there were."""
    defaults: dict[str, Any] = {"device": "cpu", "num_gpu_blocks_override": 128, "max_num_seqs": 16}
    sizes: list[int] = []
    with LLM(path, **defaults | options) as llm:
        execute = llm.llm_engine.worker.execute

        def recorded(batch: Any) -> Any:
            sizes.extend(prefix.num_requests for prefix in batch.shared_prefixes)
            return execute(batch)

        llm.llm_engine.worker.execute = recorded  # type: ignore[method-assign]
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    return [[choice.token_ids for choice in output.outputs] for output in outputs], sizes


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True},
        {"num_gpu_blocks_override": 28, "max_model_len": 256, "preemption_mode": "recompute"},
        {"num_gpu_blocks_override": 28, "max_model_len": 256, "swap_space": 0.01, "async_scheduling": True},
        {"block_size": 64},
    ],
    ids=["", "overlapped", "preempted", "swapped", "large blocks"],
)
def test_the_same_tokens(
    options: dict[str, Any], tiny_llama: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, _ = generate(tiny_llama.path, enable_prefix_caching=False)
    monkeypatch.setattr(Worker, "_decode_sizes", lambda worker: [1, 4, 16])
    monkeypatch.setattr(Worker, "_forward_sizes", lambda worker: [4, 24, 64])
    found, sizes = generate(tiny_llama.path, **options)
    assert found == wanted
    assert max(sizes) >= 3
    assert generate(tiny_llama.path, **options, disable_cascade_attn=True) == (wanted, [])


@pytest.mark.gpu
def test_the_same_log_probabilities_on_a_gpu(tiny_llama: TinyModel) -> None:
    """In bfloat16, where other roundings may draw other tokens: of the first decodes, for greedy requests."""
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=0)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    found: list[list[float | None]] = []
    for disabled in (False, True):
        with LLM(
            tiny_llama.path,
            device="cuda",
            dtype="bfloat16",
            num_gpu_blocks_override=128,
            max_num_seqs=16,
            disable_cascade_attn=disabled,
        ) as llm:
            graphs = llm.llm_engine.worker._runner._graphs._graphs
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert any(variant.with_prefixes for _, variant in graphs) is not disabled
        found.append([output.outputs[0].cumulative_logprob for output in outputs])
    assert found[0] == pytest.approx(found[1], abs=0.05)
