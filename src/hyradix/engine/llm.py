"""The offline engine: the same engine as the server's, in this process.

    from hyradix import LLM, SamplingParams
    llm = LLM("demo")
    llm.generate(["Hello"], SamplingParams(max_tokens=32))

Owns: turning prompts into requests and outputs into results. Does not know: sockets, HTTP.
Read next: ``engine.py``, ``build.py``.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hyradix.config import Settings
from hyradix.engine.build import build_engine
from hyradix.engine.fan_out import draw_seed, fan_out
from hyradix.engine.loading_bar import LoadingBar, batch_bar
from hyradix.engine.messages import EngineStats, RequestOutput
from hyradix.engine.results import Completion, GenerationResult, raise_error
from hyradix.errors import InvalidParameterError
from hyradix.request import Boundary, Namespace, Request, SamplingParams
from hyradix.text.chat_template import ChatTemplate
from hyradix.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or {"prompt": text} / {"prompt_token_ids": ids}."""


class LLM:
    """A model, loaded. ``options``: any field of ``Settings`` (max_context=, kv_slots=, ...).

    Raises ``ConfigError`` and ``ModelLoadError``. Not thread-safe.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        dtype: str = "auto",
        device: str = "auto",
        use_tqdm: bool = True,
        **options: object,
    ) -> None:
        settings = Settings.from_options(model=model, dtype=dtype, device=device, **options)
        with LoadingBar(is_shown=use_tqdm) as bar:
            self.engine = build_engine(settings, bar.update)
        directory = Path(self.engine.info.model_dir)
        self.tokenizer = Tokenizer.from_dir(directory)
        self.chat_template = ChatTemplate.from_dir(directory, self.tokenizer)
        self._count = itertools.count()
        self._streams: dict[str, deque[RequestOutput]] = {}
        """What each open stream has not given out yet, by request."""

    # ---- whole batches --------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[GenerationResult]:
        """Continue each prompt; results in the order of the prompts.

        ``prompts``: text, token ids, or a list of either. One ``SamplingParams`` serves all; a
        list gives one to each. Raises ``RequestError`` for a request that cannot run; the others
        of the call are then aborted.
        """
        items = _as_prompts(prompts)
        params = _as_params(sampling_params, len(items))
        jobs = [self._job(item, p) for item, p in zip(items, params, strict=True)]
        return self._run(jobs, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_kwargs: Any,
    ) -> list[GenerationResult]:
        """Reply to one conversation (a list of messages) or to several."""
        single = bool(messages) and isinstance(messages[0], Mapping)
        chats: list[Any] = [messages] if single or not messages else list(messages)
        params = _as_params(sampling_params, len(chats))
        jobs = [
            self._chat_job(chat, p, template_kwargs) for chat, p in zip(chats, params, strict=True)
        ]
        return self._run(jobs, use_tqdm)

    # ---- streams --------------------------------------------------------------------------------

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Deltas of one reply as they come. Closing the generator aborts the request."""
        return self._stream(self._job(prompt, sampling_params or SamplingParams()))

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **template_kwargs: Any,
    ) -> Generator[RequestOutput, None, None]:
        """As ``stream``, for a conversation."""
        params = sampling_params or SamplingParams(max_tokens=None)
        return self._stream(self._chat_job(messages, params, template_kwargs))

    def stats(self) -> EngineStats:
        """Counters and gauges of the engine."""
        return self.engine.stats()

    # ---- inside ---------------------------------------------------------------------------------

    def _job(self, prompt: Prompt, params: SamplingParams) -> _Job:
        text, ids = self._encode(prompt)
        return self._make_job(text, ids, (), params)

    def _chat_job(
        self, messages: Sequence[Message], params: SamplingParams, template_kwargs: dict[str, Any]
    ) -> _Job:
        rendered = self.chat_template.render(
            [dict(m) for m in messages], template_kwargs=template_kwargs or None
        )
        return self._make_job(rendered.text, rendered.token_ids, rendered.boundaries, params)

    def _make_job(
        self,
        text: str | None,
        ids: Any,
        boundaries: tuple[Boundary, ...],
        params: SamplingParams,
    ) -> _Job:
        params.validate(vocab_size=self.engine.info.vocab_size)
        name = f"offline-{next(self._count)}"
        seed = draw_seed() if params.seed is None else params.seed
        array = np.asarray(ids, dtype="<i4")
        requests = fan_out(
            array.tobytes(),
            params,
            id_prefix=name,
            seed=seed,
            boundaries=boundaries,
            namespace=Namespace(),
        )
        result = GenerationResult(
            name, text, array.tolist(), [Completion(i) for i in range(params.n)]
        )
        return _Job(requests, result)

    def _encode(self, prompt: Prompt) -> tuple[str | None, Any]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), _checked_ids(prompt["prompt_token_ids"])
            if "prompt" in prompt:
                prompt = prompt["prompt"]
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        return None, _checked_ids(prompt)

    def _run(self, jobs: list[_Job], use_tqdm: bool) -> list[GenerationResult]:
        owners = {r.request_id: (job, i) for job in jobs for i, r in enumerate(job.requests)}
        open_ids = dict.fromkeys(owners)
        with batch_bar(len(jobs), is_shown=use_tqdm) as bar:
            try:
                refused = [self.engine.add(r) for job in jobs for r in job.requests]
                for output in refused:
                    if output is not None:
                        del open_ids[output.request_id]
                for output in refused:
                    if output is not None:
                        raise_error(output)
                while open_ids:
                    for output in self._step():
                        if output.request_id not in owners:
                            continue
                        job, index = owners[output.request_id]
                        if output.is_finished:
                            del open_ids[output.request_id]
                        job.result.extend(index, output)
                        bar.advance(output, is_last=job.is_done)
            finally:
                self._settle(list(open_ids))
        return [job.result for job in jobs]

    def _stream(self, job: _Job) -> Generator[RequestOutput, None, None]:
        if len(job.requests) != 1:
            raise InvalidParameterError("a stream carries one reply: n must be 1", param="n")
        request = job.requests[0]
        refusal = self.engine.add(request)
        if refusal is not None:
            raise_error(refusal)
        is_open = True
        news = self._streams[request.request_id] = deque()
        try:
            while is_open:
                if not news:
                    self._step()
                    continue
                output = news.popleft()
                is_open = not output.is_finished
                raise_error(output)
                yield output
        finally:
            del self._streams[request.request_id]
            self._settle([request.request_id] if is_open else [])

    def _step(self) -> list[RequestOutput]:
        """Run a step; what it brought for open streams waits for their readers."""
        others: deque[RequestOutput] = deque()
        for output in self.engine.step():
            self._streams.get(output.request_id, others).append(output)
        return list(others)

    def _settle(self, request_ids: list[str]) -> None:
        """End what is unfinished and let the engine come to rest (if no stream is open).

        Also after a good end: with overlap, a step of what has finished may be in flight.
        """
        for request_id in request_ids:
            self.engine.abort(request_id)
        while not self._streams and self.engine.has_work():
            self._step()


class _Job:
    """One prompt on its way."""

    def __init__(self, requests: list[Request], result: GenerationResult) -> None:
        self.requests = requests
        self.result = result

    @property
    def is_done(self) -> bool:
        return all(c.finish_reason is not None for c in self.result.outputs)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InvalidParameterError(
            "prompts are texts, lists of token ids or mappings, or a list of them", param="prompts"
        )
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, (int, np.integer)) for item in items):
        return [items]
    return items


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    is_list = isinstance(params, Sequence) and all(isinstance(p, SamplingParams) for p in params)
    if not is_list:
        raise InvalidParameterError(
            "sampling_params is a SamplingParams or a list of them", param="sampling_params"
        )
    if len(params) != count:
        raise InvalidParameterError(
            f"{len(params)} sampling parameters for {count} prompts", param="sampling_params"
        )
    return list(params)


def _checked_ids(ids: Any) -> Any:
    """Token ids as an array. Raises ``InvalidParameterError`` for anything else."""
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise InvalidParameterError("a prompt is text or a flat list of token ids", param="prompt")
    if array.size and (int(array.min()) < 0 or int(array.max()) >= 1 << 31):
        raise InvalidParameterError("token ids are non-negative 32-bit integers", param="prompt")
    return array
