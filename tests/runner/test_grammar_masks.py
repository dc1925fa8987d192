"""Masks of structured outputs on their way to the device: right for each token, whatever else is going on.

The grammars here are scripts, so that no llguidance is needed, and so strict that nothing goes wrong unseen:
what a text may go on with depends on all that it has, and a token that was not allowed raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import pytest

from pagedinfer import LLM, LLMEngine, RequestOutput, SamplingParams, StructuredOutputsParams
from pagedinfer.config import EngineConfig
from pagedinfer.engine.grammars import GrammarCompiler
from pagedinfer.sampling_params import RequestOutputKind
from tests.conftest import TinyModel
from tests.tiny_models import EOS, VOCAB_SIZE

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH = 9
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 64, "max_num_seqs": 4}
PROMPTS = [{"prompt_token_ids": [3 + (i + 5 * j) % 300 for j in range(3 + 4 * i)]} for i in range(8)]


class ScriptedMatcher:
    """As much of llguidance's matcher as the runner uses. After LENGTH tokens EOS alone is allowed."""

    def __init__(self, script: int, tokens: list[int] | None = None) -> None:
        self.script = script
        self.tokens = tokens or []

    def deep_copy(self) -> Self:
        return type(self)(self.script, self.tokens.copy())

    def allowed(self) -> list[int]:
        if len(self.tokens) == LENGTH:
            return [EOS]
        remainder = sum((i + 1) * token for i, token in enumerate(self.tokens)) + self.script
        return [token for token in range(3, VOCAB_SIZE) if token % 11 == remainder % 11]

    def compute_bitmask(self) -> bytes:
        bits = np.zeros(VOCAB_SIZE, np.bool_)
        bits[self.allowed()] = True
        return np.packbits(bits, bitorder="little").tobytes()

    def consume_token(self, token: int) -> bool:
        assert token in self.allowed(), (token, self.tokens)
        self.tokens.append(token)
        return True

    def is_stopped(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] == EOS

    def is_error(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The regular expression of a request is the number of its script."""

    def matcher(self: GrammarCompiler, params: StructuredOutputsParams) -> ScriptedMatcher:
        assert params.regex is not None
        return ScriptedMatcher(int(params.regex))

    def masks(self: GrammarCompiler, matchers: list[ScriptedMatcher]) -> Any:
        return np.stack([np.frombuffer(matcher.compute_bitmask(), np.int32) for matcher in matchers])

    monkeypatch.setattr(GrammarCompiler, "matcher", matcher)
    monkeypatch.setattr(GrammarCompiler, "masks", masks)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def llm(tiny_llama: TinyModel, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """With a step launched before the last one's tokens are known, and on a GPU graphs for other requests."""
    with LLM(tiny_llama.path, device=request.param, async_scheduling=True, **OPTIONS) as llm:
        yield llm


def scripted(number: int, **fields: Any) -> SamplingParams:
    options: dict[str, Any] = {"temperature": 1.0, "seed": number, "max_tokens": 30}
    return SamplingParams(structured_outputs={"regex": str(number)}, **options | fields)


# Of everything that changes logits, beside masks and without, and requests that run as CUDA graphs.
REQUESTS = [
    scripted(1),
    scripted(2, temperature=0.0),
    SamplingParams(seed=3, max_tokens=24, ignore_eos=True),
    scripted(4, presence_penalty=1.0, repetition_penalty=1.3, logprobs=2),
    scripted(5, n=3),
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    scripted(7, allowed_token_ids=[EOS, *range(100, VOCAB_SIZE)], logit_bias={120: 3.0, 121: -100.0}),
    scripted(8, max_tokens=5, min_tokens=3),
]


def follows(params: SamplingParams, tokens: list[int]) -> bool:
    """Whether a text is one of its script, complete unless it was cut off."""
    assert params.structured_outputs is not None
    matcher = ScriptedMatcher(int(params.structured_outputs.regex or 0))
    for token in tokens:
        matcher.consume_token(token)
    return matcher.is_stopped() or len(tokens) == params.max_tokens


def check(outputs: list[RequestOutput], requests: list[SamplingParams]) -> list[list[list[int]]]:
    """The tokens by request and choice, which have their forms."""
    found = []
    for output, params in zip(outputs, requests, strict=True):
        assert output.error is None
        found.append([choice.token_ids for choice in output.outputs])
        if params.structured_outputs is not None:
            assert all(follows(params, tokens) for tokens in found[-1])
            if params.allowed_token_ids is not None:
                assert set(found[-1][0]) <= set(params.allowed_token_ids)
    return found


def test_every_token_is_one_that_the_grammar_allows(llm: LLM) -> None:
    """Eight requests for four slots, with all that masks go together with; each is what it is alone."""
    together = check(llm.generate(PROMPTS, REQUESTS, use_tqdm=False), REQUESTS)
    for prompt, params, tokens in zip(PROMPTS, REQUESTS, together, strict=True):
        assert check(llm.generate([prompt], params, use_tqdm=False), [params]) == [tokens]


def test_a_slot_forgets_its_grammar(llm: LLM) -> None:
    """Requests without one draw as ever after others had their slots."""
    plain = [params for params in REQUESTS if params.structured_outputs is None] * 2
    before = check(llm.generate(PROMPTS[:4], plain, use_tqdm=False), plain)
    check(llm.generate(PROMPTS, REQUESTS, use_tqdm=False), REQUESTS)
    assert check(llm.generate(PROMPTS[:4], plain, use_tqdm=False), plain) == before


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_and_aborted(tiny_llama: TinyModel, device: str, mode: str) -> None:
    """A resumed request's matcher is a new one that has what was generated; others leave in the middle."""
    small = {"num_gpu_blocks_override": 6, "max_model_len": 96, "preemption_mode": mode, "swap_space": 0.01}
    options = OPTIONS | small | {"device": device, "async_scheduling": True}
    engine = LLMEngine(EngineConfig(model=tiny_llama.path, **options))
    engine.scheduler.admission.fits_at_worst = lambda *_: True  # type: ignore[method-assign]
    prompts = [{"prompt_token_ids": [7 + i] * 28} for i in range(4)]
    for i in range(4):
        engine.add_request(str(i), prompts[i], scripted(i), output_kind=RequestOutputKind.CUMULATIVE)
        engine.step()
    ends: dict[str, RequestOutput] = {}
    num_steps = 0
    while engine.has_unfinished_requests():
        ends |= {output.request_id: output for output in engine.step()}
        num_steps += 1
        if num_steps == 4:
            engine.abort_request("3")
            engine.add_request("3", prompts[3], scripted(9))
    assert engine.scheduler.counters.num_preemptions > 0
    check([ends[str(i)] for i in range(4)], [scripted(0), scripted(1), scripted(2), scripted(9)])
    engine.close()


@pytest.mark.gpu
def test_the_gpu_draws_what_the_cpu_draws(tiny_llama: TinyModel) -> None:
    found = []
    for device in ("cpu", "cuda"):
        with LLM(tiny_llama.path, device=device, **OPTIONS) as llm:
            found.append(check(llm.generate(PROMPTS, REQUESTS, use_tqdm=False), REQUESTS))
    assert found[0] == found[1]
