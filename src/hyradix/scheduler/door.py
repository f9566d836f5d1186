"""What is refused before it enters the queue.

Owns: the limits a request must keep to run at all. Raises only ``RequestError`` kinds.
"""

from __future__ import annotations

from hyradix.cache.prefix_cache import PrefixCache
from hyradix.config import EngineConfig
from hyradix.errors import CapacityError, ContextLengthError, InvalidParameterError
from hyradix.request import Request


def refuse_impossible(request: Request, config: EngineConfig, cache: PrefixCache) -> None:
    """Raise for a request that could never run, saying what it needs and what there is."""
    length = request.num_prompt_tokens
    if length == 0:
        raise InvalidParameterError("the prompt has no tokens", param="prompt")
    if length >= config.max_context:
        raise ContextLengthError(
            f"the prompt has {length} tokens; with at least one token of reply that is over "
            f"the limit of {config.max_context} tokens",
            param="prompt",
        )
    ids = request.prompt_array()
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise InvalidParameterError(
            f"the prompt names token ids outside the vocabulary (size {config.vocab_size})",
            param="prompt",
        )
    request.sampling.validate(vocab_size=config.vocab_size)
    max_tokens = request.sampling.max_tokens
    needed = config.max_context if max_tokens is None else length + max_tokens
    needed = min(needed, config.max_context)
    pinned = cache.pins.num_elsewhere(request.namespace, request.prompt_token_ids)
    if needed > config.num_kv_slots - pinned:
        besides = f", {pinned} of them pinned" if pinned else ""
        raise CapacityError(
            f"the request needs {needed} KV slots (a prompt of {length} and its reply) and the "
            f"pool has {config.num_kv_slots}{besides}; lower max_tokens or shorten the prompt",
            param="max_tokens",
        )
