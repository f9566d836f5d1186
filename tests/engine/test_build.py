from __future__ import annotations

from pathlib import Path

import pytest

from hyradix.config import Settings
from hyradix.engine.build import build_engine
from hyradix.errors import ConfigError


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"states": 0}, {"policy": "best"}])
def test_settings_are_checked_before_anything_is_read(
    options: dict[str, object], tmp_path: Path
) -> None:
    settings = Settings.from_options(model=str(tmp_path), **options)
    (name,) = options
    with pytest.raises(ConfigError, match=f"--{name}"):
        build_engine(settings, lambda *_: None)
