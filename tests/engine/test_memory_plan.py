"""The planner: bytes equal allocations, the division is start-up's, bad options are refused."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from hyradix.config import DeviceFacts, ModelFacts, Settings, resolve
from hyradix.engine.memory_plan import (
    DraftOptions,
    PlanOptions,
    draft_options,
    make_plan,
    mode_bytes,
    pick_dtype,
    read_config,
)
from hyradix.errors import ConfigError, ModelLoadError
from hyradix.kernels.memory import physical_bytes
from hyradix.models.loader import load_config
from hyradix.models.registry import find_family
from hyradix.runner.pools import KVPool, StatePool
from hyradix.state_bytes import MODES, SpecShape, buffers, conv_bytes, spec_bytes
from tests.support.real_server import ROOT

CONFIGS = ROOT / "benchmarks/configs"
GIB = 1 << 30
TREE = DraftOptions(topk=4, steps=6, nodes=63, decode_log=16)
DTYPES = {2: torch.bfloat16, 4: torch.float32}


def config(name: str):
    return read_config(str(CONFIGS / f"{name}.json"))


def cache(name: str):
    raw = config(name)
    return find_family(raw).parse_cache(raw)


NINE = config("Qwen3.5-9B")
SHAPE = cache("Qwen3.5-9B").recurrent_shape(2)


def plan(budget: int, num_requests: int, *, raw=NINE, dtype="auto", **options):
    return make_plan(
        raw, PlanOptions(budget=budget, num_requests=num_requests, **options), dtype=dtype
    )


@pytest.mark.parametrize(
    ("name", "state_mib", "conv_kib", "kv_bytes"),
    [
        ("Qwen3.5-0.8B", 18, 648, 12_288),
        ("Qwen3.5-2B", 18, 648, 12_288),
        ("Qwen3.5-4B", 48, 1_152, 32_768),
        ("Qwen3.5-9B", 48, 1_152, 32_768),
        ("Qwen3.5-27B", 144, 2_880, 65_536),
        ("Qwen3.5-35B-A3B", 60, 1_440, 20_480),
        ("Qwen3-Next-80B-A3B-Instruct", 72, 1_728, 24_576),
        ("Granite-4.0-H-Small", 144, 1_782, 16_384),
        ("Granite-4.0-H-Tiny", 54, 702, 8_192),
        ("Granite-4.0-H-Micro", 72, 918, 8_192),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B", 46, 828, 6_144),
        ("Nemotron-H-8B", 96, 1_440, 16_384),
        ("Bamba-9B", 116, 1_435.5, 12_288),
        ("Kimi-Linear-48B-A3B-Instruct", 40, 1_440, 8_064),
    ],
)
def test_slots_of_public_models(name, state_mib, conv_kib, kv_bytes):
    found = plan(1 << 40, 1, raw=config(name))
    assert found.dtype == "bfloat16"
    assert found.state_bytes == (state_mib << 20) + conv_kib * 1024
    assert found.as_json()["slots"] == {
        "recurrent_bytes": state_mib << 20,
        "conv_bytes": conv_kib * 1024,
        "kv_bytes": kv_bytes,
    }


def test_documented_slots():
    """The table of docs/models.md has every public model, with these figures."""
    text = (ROOT / "docs/models.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| ([\d.]+) \|((?: [\d.]+ \|){4})$", text, re.M)
    public = {p.stem for p in CONFIGS.glob("*.json")} - {"cpu25m", "shape-4b"}
    assert {name for _, name, _, _ in rows} == public
    for family, name, billions, figures in rows:
        raw = config(name)
        assert raw["model_type"] == family
        assert f"{raw['_check']['params_text'] / 1e9:.1f}" == billions
        found = []
        for dtype in ("bfloat16", "float32"):
            one = plan(1 << 42, 1, raw=raw, dtype=dtype)
            found += [f"{one.state_bytes / (1 << 20):.1f}", f"{one.kv_bytes / 1024:g}"]
        assert figures.replace(" |", "").split() == found


def allocate(buffers_of_mode, device):
    return [
        torch.empty(buffer.shape, dtype=DTYPES[buffer.element_bytes], device=device)
        for buffer in buffers_of_mode
    ]


@pytest.mark.parametrize("mode", MODES)
def test_planned_bytes_are_allocated_at_full_size(mode):
    row = {row.mode: row for row in plan(140 * GIB, 32, drafts=TREE).rows}[mode]
    tensors = allocate(buffers(mode, SHAPE, TREE.shape(32)), "meta")
    assert physical_bytes(*tensors) == row.peak_bytes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("topk", [1, 2])
def test_planned_bytes_are_allocated_for_real(mode, topk):
    drafts = draft_options(topk, 7 if topk == 1 else 3, 8, 8)
    row = {row.mode: row for row in plan(8 * GIB, 2, drafts=drafts).rows}[mode]
    tensors = allocate(buffers(mode, SHAPE, drafts.shape(2)), "cpu")
    assert physical_bytes(*tensors) == row.peak_bytes


def test_what_the_modes_are_for():
    snapshot, replay, log = plan(140 * GIB, 32, drafts=TREE).rows
    states = buffers("snapshot", SHAPE, TREE.shape(32))[0]
    assert states.num_bytes == 24 * 33 * 63 * (2 << 20)
    assert int(states.num_bytes / GIB) == 97
    assert 97 <= snapshot.resident_bytes / GIB < 98.5  # with the nodes' conv columns
    assert snapshot.resident_bytes == snapshot.peak_bytes
    assert replay.peak_bytes * 13 <= states.num_bytes
    assert log.resident_bytes * 150 <= states.num_bytes
    assert all(buffer.name != "states" for buffer in buffers("log", SHAPE, TREE.shape(32)))


@pytest.mark.parametrize(("topk", "steps", "drafted"), [(1, 3, 3), (2, 3, 7), (4, 3, 63)])
def test_as_many_times_the_working_states_as_there_are_drafts(topk, steps, drafted):
    """The known table 3x, 7x, 63x: it does not count the root, nor the row for padding."""
    drafts = draft_options(topk, steps, drafted + 1, 16)
    states = buffers("snapshot", SHAPE, drafts.shape(32))[0]
    working = 24 * 32 * (2 << 20)
    of_drafts = Fraction(states.num_bytes, 33 * drafts.nodes) * 32 * (drafts.nodes - 1)
    assert of_drafts / working == drafted


@pytest.mark.parametrize("num_nodes", [1, 2, 4, 8, 63])
def test_conv_windows_against_dense_ones(num_nodes):
    width, channels = SHAPE.conv_width, SHAPE.conv_channels
    dense = 24 * 33 * num_nodes * channels * (width - 1) * 2
    for is_chain, columns in ((True, num_nodes + width - 2), (False, num_nodes + width - 1)):
        spec = SpecShape(num_requests=32, num_nodes=num_nodes, is_chain=is_chain)
        (found,) = (b.num_bytes for b in buffers("snapshot", SHAPE, spec) if b.name == "conv")
        assert found == conv_bytes(SHAPE, spec, sliding=is_chain)
        assert Fraction(found, dense) == Fraction(columns, num_nodes * (width - 1))
    if num_nodes == width:
        chain = SpecShape(num_requests=32, num_nodes=num_nodes, is_chain=True)
        assert conv_bytes(SHAPE, chain, sliding=True) * 2 == dense


def test_pools_take_the_rest_of_the_budget():
    """float32, as the CPU's pools are: what is allocated leaves less than a KV slot."""
    budget = 140 * GIB
    found = plan(budget, 32, drafts=TREE, dtype="float32")
    for row in found.rows:
        with torch.device("meta"):
            model = cache("Qwen3.5-9B")
            kv = KVPool(model, row.num_kv_slots)  # type: ignore[arg-type]  # sizes are enough
            states = StatePool(model, 32 + row.num_states)  # type: ignore[arg-type]
        left = budget - kv.num_bytes - states.num_bytes - row.peak_bytes
        assert 0 <= left < found.kv_bytes, row.mode
        assert found.state_bytes == model.state_bytes_per_slot


