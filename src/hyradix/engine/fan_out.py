"""One prompt with ``n`` replies becomes n requests with related seeds.

Owns: how the seed of choice i follows from the caller's. Does not know: who asks.
"""

from __future__ import annotations

import hashlib
import secrets

import msgspec

from hyradix.request import Boundary, Namespace, Request, SamplingParams


def draw_seed() -> int:
    """A random seed for a request that gave none."""
    return secrets.randbits(63)


def child_seed(seed: int, child: int) -> int:
    """The seed of choice ``child``: the first keeps the request's, the others hash it."""
    if child == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{child}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def fan_out(
    prompt_token_ids: bytes,
    sampling: SamplingParams,
    *,
    id_prefix: str,
    seed: int,
    boundaries: tuple[Boundary, ...] = (),
    namespace: Namespace | None = None,
) -> list[Request]:
    """``sampling.n`` requests named ``{id_prefix}-{i}``, each with n = 1."""
    single = msgspec.structs.replace(sampling, n=1)
    return [
        Request(
            request_id=f"{id_prefix}-{child}",
            prompt_token_ids=prompt_token_ids,
            sampling=single,
            seed=child_seed(seed, child),
            boundaries=boundaries,
            namespace=namespace or Namespace(),
        )
        for child in range(sampling.n)
    ]
