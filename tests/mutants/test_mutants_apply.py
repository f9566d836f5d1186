"""The planted faults still fit the source; ``run.py`` beside this file shows that each is found."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.faults import PACKAGE, Fault, load

ROOT = Path(__file__).parents[2]
FAULTS = load()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_fault_applies_exactly_once_and_is_still_python(fault: Fault) -> None:
    sound = (ROOT / PACKAGE / fault.file).read_text()
    faulty = fault.mutate(sound)
    assert ast.dump(ast.parse(faulty)) != ast.dump(ast.parse(sound))


def test_at_least_two_faults_in_every_place_and_no_name_twice() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    thin = {place: n for place, n in Counter(f.place for f in FAULTS).items() if n < 2}
    assert not thin
