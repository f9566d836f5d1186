"""Models of sizes that a seed draws; ``odd_models`` takes any number of them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from hyradix.models.loader import load_config
from tests.gpu.odd_models import DIMS, Place, check, draw, is_right


def test_what_is_drawn_is_a_model(tmp_path: Path) -> None:
    families = set()
    for seed in range(300):
        (tmp_path / "config.json").write_text(json.dumps(draw(random.Random(seed), DIMS)))
        families.add(load_config(tmp_path).family)
    assert len(families) == 6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(4))
def test_outputs_are_those_of_the_cpu(seed: int, dtype: str) -> None:
    entry = check(seed, Place(dtype=dtype))
    assert is_right(entry), entry
