"""Where the time of a decode step goes on a GPU: every kernel, and what lies between them.

    python benchmarks/gpu_profile.py --batch 1 64 [--decode-log 16] [--steps 32] [--json OUT]

The real engine on random weights of a shape; steps that decode the whole batch are profiled (by
torch's profiler, which slows the host: the kernels' times count, the span does not where the host
is late). ``prefill`` instead of a number profiles one prompt of --prompt tokens.
"""

from __future__ import annotations

import argparse
import collections
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import torch  # noqa: E402

from benchmarks.figures import save  # noqa: E402
from hyradix.config import Settings  # noqa: E402
from hyradix.engine.bench.engine import Driver, EngineBenchOptions  # noqa: E402


def profile(driver: Driver, batch: int, prompt: int, steps: int) -> dict[str, Any]:
    """Microseconds a step by kernel, over ``steps`` steps that decode ``batch`` rows."""
    engine = driver.engine
    for _ in range(batch):
        engine.add(driver.request(driver.ids(prompt), 2 * steps + 24, ()))
    full = 0
    while full < 16:
        full += len([x for x in engine.step() if x.token_ids]) == batch
    with _recorder(driver) as recorded:
        for _ in range(steps):
            engine.step()
        _wait(driver)
    while engine.has_work():
        engine.step()
    return summary(recorded, steps)


def profile_prefill(driver: Driver, prompt: int) -> dict[str, Any]:
    """Microseconds by kernel of one prompt's prefill."""
    with _recorder(driver) as recorded:
        driver.run([driver.ids(prompt)], 1)
        _wait(driver)
    return summary(recorded, 1)


def _recorder(driver: Driver) -> torch.profiler.profile:
    kinds = torch.profiler.ProfilerActivity
    is_cuda = driver.engine.info.device == "cuda"
    return torch.profiler.profile(activities=[kinds.CUDA if is_cuda else kinds.CPU])


def _wait(driver: Driver) -> None:
    if driver.engine.info.device == "cuda":
        torch.cuda.synchronize()


def summary(recorded: torch.profiler.profile, steps: int) -> dict[str, Any]:
    """Of the events on the device: by name the time and the number a step, and the whole span."""
    kernels: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0])
    begin, end, busy = float("inf"), 0.0, 0.0
    for event in recorded.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        took = event.time_range.elapsed_us()
        begin, end = min(begin, event.time_range.start), max(end, event.time_range.end)
        busy += took
        kernels[event.name][0] += took
        kernels[event.name][1] += 1
    table = [
        {"kernel": name[:90], "us": round(us / steps, 2), "calls": round(count / steps, 2)}
        for name, (us, count) in sorted(kernels.items(), key=lambda item: -item[1][0])
    ]
    return {"busy_us": busy / steps, "span_us": max(end - begin, 0.0) / steps, "kernels": table}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", nargs="*", default=["1", "64"])
    parser.add_argument("--shape", default="benchmarks/configs/shape-4b.json")
    parser.add_argument("--decode-log", type=int, default=None)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sizes = [int(x) for x in args.batch if x != "prefill"]
    options = EngineBenchOptions(
        batches=tuple(sizes) or (1,), prompt=args.prompt, output=2 * args.steps + 24
    )
    dtype = "bfloat16" if args.device == "cuda" else "auto"
    settings = Settings(
        random_weights=args.shape, device=args.device, dtype=dtype, decode_log=args.decode_log
    )
    driver = Driver(options.pools(settings))
    found: dict[str, Any] = {}
    for name in args.batch:
        if name == "prefill":
            driver.run([driver.ids(args.prompt)], 1)
            found[name] = profile_prefill(driver, args.prompt)
        else:
            found[name] = profile(driver, int(name), args.prompt, args.steps)
        print(f"{name}: busy {found[name]['busy_us']:.0f} us, span {found[name]['span_us']:.0f} us")
        for row in found[name]["kernels"][:30]:
            print(f"  {row['us']:9.1f} us {row['calls']:7.2f} x  {row['kernel']}")
    if args.json is not None:
        save(args.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
