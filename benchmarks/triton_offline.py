"""Compile every kernel launch for a GPU that is not there: registers, spills, shared memory.

``with compiled_for(90) as found:`` takes the place of launching: each launch inside is compiled for
that compute capability (Triton's own ptxas), nothing runs. What the interpreter accepts and the
compiler does not shows here, and so do spills.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
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

_TYPES = {
    torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.int32: "i32", torch.int64: "i64", torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """registers and local (spilled and indexed) bytes of a thread; shared bytes of a program."""

    name: str
    num_warps: int
    registers: int
    local_bytes: int
    shared_bytes: int
    ptx: str


@contextmanager
def compiled_for(capability: int) -> Iterator[list[Compiled]]:
    """Launches inside are compiled instead of run."""
    found: list[Compiled] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append(_compile(self, args, capability, options))

    with mock.patch.object(JITFunction, "run", run):
        yield found


def _compile(kernel: Any, args: tuple[Any, ...], capability: int, options: Any) -> Compiled:
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for i, (parameter, value) in enumerate(zip(kernel.params, args, strict=True)):
        name = parameter.name
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
            if value.data_ptr() % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, bool):
            signature[name] = "i1"
        elif isinstance(value, int):
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", capability, 32)
    built = triton.compile(source, target=target, options=options)
    registers, local = _resources(built.asm["cubin"])
    return Compiled(
        kernel.__name__, options.get("num_warps", 4), registers, local, built.metadata.shared,
        built.asm["ptx"],
    )  # fmt: skip


def _resources(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    line = next(line for line in text.splitlines() if "REG:" in line)
    numbers = dict(part.split(":", 1) for part in line.split() if ":" in part)
    return int(numbers["REG"]), int(numbers["STACK"]) + int(numbers["LOCAL"])