@pytest.mark.parametrize("budget", [2 * GIB, 9 * GIB + 12_345, 80 * GIB])
def test_plain_serving_is_divided_as_at_start_up(budget):
    found = plan(budget, 16)
    facts = ModelFacts(
        name="m",
        architecture="m",
        vocab_size=8,
        max_position=262_144,
        kv_bytes_per_slot=found.kv_bytes,
        state_bytes_per_slot=found.state_bytes,
        eos_token_ids=(),
    )
    settings = Settings(memory_bytes=budget, max_requests=16)
    config = resolve(settings, facts, DeviceFacts(kind="cpu", free_bytes=1))
    (row,) = found.rows
    assert row.mode == "plain"
    assert (row.num_kv_slots, row.num_states + 16) == (config.num_kv_slots, config.num_states)
    assert found.max_context == config.max_context
    assert (row.resident_bytes, row.peak_bytes) == (0, 0)
    assert row.written_bytes == 16 * found.state_bytes


@pytest.mark.parametrize("drafts", [None, TREE])
@pytest.mark.parametrize("budget", [6 * GIB, 80 * GIB])
def test_requests_are_the_most_that_leave_one_context(drafts, budget):
    for i, row in enumerate(plan(budget, 1, drafts=drafts, max_context=20_000).rows):
        most = row.max_requests
        for n in range(max(most, 1), most + 4):
            at = plan(budget, n, drafts=drafts, max_context=20_000).rows[i]
            assert (at.num_kv_slots >= 20_000) == (n == most), (row.mode, n)
            assert at.max_requests == most


