"""Both libraries get the number of threads that was asked for."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import torch
from hyradix.kernels.compiled_ops import CompiledOps
torch.set_num_threads(1)
torch.ones(300, 300).triu_(1)  # torch counts its threads at its first parallel operation
CompiledOps().set_num_threads(1)
print(torch.get_num_threads())
"""


def test_torch_keeps_to_its_threads_when_numba_starts_its_own():
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["1"]
