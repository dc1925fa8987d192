"""LLM: a model that answers prompts, in this process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from pagedinfer.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from pagedinfer.chat_template import ChatTemplate, Message, is_conversation
from pagedinfer.config import EngineConfig, unknown_option_message
from pagedinfer.engine.engine import LLMEngine
from pagedinfer.engine.input_processor import ProcessedPrompt, Prompt
from pagedinfer.errors import RequestTooLargeError
from pagedinfer.interrupt import deferred_interrupts
from pagedinfer.logging import get_logger
from pagedinfer.outputs import CompletionOutput, RequestOutput
from pagedinfer.progress import ProgressBar
from pagedinfer.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pagedinfer.engine.stats import SchedulerStats

logger = get_logger(__name__)

T = TypeVar("T")


class LLM:
    """Loads a model and generates text with it.

        with LLM("path/to/model") as llm:
            for output in llm.generate(["Hello, my name is"], SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    It runs in this process, on one GPU or on the CPU, and starts no other, unless tensor_parallel_size is
    more than one. `close()`, or the end of a `with` block, gives all its memory back.

    Args:
        model: folder of a checkpoint as transformers saves it: config.json and safetensors. Or a GGUF file.
            Or the id of either on the Hugging Face hub, which is fetched into the hub client's cache:
            "owner/name", and of a GGUF file "owner/name/file.gguf" or "owner/name:Q4_K_M".
        tokenizer: folder or hub id of the tokenizer; the model's by default.
        skip_tokenizer_init: load no tokenizer. Prompts are then token ids, and outputs have no text.
        revision: of the model on the hub: a branch, a tag or a commit; "main" by default.
        tokenizer_revision: the same of `tokenizer`.
        download_dir: folder to fetch into, instead of the hub client's cache.
        hf_token: for models on the hub that need one; by default HF_TOKEN, or what `hf auth login` stored.
        chat_template: for `chat`, instead of the tokenizer's: a Jinja template, or the path of a file with
            one.
        dtype: of weights, activations and KV cache: "float32", "float16" or "bfloat16". "auto": the
            checkpoint's, but float32 on a CPU that is slower in that (x86 without AVX2).
        load_format: "safetensors"; "pt" for .bin files, read so that nothing in them can run; "gguf"; or
            "dummy" for random weights, for which config.json is enough. "auto": what the model's path is, and
            of a folder its safetensors where there are any, else its .bin files.
        device: "cuda", "cpu", or "auto": the GPU if there is one that can be used.
        seed: of the requests that bring none of their own: 64 bits, unsigned. The same requests, in the
            same order, to an engine with the same seed give the same tokens.
        gpu_memory_utilization: share, in (0, 1], of the GPU memory that is free at the start that weights,
            activations and KV cache may use together. What other processes hold is not counted as ours.
        kv_cache_memory_bytes: bytes of the KV cache. By default what gpu_memory_utilization leaves, or on a
            CPU a quarter of the free memory.
        num_gpu_blocks_override: blocks of the KV cache, instead of as many as there is room for.
        block_size: tokens in a block of the KV cache: 8, 16, 32 or 64.
        max_model_len: longest request in tokens, prompt and output together, so at least 2. By default the
            model's, or as much of it as the KV cache can hold.
        max_num_seqs: most requests that run at the same time. By default 1024 on a GPU of 70 GiB and more,
            256 otherwise.
        max_num_batched_tokens: most tokens that one step computes; a longer prompt is computed in chunks.
            By default 16384 on a GPU of 70 GiB and more, 8192 on others, 2048 on a CPU and under
            scheduling_policy="priority", where an urgent request waits for the step under way.
        enable_chunked_prefill: False computes a prompt in one step or not yet; a step then has room for the
            longest.
        enable_prefix_caching: reuse the KV of prompts that begin with the same tokens.
        scheduling_policy: "fcfs", first come first served, or "priority", by `generate`'s `priority`.
        long_prefill_token_threshold: most tokens of one prompt in one step while others run; 0: no limit.
        watermark: share, in [0, 1), of the KV cache that admission leaves free for the requests that run.
        preemption_mode: what happens to a running request whose blocks another one needs: "swap" moves them
            to CPU memory, "recompute" drops them, "auto" takes the cheaper.
        swap_space: GiB of CPU memory to swap to. By default 4 with a GPU, 0 without.
        tensor_parallel_size: how many GPUs, or processes on a CPU, share the model. Each is a rank, with a
            process of its own that ends with the LLM; what is said of memory above is of each rank, except
            for `swap_space`, which the ranks of a machine share.
        distributed_backend: what connects the ranks: "nccl" between GPUs, "gloo" through the CPU, with which
            ranks may share a GPU; "auto" takes NCCL on GPUs.
        nnodes: machines that the ranks are on, as many on each. This one is node 0; on each of the others
            runs `python -m pagedinfer.distributed.node`, with the same tensor_parallel_size.
        node_rank: 0 here.
        master_addr: of this machine, as the other nodes reach it.
        master_port: where they reach it; free here.
        enforce_eager: on a GPU, launch every step kernel by kernel, instead of replaying CUDA graphs for
            those of up to 512 decodes or 2,048 tokens. It saves the time and memory of capturing; small
            batches are slower.
        disable_cascade_attn: on a GPU, have each request read all of its KV for itself, also where several
            share so long a prefix that reading that once, for all of them, is quicker.
        async_scheduling: schedule and launch a step while the device computes the one before, so that it
            never waits for the host. By default on with a GPU; a CPU computes in the thread that schedules,
            and would gain nothing. By default the launch is just in time under scheduling_policy="priority":
            earlier, an urgent request would find one more step in front of it; and on one GPU a short urgent
            prompt is computed ahead of the step under way. The outputs are the same.
        trace: a file to write down each step's schedule in, with what decided it; `pagedinfer explain` and
            `pagedinfer replay` read it, and https://ui.perfetto.dev shows it. A name in .gz is compressed.
        max_logprobs: the most log-probabilities that a request may ask for at a position; -1: no limit.
        logprobs_mode: what `logprobs` are of: "raw_logprobs", the model's distribution, or
            "processed_logprobs", what is drawn from, after penalties, temperature and filters. Those of
            prompts, and of requests that did not ask for `logprobs`, are the model's in either case.
        generation_config: where the sampling parameters of requests without any come from: "auto", the
            model's generation_config.json; "vllm", `SamplingParams()`; or a folder with such a file.

    Raises:
        TypeError: an unknown parameter; the message suggests the nearest known one.
        ValueError: a parameter out of its range, or a model that cannot be loaded; the message says what
            would be right.
        WeightsError: the checkpoint's tensors are not the model's; the message names them.
        DeviceError: no GPU can be used and device="cuda"; the message says why.
        DownloadError: a model of the hub that cannot be fetched; the message says what to do.
        EngineDeadError: a rank of tensor parallelism died while it started.
        OutOfMemoryError: weights or KV cache do not fit; the message says what was wanted, what there is,
            and what would fit.
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        skip_tokenizer_init: bool = False,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        download_dir: str | None = None,
        hf_token: str | None = None,
        chat_template: str | None = None,
        dtype: str = "auto",
        load_format: Literal["auto", "safetensors", "pt", "gguf", "dummy"] = "auto",
        device: Literal["auto", "cuda", "cpu"] = "auto",
        seed: int = 0,
        gpu_memory_utilization: float = 0.92,
        kv_cache_memory_bytes: int | None = None,
        num_gpu_blocks_override: int | None = None,
        block_size: int = 16,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_chunked_prefill: bool = True,
        enable_prefix_caching: bool = True,
        scheduling_policy: Literal["fcfs", "priority"] = "fcfs",
        long_prefill_token_threshold: int = 0,
        watermark: float = 0.0,
        preemption_mode: Literal["auto", "swap", "recompute"] = "auto",
        swap_space: float | None = None,
        tensor_parallel_size: int = 1,
        distributed_backend: Literal["auto", "nccl", "gloo"] = "auto",
        nnodes: int = 1,
        node_rank: int = 0,
        master_addr: str = "127.0.0.1",
        master_port: int = 29500,
        enforce_eager: bool = False,
        disable_cascade_attn: bool = False,
        async_scheduling: bool | None = None,
        trace: str | None = None,
        max_logprobs: int = 20,
        logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs",
        generation_config: str = "auto",
        **unknown: Any,
    ) -> None:
        for name in unknown:
            raise TypeError(unknown_option_message("LLM", name))
        config = EngineConfig(
            model=model,
            tokenizer=tokenizer,
            skip_tokenizer_init=skip_tokenizer_init,
            revision=revision,
            tokenizer_revision=tokenizer_revision,
            download_dir=download_dir,
            hf_token=hf_token,
            chat_template=chat_template,
            dtype=dtype,
            load_format=load_format,
            device=device,
            seed=seed,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            num_gpu_blocks_override=num_gpu_blocks_override,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
            enable_prefix_caching=enable_prefix_caching,
            scheduling_policy=scheduling_policy,
            long_prefill_token_threshold=long_prefill_token_threshold,
            watermark=watermark,
            preemption_mode=preemption_mode,
            swap_space=swap_space,
            tensor_parallel_size=tensor_parallel_size,
            distributed_backend=distributed_backend,
            nnodes=nnodes,
            node_rank=node_rank,
            master_addr=master_addr,
            master_port=master_port,
            enforce_eager=enforce_eager,
            disable_cascade_attn=disable_cascade_attn,
            async_scheduling=async_scheduling,
            trace=trace,
            max_logprobs=max_logprobs,
            logprobs_mode=logprobs_mode,
            generation_config=generation_config,
        )
        self.llm_engine = LLMEngine(config)
        self._request_ids = (str(number) for number in itertools.count())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generates for all prompts together and returns when all have finished.

        Args:
            prompts: one prompt or a list of them. A prompt is a string, {"prompt": string},
                {"prompt_token_ids": [...]} or a bare list of token ids. A dict may have a "cache_salt": the
                prefix cache shares KV only between prompts of one salt.
            sampling_params: for all prompts, or one for each; by default `get_default_sampling_params()`.
            use_tqdm: show a progress bar on stderr.
            priority: one integer for each prompt, lower first; needs scheduling_policy="priority".

        Returns:
            One output for each prompt, in their order. A request that can never fit (its prompt fills the
            context, or its KV cache would be larger than there is) has the finish_reason "error" and its
            `error` says why, and a warning is logged; the others are not affected.

        Raises:
            ValueError: a malformed prompt or parameter; nothing has run then.
            KeyboardInterrupt: on Ctrl-C, after the step under way; the call's requests are dropped and the
                LLM can be used again.
            Exception: what a step raised, as a logits processor may; likewise.
        """
        engine = self.llm_engine
        processed = engine.input_processor.process_all(prompts)
        if sampling_params is None:
            sampling_params = engine.default_sampling_params
        params = _one_each("sampling_params", sampling_params, len(processed), SamplingParams)
        for each in params:
            engine.check_params(each)
        priorities = self._priorities(priority, len(processed))

        def add(request_id: str, index: int) -> None:
            engine.add_request(
                request_id,
                processed[index],
                params[index],
                priorities[index],
                output_kind=RequestOutputKind.FINAL_ONLY,
            )

        with ProgressBar(len(processed), shown=use_tqdm) as bar:
            return self._run(processed, add, [each.n for each in params], bar)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """Searches for the most likely continuations of all prompts together.

        The KV of a prompt is computed once, and beams share that of what they have in common.

        Args:
            prompts: as in `generate`.
            params: how to search; see `BeamSearchParams` for what a score is and when a search ends.
            use_tqdm: show a progress bar on stderr.

        Returns:
            One output for each prompt, in their order, with params.beam_width sequences, the best first.
            A prompt that can never fit has none, and its `error` says why.

        Raises:
            ValueError: a malformed prompt or parameter, or more beams than max_num_seqs.
            KeyboardInterrupt: as in `generate`.
        """
        engine = self.llm_engine
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params must be BeamSearchParams, got {params!r}")
        processed = engine.input_processor.process_all(prompts)

        def add(request_id: str, index: int) -> None:
            engine.add_beam_search(request_id, processed[index], params)

        with ProgressBar(len(processed), shown=use_tqdm) as bar:
            outputs = self._run(processed, add, [params.beam_width] * len(processed), bar)
        return [self._beam_output(output, params) for output in outputs]

    def _beam_output(self, output: RequestOutput, params: BeamSearchParams) -> BeamSearchOutput:
        tokenizer = self.llm_engine.tokenizer
        sequences = []
        for found in output.outputs if output.error is None else ():
            assert found.cumulative_logprob is not None
            num_tokens = len(found.token_ids)
            hidden = found.finish_reason == "stop" and not params.include_stop_str_in_output
            tokens = output.prompt_token_ids + (found.token_ids[:-1] if hidden else found.token_ids)
            sequences.append(
                BeamSearchSequence(
                    tokens=tokens,
                    cum_logprob=found.cumulative_logprob,
                    score=found.cumulative_logprob / num_tokens**params.length_penalty,
                    text=None if tokenizer is None else cast("str", tokenizer.decode(tokens)),
                    finish_reason=found.finish_reason,
                )
            )
        return BeamSearchOutput(sequences, output.metrics, output.error)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one chat or several, which the model's template turns into prompts.

        Args:
            messages: a list of messages, {"role": "user", "content": "..."}, or a list of such lists.
            sampling_params, use_tqdm: as in `generate`.
            chat_template: instead of the LLM's or the tokenizer's: a Jinja template, or the path of a file
                with one.
            add_generation_prompt: end the prompt with what begins an answer.
            continue_final_message: go on with the last message; add_generation_prompt must be False then.
            tools: JSON schemas of functions that the model may call.
            chat_template_kwargs: more variables for the template.

        Returns:
            As `generate`.

        Raises:
            ValueError: no template, malformed messages, or messages that the template refuses; nothing has
                run then.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise ValueError(
                f'messages must be a list of {{"role": "user", "content": "..."}}, or a list of such '
                f"lists, got {messages!r:.80}"
            )
        template = ChatTemplate(self.get_tokenizer(), chat_template or self.llm_engine.chat_template)
        chats = cast("Sequence[Sequence[Message]]", [messages] if is_conversation(messages) else messages)
        prompts: list[Prompt] = []
        for chat in chats:
            text, token_ids = template.encode(
                chat,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                template_kwargs=chat_template_kwargs,
            )
            prompts.append({"prompt": text, "prompt_token_ids": token_ids})
        return self.generate(prompts, sampling_params, use_tqdm)

    def _run(
        self,
        prompts: list[ProcessedPrompt],
        add: Callable[[str, int], None],
        nums_choices: list[int],
        bar: ProgressBar,
    ) -> list[RequestOutput]:
        """Runs requests to their ends. `add` queues that of a prompt, by id and the prompt's index."""
        engine = self.llm_engine
        engine.check_open()
        outputs: dict[str, RequestOutput | None] = {}
        unfinished: set[str] = set()

        def finish(output: RequestOutput) -> None:
            outputs[output.request_id] = output
            bar.finish(output)

        with deferred_interrupts() as check_interrupt:
            try:
                for index, (prompt, num_choices) in enumerate(zip(prompts, nums_choices, strict=True)):
                    request_id = next(self._request_ids)
                    outputs[request_id] = None  # keeps the order of the prompts
                    try:
                        add(request_id, index)
                        unfinished.add(request_id)
                    except RequestTooLargeError as error:
                        finish(_refused(request_id, prompt, num_choices, error))
                while unfinished:
                    for output in engine.step():
                        if output.finished and output.request_id in unfinished:
                            unfinished.remove(output.request_id)
                            finish(output)
                    check_interrupt()
            except BaseException:
                for request_id in unfinished:
                    engine.abort_request(request_id)
                raise
        finished = [output for output in outputs.values() if output is not None]
        errors = [output.error for output in finished if output.error is not None]
        if errors:
            logger.warning(
                "%d of %d requests failed, as their `error` says; the first: %s",
                len(errors),
                len(finished),
                errors[0],
            )
        return finished

    def _priorities(self, priority: Sequence[int] | None, count: int) -> list[int]:
        if priority is None:
            return [0] * count
        if self.llm_engine.config.scheduling_policy != "priority":
            raise ValueError('priority needs an LLM with scheduling_policy="priority"')
        return _one_each("priority", priority, count, int)

    def reset_prefix_cache(self) -> None:
        """Forgets the KV of earlier prompts."""
        self.llm_engine.reset_prefix_cache()

    def get_metrics(self) -> SchedulerStats:
        """How things stand: requests, cache and its use, and counters since the start."""
        return self.llm_engine.scheduler.stats()

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a prompt that is given without any; see `generation_config`."""
        return self.llm_engine.default_sampling_params

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer.

        Raises:
            ValueError: it was not loaded, since skip_tokenizer_init was set.
        """
        if self.llm_engine.tokenizer is None:
            raise ValueError("there is no tokenizer: skip_tokenizer_init is set")
        return self.llm_engine.tokenizer

    def close(self) -> None:
        """Gives all memory back, on the device and on the CPU. The LLM cannot be used after."""
        self.llm_engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _one_each(name: str, given: T | Sequence[T], count: int, kind: type[T]) -> list[T]:
    """One value for each prompt, from one for all or a list."""
    if isinstance(given, kind) and kind is not int:
        return [given] * count
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ValueError(f"{name} must be a list with one {kind.__name__} for each prompt, got {given!r}")
    if len(given) != count:
        raise ValueError(f"{name} must have one entry for each of the {count} prompts, got {len(given)}")
    for value in given:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{name} must hold {kind.__name__} values, got {value!r}")
    return list(given)


def _refused(
    request_id: str, prompt: ProcessedPrompt, num_choices: int, error: RequestTooLargeError
) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        prompt=prompt.text,
        prompt_token_ids=prompt.token_ids,
        outputs=[
            CompletionOutput(index=i, text="", token_ids=[], finish_reason="error")
            for i in range(num_choices)
        ],
        finished=True,
        error=str(error),
    )