def test_bytes_grow_evenly_with_requests():
    """``max_requests`` counts on it."""
    options = PlanOptions(budget=1, num_requests=1, drafts=TREE)
    for mode in MODES:
        peaks = [mode_bytes(mode, SHAPE, options, n).peak for n in range(4)]
        assert len({b - a for a, b in pairwise(peaks)}) == 1


def test_what_does_not_fit_is_said():
    snapshot, _, log = plan(20 * GIB, 32, drafts=TREE).rows
    assert (snapshot.is_fitting, snapshot.num_states, snapshot.num_kv_slots) == (False, 0, 0)
    assert 0 < snapshot.max_requests < 32
    assert log.is_fitting
    assert all(row.max_requests == 0 for row in plan(1, 1, drafts=TREE).rows)


def test_decode_through_the_log_is_a_root_alone():
    (row,) = plan(GIB, 2, decode_log=16).rows
    assert (
        row.peak_bytes
        == spec_bytes("log", SHAPE, SpecShape(num_requests=2, num_nodes=1, num_log_rows=16)).peak
    )


def test_the_demo_is_planned_as_it_is_loaded():
    found = plan(GIB, 4, raw=read_config("demo"), dtype="float32")
    model = load_config(ROOT / "src/hyradix/demo_model")
    assert found.state_bytes == model.state_bytes_per_slot
    assert found.kv_bytes == model.kv_bytes_per_slot(4)


# ---- draft options -------------------------------------------------------------------------------


def test_defaults_of_drafts():
    assert draft_options(None, None, None, 7) is None
    chain = draft_options(None, 3, None, None)
    assert chain == DraftOptions(topk=1, steps=3, nodes=4, decode_log=16)
    assert chain.shape(2).is_chain
    assert draft_options(4, 3, None, None).nodes == 1 + 4 + 2 * 16
    assert draft_options(1, 20, None, None).decode_log == 21


@pytest.mark.parametrize(
    ("given", "param", "nearest"),
    [
        ((0, 3, 4, 16), "spec_topk", "--spec-topk 1"),
        ((1, 0, 4, 16), "spec_steps", "--spec-steps 1"),
        ((64, 3, 8, 16), "spec_topk", "--spec-topk 63"),
        ((2, 3, 3, 16), "spec_nodes", "--spec-nodes 4"),
        ((1, 3, 5, 16), "spec_nodes", "--spec-nodes 4"),
        ((2, 2, 8, 16), "spec_nodes", "--spec-nodes 7"),
        ((2, 6, 8, 6), "decode_log", "--decode-log 7"),
        ((2, 6, 8, 0), "decode_log", "--decode-log 7"),
        ((2, None, 8, 16), "spec_steps", "--spec-steps 3"),
        ((None, None, 8, 16), "spec_steps", "--spec-steps 7"),
        ((4, None, 64, 16), "spec_steps", "--spec-steps 3"),
        ((3, None, None, 16), "spec_steps", "--spec-steps 1"),
        ((0, None, 4, 16), "spec_topk", "--spec-topk 1"),
    ],
)
def test_impossible_drafts(given, param, nearest):
    with pytest.raises(ConfigError) as caught:
        draft_options(*given)
    assert caught.value.param == param
    assert caught.value.message.endswith(f"the nearest valid choice is {nearest}")


