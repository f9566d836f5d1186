"""Command-line options made from ``Settings``: one option per field, written down once.

Owns: each setting's help. Does not know: the commands.
Invariant: every field of ``Settings`` has a help text here (a test asserts it).
Read next: ``cli.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any, get_type_hints

import typer

from hyradix.config import Settings

HELP = {
    "model": "Model: a name on the hub, a directory, or 'demo' (comes with Hyradix).",
    "random_weights": "A config.json (or its directory): a model of its shape with random weights, "
    "for measurements.",
    "served_model_name": "Name that clients use for the model. (default: the model's)",
    "dtype": "auto (the checkpoint's; float32 on the CPU), float32 or bfloat16.",
    "device": "auto, cpu or cuda.",
    "num_threads": "CPU threads. (default: all cores)",
    "max_requests": "Requests that run at the same time. (default: by device)",
    "max_context": "Tokens of prompt and reply together. (default: the model's, at most 32768)",
    "kv_slots": "KV slots (tokens) in the pool. (default: from the memory)",
    "states": "State slots in the pool. (default: from the memory)",
    "memory_bytes": "Bytes of both pools: a number, or one with K, M or G. "
    "(default: a part of what is free)",
    "memory_fraction": "Part of a GPU's memory that the engine may use, weights included.",
    "tokens_per_state": "KV slots per state checkpoint when memory is divided.",
    "max_prefill_tokens": "Prompt tokens computed in one step; 0: unlimited, on a CPU. "
    "(default: by device)",
    "prefix_cache": "Reuse what earlier requests with the same beginning computed.",
    "policy": "Which states are evicted first: lru.",
    "min_gain": "A checkpoint that saves fewer tokens than this is kept only in a spare slot.",
    "max_checkpoints": "Checkpoints one request may place while prefilling.",
    "track_interval": "Decode tokens between saves of a running request's state; 0: never.",
    "overlap": "Schedule the next step while the device runs this one. (default: on for a GPU "
    "without drafts)",
    "order": "Order of the queue: fcfs, or longest_prefix (longest cached prefix first).",
    "force_preempt_every": "For tests: preempt a request every N steps; 0: never.",
    "preempt_donate": "Give a preempted request's state to the cache: always or never.",
    "max_queue": "Requests that may wait; more are refused with status 429.",
    "check_invariants": "Prove the cache's invariants after every step (slow).",
    "warmup_prompts_file": "JSON list of prompts or message lists to run before the server is "
    "ready.",
    "warmups": "Another way to ask for warm-up prompts: kda_cache.",
    "pin": "Never evict the prefixes of the warm-up prompts.",
    "spec": "Draft tokens: off, ngram (look up the prompt), mtp or frozen_kv_mtp (draft heads).",
    "spec_state": "How recurrent state is kept under drafts: auto, snapshot, replay or log.",
    "spec_topk": "Children of a draft node; 1: a chain. (default: the shape is chosen each round)",
    "spec_steps": "Depth of the drafts.",
    "spec_nodes": "Nodes verified in a round, the root included. (default: all drafted)",
    "decode_log": "Rows of the state log; 0: decode in place. (default: 0 on the CPU, 16 on a "
    "GPU and with --spec-state log)",
    "seed": "Seed for requests that bring none. (default: random)",
}

PANEL = "Engine"
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def with_settings(
    command: Callable[..., None], *, without: Iterable[str] = ()
) -> Callable[..., None]:
    """Replace a command's parameter ``settings`` by one option per field of ``Settings``.

    without: fields that the command has no such option for.
    """
    own = inspect.signature(command, eval_str=True).parameters
    shown = [field for field in dataclasses.fields(Settings) if field.name not in without]
    names = [field.name for field in shown]

    @functools.wraps(command)
    def wrapper(**options: Any) -> None:
        chosen = {name: options.pop(name) for name in names}
        command(settings=Settings.from_options(**chosen), **options)

    parameters = [p for p in own.values() if p.name != "settings"]
    parameters += [_parameter(field) for field in shown]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    del wrapper.__wrapped__
    return wrapper


def _parameter(field: dataclasses.Field[Any]) -> inspect.Parameter:
    kind: Any = get_type_hints(Settings)[field.name]
    arguments: dict[str, Any] = {"help": HELP[field.name], "rich_help_panel": PANEL}
    default: Any = field.default
    if field.name == "memory_bytes":
        arguments |= {"parser": parse_size, "metavar": "SIZE"}
    elif field.name in ("prefix_cache", "overlap"):
        # Annotated as text: typer would make a flag without a value of a bool.
        kind = str
        if field.default is not None:
            default = "on" if field.default else "off"
        arguments |= {"parser": parse_on_off, "metavar": "on|off"}
    option = typer.Option(f"--{field.name.replace('_', '-')}", **arguments)
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, option],
    )


def parse_on_off(text: str) -> bool:
    """``on`` or ``off``. Raises ``typer.BadParameter``."""
    if text not in ("on", "off"):
        raise typer.BadParameter(f"must be on or off, got {text!r}")
    return text == "on"


def parse_size(text: str | int) -> int:
    """Bytes: ``1048576``, ``1024K``, ``512MiB``, ``2G``. Raises ``typer.BadParameter``."""
    if isinstance(text, int):
        return text
    digits = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = _UNITS.get(digits[-1:], 1)
    try:
        return int(float(digits[:-1] if unit > 1 else digits) * unit)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"must be a number of bytes such as 512M, got {text!r}") from None
