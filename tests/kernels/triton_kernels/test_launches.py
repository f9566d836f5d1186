"""A kernel that is started again is the one that Triton would have chosen; without a device."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from hyradix.kernels import triton_launches
from hyradix.kernels.triton_launches import MOST, Launches

WORDS = torch.zeros(64, dtype=torch.float32)
LAYOUT = {"BLOCK": 16, "IS_EVEN": True}


def add(x, y, stride, count, scale, BLOCK: tl.constexpr, IS_EVEN: tl.constexpr):
    """Never compiled."""


class Driver:
    """Of a device that is not there. ``device``, ``stream``: what is current."""

    device, stream = 0, 7

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Compiled:
    """What Triton returns of a launch. ``runs``: those that went past Triton."""

    function, packed_metadata = 11, (4, 1, 0)

    def __init__(self) -> None:
        self.runs: list[tuple[object, ...]] = []

    def run(self, *args: object) -> None:
        self.runs.append(args)


class World:
    """A kernel, and what Triton would make of its launches: ``asked`` it, by specialisation."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.kernel = JITFunction(add, do_not_specialize=["count"])
        self.asked: list[str] = []
        self.compiled: dict[str, Compiled] = {}

    def plain(self, kernel: object, *args: object, grid: object, warmup: bool, **options: int):
        name = self.name(*args, kernel=kernel, **options)
        self.asked.append(name)
        return self.compiled.setdefault(name, Compiled())

    def name(self, *args: object, kernel: object = None, **options: int) -> str:
        """What Triton itself tells these arguments apart by."""
        binder = (kernel or self.kernel).device_caches[self.driver.device][4]
        return str((self.driver.device, *binder(*args, **options)[1:]))

    def start(self, *args: object, num_warps: int = 4, grid: tuple[int, ...] = (3,)) -> bool:
        """Whether it went past Triton; then it was the kernel that Triton would have taken."""
        asked, options = len(self.asked), {"num_warps": num_warps, "num_stages": 1}
        runs = {name: len(compiled.runs) for name, compiled in self.compiled.items()}
        triton_launches.start(self.kernel, grid, args, options)
        if len(self.asked) > asked:
            return False
        found = [n for n, c in self.compiled.items() if len(c.runs) > runs[n]]
        assert found == [self.name(*args, **options)]
        return True


@pytest.fixture
def world(monkeypatch) -> World:
    world = World()
    monkeypatch.setattr(triton.runtime.driver, "_active", world.driver)
    run = lambda kernel, *args, **options: world.plain(kernel, *args, **options)  # noqa: E731
    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(triton_launches, "_RUN", run)
    monkeypatch.setattr(triton_launches, "_TABLES", {})
    return world


def tensors() -> list[torch.Tensor]:
    """Types and addresses that Triton tells apart, and some that it does not."""
    whole = [WORDS, WORDS[4:], WORDS[1:], WORDS[2:], WORDS[:8], WORDS[:0]]
    return [*whole, WORDS.to(torch.bfloat16), WORDS.int(), WORDS.bool(), WORDS.long()[1:]]


def test_what_triton_tells_apart_is_told_apart(world):
    """Every pair of arguments, in both orders: never the kernel of the other."""
    numbers = [0, 1, 2, 16, 17, 32, True, False, None, 1.0, 0.5, 2**31, -(2**31) - 1, 2**40]
    cases = [
        *[(x, y, 2, 3, 0.5, 16, True) for x, y in itertools.product(tensors(), repeat=2)],
        *[(WORDS, WORDS, s, 3, 0.5, 16, True) for s in numbers],
        *[(WORDS, WORDS, 2, c, 0.5, 16, True) for c in numbers],
        *[(WORDS, WORDS, 2, 3, f, 16, True) for f in numbers],
        *[(WORDS, WORDS, 2, 3, 0.5, b, e) for b in (16, 32) for e in (True, False)],
        (WORDS, 5, 2, 3, 0.5, 16, True),
        (WORDS, None, 2, 3, 0.5, 16, True),
    ]
    num_fast = 0
    for case in [*cases, *reversed(cases), *cases]:
        for num_warps in (4, 8):
            num_fast += world.start(*case, num_warps=num_warps)
    assert num_fast > 2 * len(cases)


def test_numbers_that_are_not_specialised_do_not_go_to_triton_again(world):
    first = [world.start(WORDS, WORDS[4:], 2, count, 0.5, 16, True) for count in (1, 2, 16, 99)]
    assert first == [False, True, True, True]


def test_a_launch_has_its_grid_its_stream_and_addresses(world):
    x, y = WORDS, WORDS[4:]
    world.start(x, y, 2, 3, 0.5, 16, True)
    world.driver.stream = 70
    assert world.start(x, y, 2, 5, 0.5, 16, True, grid=(3, 4))
    (compiled,) = world.compiled.values()
    hooks = (None, None, None)
    given = (x.data_ptr(), y.data_ptr(), 2, 5, 0.5, 16, True)
    assert compiled.runs == [(3, 4, 1, 70, 11, (4, 1, 0), *hooks, *given)]


def test_another_device_has_kernels_of_its_own(world):
    args = (WORDS, WORDS, 2, 3, 0.5, 16, True)
    world.start(*args)
    world.driver.device = 1
    assert not world.start(*args)
    assert world.start(*args)


def test_whoever_watches_launches_sees_all_of_them(world, monkeypatch):
    args = (WORDS, WORDS, 2, 3, 0.5, 16, True)
    world.start(*args)
    hook = SimpleNamespace(calls=[print])
    with monkeypatch.context() as patch:
        patch.setattr(triton_launches, "_HOOKS", SimpleNamespace(
            launch_enter_hook=hook, launch_exit_hook=None))  # fmt: skip
        assert not world.start(*args)
    world.kernel.pre_run_hooks.append(print)
    assert not world.start(*args)


def test_what_another_triton_returns_is_never_started_past_it(world, monkeypatch):
    monkeypatch.delattr(Compiled, "packed_metadata")
    args = (WORDS, WORDS, 2, 3, 0.5, 16, True)
    assert [world.start(*args) for _ in range(3)] == [False] * 3


def test_another_version_of_triton_is_always_asked(world, monkeypatch):
    monkeypatch.setattr(triton_launches, "IS_KNOWN", False)
    args = (WORDS, WORDS, 2, 3, 0.5, 16, True)
    assert [world.start(*args) for _ in range(3)] == [False] * 3


def test_a_kernel_that_was_patched_is_asked(world, monkeypatch):
    args = (WORDS, WORDS, 2, 3, 0.5, 16, True)
    world.start(*args)
    seen = []
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, **options: seen.append(args))
    triton_launches.start(world.kernel, (1,), args, {"num_warps": 4})
    assert seen == [args]


def test_constants_before_other_arguments_go_to_triton(world):
    def mixed(BLOCK: tl.constexpr, x):
        """Never compiled."""

    launches = Launches(JITFunction(mixed), (16, WORDS))
    for _ in range(3):
        launches.start((1,), (16, WORDS), {})
    assert not launches._compiled


def test_a_number_that_varies_does_not_fill_the_memory(world):
    for stride in range(2, MOST + 100):
        world.start(WORDS, WORDS, stride, 3, 0.5, 16, True)
    (launches,) = triton_launches._TABLES.values()
    assert len(launches._compiled) <= MOST