@pytest.mark.parametrize("topk", [None, 0, 1, 2, 63, 70])
@pytest.mark.parametrize("steps", [None, 0, 1, 4, 63, 100])
@pytest.mark.parametrize("nodes", [None, 0, 1, 9, 64, 99])
@pytest.mark.parametrize("log", [None, 0, 3])
def test_what_is_refused_leads_to_what_is_not(topk, steps, nodes, log):
    """Whoever does what each refusal says has, after one for each option, drafts that can be."""
    given = {"spec_topk": topk, "spec_steps": steps, "spec_nodes": nodes, "decode_log": log}
    for _ in given:
        refusal = refusal_of(*given.values())
        if refusal is None:
            return
        choice = re.search(r"the nearest valid choice is --([a-z-]+) (\d+)$", refusal.message)
        assert choice is not None, refusal.message
        assert choice[1].replace("-", "_") == refusal.param
        given[refusal.param] = int(choice[2])
    assert refusal_of(*given.values()) is None


def refusal_of(*given):
    try:
        draft_options(*given)
    except ConfigError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"budget": 0}, "budget"),
        ({"num_requests": 0}, "requests"),
        ({"max_context": 0}, "max_context"),
        ({"tokens_per_state": 0}, "tokens_per_state"),
        ({"decode_log": -1}, "decode_log"),
    ],
)
def test_values_out_of_range(options, param):
    with pytest.raises(ConfigError) as caught:
        make_plan(NINE, PlanOptions(**{"budget": GIB, "num_requests": 1, **options}))
    assert caught.value.param == param


# ---- configs -------------------------------------------------------------------------------------


def test_dtypes():
    assert pick_dtype({"torch_dtype": "float32"}, "auto") == "float32"
    assert pick_dtype({"text_config": {"dtype": "float16"}}, "auto") == "bfloat16"
    assert pick_dtype({}, "float32") == "float32"
    with pytest.raises(ConfigError, match="--dtype must be one of auto, float32, bfloat16"):
        pick_dtype({}, "int8")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "'llama'.*supported: Qw"),
        ({"model_type": "qwen3_5", "text_config": 3}, "text_config must be a dict"),
        ({**NINE, "text_config": {**NINE["text_config"], "layer_types": 3}}, "layer_types must be"),
        ({**NINE, "text_config": {**NINE["text_config"], "head_dim": 0}}, "head_dim must be pos"),
        ({}, "model type None"),
    ],
)
def test_configs_that_cannot_be_planned(raw, message):
    with pytest.raises(ModelLoadError, match=message):
        plan(GIB, 1, raw=raw)


def test_paths_that_are_no_config(tmp_path):
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        read_config(str(tmp_path))
    for name in ("nothing.json", "owner/name", __file__):
        with pytest.raises(ModelLoadError, match="nothing is downloaded"):
            read_config(name)
    broken = tmp_path / "a.json"
    broken.write_text("{")
    with pytest.raises(ModelLoadError, match=r"cannot read a\.json"):
        read_config(str(broken))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Qwen3.5-9B", {"architectures": 1}),
        ("Granite-4.0-H-Tiny", {"layer_types": 1}),
        ("Bamba-9B", {"attn_layer_indices": 1}),
        ("Nemotron-H-8B", {"layers_block_type": 1}),
    ],
)
def test_values_of_the_wrong_form(name, changes):
    with pytest.raises(ModelLoadError, match="wrong form"):
        plan(1 << 40, 1, raw={**config(name), **changes})
