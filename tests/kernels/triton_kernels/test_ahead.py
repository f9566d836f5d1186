"""Kernels compiled ahead of their first launch; by Triton's own compiler, for no device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from hyradix.kernels import triton_ahead, triton_launches
from hyradix.kernels.triton_ahead import compiled_ahead
from tests.kernels.triton_kernels.test_launches import Driver

WORDS = torch.zeros(64)
OPTIONS = {"num_warps": 1, "num_stages": 1}


def copy(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i))


def fail(x, y, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK > 1000)


class Launcher:
    """What Triton builds for each kernel, to start it. ``started``: of all of them."""

    started: list[int] = []  # noqa: RUF012  (cleared for each test)

    def __init__(self, source: object, metadata: object) -> None:
        self.name = metadata.name

    def __call__(self, *args: object) -> None:
        self.started.append(self.name)


@pytest.fixture
def compiled(monkeypatch, tmp_path: Path) -> list[str]:
    """The names of kernels that were compiled, on a driver without a device."""
    driver, names = Driver(), []
    driver.launcher_cls = Launcher
    driver.utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 1 << 17},
        load_binary=lambda *_: (1, 2, 8, 0, 1024),
    )
    Launcher.started.clear()
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(triton_launches, "_TABLES", {})
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    make_ir = triton.compiler.ASTSource.make_ir

    def counted(source, *args):
        names.append(source.fn.__name__)
        return make_ir(source, *args)

    monkeypatch.setattr(triton.compiler.ASTSource, "make_ir", counted)
    return names


def launch(kernel: JITFunction, block: int) -> None:
    triton_launches.start(kernel, (1,), (WORDS, WORDS, block), OPTIONS)


def test_launches_start_nothing_and_their_kernels_are_ready(compiled):
    kernel, told = JITFunction(copy), []
    with compiled_ahead(lambda *news: told.append(news), 2) as is_ahead:
        assert is_ahead
        for block in (16, 32, 16, 32, 16):
            launch(kernel, block)
    assert compiled == ["copy", "copy"]
    assert told == [(0, 2), (1, 2)]
    assert not Launcher.started
    for block in (16, 32, 16):
        launch(kernel, block)
    assert len(compiled) == 2
    assert Launcher.started == ["copy"] * 3


def test_a_kernel_that_does_not_compile_says_so_where_it_is_started(compiled):
    kernel = JITFunction(fail)
    with compiled_ahead(lambda *_: None, 2):
        launch(kernel, 16)
    with pytest.raises(triton.CompilationError):
        launch(kernel, 16)
    launch(JITFunction(copy), 16)
    assert Launcher.started == ["copy"]


def test_without_the_means_launches_are_as_ever(compiled, monkeypatch):
    monkeypatch.setattr(triton_ahead, "AsyncCompileMode", None)
    with compiled_ahead(lambda *_: None, 2) as is_ahead:
        assert not is_ahead
        launch(JITFunction(copy), 16)
    assert Launcher.started == ["copy"]
