"""Compile every kernel launch for a GPU that is not there: registers, spills, shared memory.

``with compiled_for(90) as found:`` takes the place of launching: each launch inside is compiled for
that compute capability (Triton's own ptxas), nothing runs. What the interpreter accepts and the
compiler does not shows here, and so do spills.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.gpu.machine_code import descriptor_faults
from hyradix.kernels import triton_dense, triton_support
from hyradix.kernels.linear import triton as linear

_TYPES = {
    torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.int32: "i32", torch.int64: "i64", torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """registers and local (spilled and indexed) bytes of a thread; shared bytes of a program.

    num_products, faults: matrix instructions by warp groups, and those that are wrong
    (``gpu/machine_code.py``).
    """

    name: str
    num_warps: int
    registers: int
    local_bytes: int
    shared_bytes: int
    ptx: str
    num_products: int
    faults: tuple[str, ...]


@dataclass(frozen=True)
class Variant:
    """What Triton would compile for one launch."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int], list[list[Any]]]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """Of the kernel."""
        return str(self.kernel.__name__)

    @property
    def key(self) -> tuple[Any, ...]:
        """Launches of one key share what is compiled."""
        parts = (self.signature, self.constants, self.attributes, self.options)
        module = self.kernel.fn.__module__
        return (module, self.name, *(str(sorted(part.items())) for part in parts))


@contextmanager
def collected() -> Iterator[list[Variant]]:
    """Launches inside are neither compiled nor run."""
    found: list[Variant] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append(_variant(self, args, options))

    with _launching(run):
        yield found


@contextmanager
def compiled_for(capability: int) -> Iterator[list[Compiled]]:
    """Launches inside are compiled instead of run."""
    found: list[Compiled] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append(compile_variant(_variant(self, args, options), capability))

    with _launching(run):
        yield found


@contextmanager
def _launching(run: Callable[..., None]) -> Iterator[None]:
    """``run`` takes the place of launching; what only a GPU of today does is asked for too."""
    overlap = mock.patch.object(triton_support, "_can_overlap", return_value=True)
    tiles = [
        mock.patch.object(x, "has_descriptors", return_value=True) for x in (linear, triton_dense)
    ]
    with mock.patch.object(JITFunction, "run", run), overlap, tiles[0], tiles[1]:
        yield


def _variant(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Variant:
    """As Triton tells launches apart: by types, constants, ones and multiples of 16."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for i, (parameter, value) in enumerate(zip(kernel.params, args, strict=True)):
        name, is_special = parameter.name, not parameter.do_not_specialize
        is_int = type(value) is int
        if parameter.is_constexpr or value is None or (is_int and value == 1 and is_special):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
            if value.data_ptr() % 16 == 0 and is_special:
                attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            tile = ", ".join(map(str, value.block_shape))
            signature[name] = f"tensordesc<{_TYPES[value.base.dtype]}[{tile}]>"
        elif isinstance(value, bool):
            signature[name] = "i1"
        elif is_int:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and is_special:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    return Variant(kernel, signature, constants, attributes, options)


def compile_variant(variant: Variant, capability: int) -> Compiled:
    """Compile it for that compute capability."""
    source = ASTSource(variant.kernel, variant.signature, variant.constants, variant.attributes)
    target = GPUTarget("cuda", capability, 32)
    built = triton.compile(source, target=target, options=variant.options)
    registers, local = _resources(built.asm["cubin"])
    num_warps = variant.options.get("num_warps", 4)
    code = _told(built.asm["cubin"], "nvdisasm", "-c")
    num_products, faults = descriptor_faults(code, num_warps=num_warps)
    return Compiled(
        variant.name, num_warps, registers, local, built.metadata.shared, built.asm["ptx"],
        num_products, tuple(faults),
    )  # fmt: skip


def _told(cubin: bytes, tool: str, option: str) -> str:
    """What one of Triton's own copies of CUDA's tools says."""
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _resources(cubin: bytes) -> tuple[int, int]:
    text = _told(cubin, "cuobjdump", "--dump-resource-usage")
    line = next(line for line in text.splitlines() if "REG:" in line)
    numbers = dict(part.split(":", 1) for part in line.split() if ":" in part)
    return int(numbers["REG"]), int(numbers["STACK"]) + int(numbers["LOCAL"])
