"""Workload files of the benchmarks: what requests arrive, in which order.

Owns: the two formats, told apart by content, plain or gzip:
- requests, ``{"prompt": [ids], "output": [ids], "parent": index or -1, "marks": [positions]}``;
- a trace, ``{"input_length": n, "output_length": m, "hash_ids": [...]}``: token ids are generated
  from the hash of each block, replies at random.
Does not know: the cache.
Invariants: a parent stands before its child; no prompt and no reply is empty.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from hyradix.errors import ConfigError
from hyradix.request import Int32Array

TRACE_VOCAB = 32_000
TRACE_MAX_INPUT = 64_000
TRACE_MAX_OUTPUT = 2_000
TRACE_LIMIT = 1_500
"""Requests taken from a trace unless told otherwise: what published figures use."""

_BLOCK_SALT, _OUTPUT_SALT, _TAIL_SALT = 7, 8, 9


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request. ``parent``: the index of a request whose reply this prompt contains, or -1."""

    prompt: bytes
    """Little-endian int32."""
    output: Int32Array
    parent: int
    marks: tuple[int, ...]

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt) // 4


class _Row(msgspec.Struct):
    prompt: list[int]
    output: list[int]
    parent: int = -1
    marks: list[int] = []


class _TraceRow(msgspec.Struct):
    input_length: int
    output_length: int
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0)]]


def read_workload(path: Path, *, seed: int = 1, limit: int | None = None) -> list[WorkloadRequest]:
    """The first ``limit`` requests of a file (all of a workload, 1,500 of a trace).

    ``seed`` decides the replies of a trace. Raises ``ConfigError`` that names file and line.
    """
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read {path}: {why}", param="file") from None
    lines = [line for line in content.splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"{path} holds no requests", param="file")
    if _is_trace(path, lines[0]):
        rows = _decode(path, lines, _TraceRow)
        return list(islice(_from_trace(rows, seed), TRACE_LIMIT if limit is None else limit))
    requests: list[WorkloadRequest] = []
    for row in _decode(path, lines[:limit], _Row):
        requests.append(_from_row(path, len(requests), row))
    return requests


def _is_trace(path: Path, line: bytes) -> bool:
    try:
        fields = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}, line 1: {error}", param="file") from None
    if isinstance(fields, dict):
        if "prompt" in fields:
            return False
        if "hash_ids" in fields:
            return True
    raise ConfigError(
        f"{path} is neither a workload (lines with prompt and output) nor a trace (lines with "
        "input_length, output_length and hash_ids)",
        param="file",
    )


def _decode(path: Path, lines: list[bytes], kind: type[Any]) -> Iterator[Any]:
    decoder = msgspec.json.Decoder(kind)
    for number, line in enumerate(lines, 1):
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}, line {number}: {error}", param="file") from None


def _from_row(path: Path, index: int, row: _Row) -> WorkloadRequest:
    fault = None
    if not row.prompt or not row.output:
        fault = "prompt and output must not be empty"
    elif not -1 <= row.parent < index:
        fault = f"parent must be -1 or the index of an earlier request, got {row.parent}"
    elif min(row.prompt) < 0 or min(row.output) < 0 or max(*row.prompt, *row.output) >= 1 << 31:
        fault = "token ids must be between 0 and 2^31 - 1"
    if fault is not None:
        raise ConfigError(f"{path}, line {index + 1}: {fault}", param="file")
    prompt = np.array(row.prompt, dtype="<i4").tobytes()
    return WorkloadRequest(
        prompt, np.array(row.output, dtype=np.int32), row.parent, tuple(row.marks)
    )


def _from_trace(rows: Iterator[_TraceRow], seed: int) -> Iterator[WorkloadRequest]:
    """As ``benchmarks/workloads.py mooncake``; what no block covers is nobody else's."""
    known = list(rows)
    size = _block_size(known)
    for index, row in enumerate(known):
        if not 0 < row.input_length <= TRACE_MAX_INPUT:
            continue
        parts = [_tokens([_BLOCK_SALT, block], size) for block in row.hash_ids]
        tail = row.input_length - size * len(parts)
        if tail > 0:
            parts.append(_tokens([seed, _TAIL_SALT, index], tail))
        count = max(1, min(TRACE_MAX_OUTPUT, row.output_length))
        output = _tokens([seed, _OUTPUT_SALT, index], count)
        prompt = np.concatenate(parts)[: row.input_length].tobytes()
        yield WorkloadRequest(prompt, output, -1, ())


def _block_size(rows: list[_TraceRow]) -> int:
    """Tokens of a hashed block: the smallest power of two that explains every length."""
    size = 1
    for row in rows:
        while row.input_length >= size * (len(row.hash_ids) + 1):
            size *= 2
    return size


def _tokens(seed: list[int], count: int) -> Int32Array:
    return np.random.default_rng(seed).integers(10, TRACE_VOCAB, size=count, dtype=np.int32)
