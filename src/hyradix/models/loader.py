"""From a model's name to a ``Decoder`` ready to run; and its ``ModelFacts`` without its weights.

Owns: checking a checkpoint's weights against what the config implies.
Does not know: pools, batches.
Read next: ``decoder.py``, ``checkpoint.py``.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import torch

from hyradix.config import ModelFacts
from hyradix.errors import ModelLoadError
from hyradix.kernels.ops import Ops, load_ops
from hyradix.models import checkpoint
from hyradix.models.builder import DecoderBuilder
from hyradix.models.checkpoint import Progress, listed
from hyradix.models.config import ModelConfig, RawConfig
from hyradix.models.decoder import Decoder
from hyradix.models.forward_shape import forward_shape
from hyradix.models.head_names import (
    HEADS,
    HeadName,
    check_head,
    flat_head_name,
    head_shapes,
    heads_in,
)
from hyradix.models.layer_builder import Tensors
from hyradix.models.pieces import Shape, find_pieces
from hyradix.models.random_weights import random_sources
from hyradix.models.registry import FAMILIES, Family, find_family, reading
from hyradix.models.shapes import Shapes, expected_shapes
from hyradix.models.stored import Counted, Sources, StackedTensor, Stored, StoredTensor
from hyradix.spec_config import ProposerName

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_config(model: Path | str) -> ModelConfig:
    """Parse config.json and, where there is one, generation_config.json beside it.

    model: the directory, or a file that stands for its config.json (then nothing else is read).
    """
    path, generation = Path(model), RawConfig()
    if not path.is_file():
        directory, path = path, path / "config.json"
        if (directory / "generation_config.json").exists():
            generation = checkpoint.read_json(directory / "generation_config.json")
    raw = checkpoint.read_json(path)
    with reading(str(path)):
        return find_family(raw).parse_config(raw, generation)


def model_facts(
    model: Path | str | ModelConfig,
    dtype: str = "float32",
    *,
    device: str = "cpu",
    name: str = "",
    heads: tuple[HeadName, ...] | None = None,
) -> ModelFacts:
    """What ``hyradix.config.resolve`` asks for, from config.json and the weights' names alone.

    On the CPU, KV and windows are float32 whatever ``dtype`` says: only weights follow it.
    heads: the draft heads there will be; None: those that the weights' names tell of.
    """
    config = model if isinstance(model, ModelConfig) else load_config(model)
    if not name and not isinstance(model, ModelConfig):
        name = Path(model).name
    shapes = expected_shapes(config, FAMILIES[config.family])
    element_bytes = DTYPES[dtype].itemsize
    kv_element_bytes = 4 if device == "cpu" else element_bytes
    if heads is None and not isinstance(model, ModelConfig):
        heads = heads_in(checkpoint.weight_names(Path(model)))
    return ModelFacts(
        name=name or config.architecture,
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_position=config.max_position,
        kv_bytes_per_slot=config.kv_bytes_per_slot(kv_element_bytes),
        state_bytes_per_slot=config.recurrent_shape(kv_element_bytes).slot_bytes,
        eos_token_ids=config.eos_token_ids,
        weight_bytes=sum(math.prod(shape) for shape in shapes.values()) * element_bytes,
        recurrent=config.recurrent_shape(kv_element_bytes),
        forward=forward_shape(config),
        hidden_bytes=kv_element_bytes * config.hidden_size,
        draft_kv_bytes=2 * config.num_kv_heads * config.head_dim * kv_element_bytes,
        proposers=("ngram", *(heads or ())),
    )


def load_model(
    directory: Path | str,
    *,
    dtype: str = "float32",
    load_format: str = "auto",
    backend: str = "auto",
    device: torch.device | str = "cpu",
    max_context: int | None = None,
    proposer: ProposerName | None = None,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> Decoder:
    """Load a checkpoint directory (see ``checkpoint.find_directory`` for hub names).

    Args:
        dtype: of linear weights and embeddings: float32 or bfloat16.
        load_format: ``auto`` reads safetensors; ``dummy`` draws random weights from ``seed``, on
            ``device`` (then ``directory`` may be a config file alone).
        backend: ``auto``, ``compiled``, ``torch`` or ``triton`` (see ``kernels.ops``).
        device: where weights go, layer by layer, and where the model runs.
        max_context: longest sequence that will be run; default: the checkpoint's.
        proposer: whose draft head is loaded too; ``ngram`` has none.

    Raises: ``ModelLoadError``, listing every weight that is missing, unknown or of a wrong shape,
    or saying why the draft head cannot be used.
    Cost: memory for what is built and for one layer's weights as they are stored.
    """
    config = load_config(directory)
    family = FAMILIES[config.family]
    ops = load_ops(backend, device=device, dtype=DTYPES[dtype])
    report = on_progress or checkpoint._silent
    head = next((name for name in HEADS if name == proposer), None)
    sources: Sources
    if load_format == "dummy":
        drawn = random_weights(config, seed, head=head, device=device, dtype=dtype)
        sources = dict(_counted(drawn, report))
    else:
        sources = _sources(Path(directory), config, family, head, report)
    return build_model(config, sources, ops, dtype=dtype, max_context=max_context, head=head)


def build_model(
    config: ModelConfig,
    sources: Sources,
    ops: Ops,
    *,
    dtype: str = "float32",
    max_context: int | None = None,
    head: HeadName | None = None,
) -> Decoder:
    """A ``Decoder`` from flat named weights, which are taken out of ``sources``, layer by layer.

    head: the draft head whose weights are among them.
    """
    length = max_context or config.max_position
    builder = DecoderBuilder(config, FAMILIES[config.family], ops, DTYPES[dtype], length)
    with torch.inference_mode():
        return builder.build(sources, head)


Found = dict[str, StoredTensor]
"""By flat name."""


def _find(directory: Path, family: Family, head: HeadName | None) -> Found:
    """What the files have of the model and of ``head``; other heads are left aside."""
    found: Found = {}
    for name, stored in checkpoint.weights_in(checkpoint.shard_paths(directory)).items():
        flat = flat_head_name(name)
        if flat is None:
            flat = family.map_name(name)
        elif head is None or not flat.startswith(f"{head}."):
            continue
        if flat is not None and 0 not in stored.shape:  # a module of no width: there is none
            found[flat] = stored
    return found


def _sources(
    directory: Path, config: ModelConfig, family: Family, head: HeadName | None, report: Progress
) -> Sources:
    """The expected weights, to be read; those that come in pieces will be put together."""
    found = _find(directory, family, head)
    if config.is_tied:
        found.pop("lm_head.weight", None)  # some writers store the tied copy too
    if head is not None:
        check_head(head, found)
    expected = _shapes(config, family, head)
    pieces = find_pieces(expected, found)
    wholes = {piece.whole for piece in pieces.values()}
    wanted = {name: shape for name, shape in expected.items() if name not in wholes}
    wanted |= {name: piece.shape for name, piece in pieces.items()}
    _check(wanted, {name: stored.shape for name, stored in found.items()}, directory)
    stacked = {name: StackedTensor(expected[name]) for name in wholes}
    sources: Sources = dict(stacked)
    for name, source in _counted(dict(found), report).items():
        if name in pieces:
            stacked[pieces[name].whole].parts.append((pieces[name], source))
        else:
            sources[name] = source
    return sources


def _counted(sources: dict[str, Stored], report: Progress) -> dict[str, Stored]:
    """The same, with a report after each that is read."""
    done = itertools.count(1)
    return {
        name: Counted(source, lambda: report("weights", next(done), len(sources)))
        for name, source in sources.items()
    }


def _shapes(config: ModelConfig, family: Family, head: HeadName | None) -> Shapes:
    own = head_shapes(config, head) if head is not None else {}
    return {**expected_shapes(config, family), **own}


def _check(expected: dict[str, Shape], found: dict[str, Shape], directory: Path) -> None:
    """Compare names and shapes. Raises ``ModelLoadError`` with all differences."""
    faults = []
    missing = sorted(expected.keys() - found.keys())
    extra = sorted(found.keys() - expected.keys())
    wrong = [
        f"{name} {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    for label, names in (("missing", missing), ("unknown", extra), ("wrong shape", wrong)):
        if names:
            faults.append(f"{len(names)} {label}: {listed(names)}")
    if faults:
        raise ModelLoadError(
            f"the weights in {directory} do not fit config.json; {'; '.join(faults)}"
        )


def init_random(config: ModelConfig, seed: int = 0, *, head: HeadName | None = None) -> Tensors:
    """Random float32 weights of the right shapes: for benchmarks, not for sense."""
    sources = random_weights(config, seed, head=head)
    return {name: source.read() for name, source in sources.items()}


def random_weights(
    config: ModelConfig,
    seed: int = 0,
    *,
    head: HeadName | None = None,
    device: torch.device | str = "cpu",
    dtype: str = "float32",
) -> dict[str, Stored]:
    """What ``init_random`` makes, each weight drawn on ``device`` when it is read."""
    return random_sources(
        _shapes(config, FAMILIES[config.family], head),
        seed=seed,
        is_centred=config.has_centred_norms,
        device=torch.device(device),
        dtype=DTYPES[dtype],
    )
