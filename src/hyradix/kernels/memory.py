"""Memory seen from several sides: views that are never written, bytes that are counted once.

Owns: ``ReadOnly`` (lent memory, overlapping windows), ``physical_bytes``, ``moved``, ``upload``.
Does not know: whose memory it is.
Invariant: a view taken from a ``ReadOnly`` is one too; whatever is computed from it is plain.
Read next: ``causal_conv/sliding.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_map

W = TypeVar("W")


class ReadOnly(torch.Tensor):
    """``ReadOnly(tensor)``: the same memory; every write through it raises ``ValueError``."""

    elem: torch.Tensor
    """The tensor behind it, for kernels that take pointers. Not to be written."""

    @staticmethod
    def __new__(cls, elem: torch.Tensor) -> ReadOnly:
        with torch.inference_mode():  # outside of it, views taken inside of it are refused
            view: ReadOnly = torch.Tensor._make_wrapper_subclass(
                cls,
                elem.shape,
                strides=elem.stride(),
                storage_offset=elem.storage_offset(),
                dtype=elem.dtype,
                device=elem.device,
            )
        view.elem = elem
        return view

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        raise ValueError("this memory is read-only: it is not handed to other libraries")

    # torch's own repr needs tolist(), which subclasses lack; its stub cannot be matched
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ReadOnly({self.elem!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is typed as a function
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        for i, argument in enumerate(schema.arguments):
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            alias = argument.alias_info
            if alias is not None and alias.is_write and _has_read_only(given):
                raise ValueError(f"this memory is read-only: {schema.name} may not write to it")
        result = func(*tree_map(_plain, list(args)), **tree_map(_plain, kwargs))
        aliases = [value.alias_info for value in schema.returns if value.alias_info is not None]
        if aliases and not any(alias.is_write for alias in aliases):  # a view of our memory
            return tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, result)
        return result


def _has_read_only(given: Any) -> bool:
    values = given if isinstance(given, (list, tuple)) else (given,)
    return any(isinstance(value, ReadOnly) for value in values)


def _plain(x: Any) -> Any:
    return x.elem if isinstance(x, ReadOnly) else x


def physical_bytes(*tensors: torch.Tensor) -> int:
    """Bytes of the storages behind ``tensors``, each once however many views there are."""
    storages = [_plain(tensor).untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def moved(weights: W, device: torch.device, dtype: torch.dtype | None = None) -> W:
    """A dataclass of weights with its tensors on a device, and of a type where one is given."""
    tensors = {f.name: getattr(weights, f.name) for f in fields(weights)}  # type: ignore[arg-type]
    there = {n: x.to(device, dtype) for n, x in tensors.items() if isinstance(x, torch.Tensor)}
    return replace(weights, **there)  # type: ignore[type-var]


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy on ``device``; to a GPU through pinned memory, so that nobody waits for it.

    The array may be changed as soon as this returns.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor.clone()
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
