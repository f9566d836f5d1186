"""Options that take several numbers, ``--batch 1 8 64``, which click does not know.

Owns: how such a list is written. Does not know: the commands.
"""

from __future__ import annotations

from typing import Any

import typer

from hyradix.errors import ConfigError


class SpacedLists(typer.core.TyperCommand):
    """A command whose options ``LISTS`` take all values up to the next option."""

    LISTS = ("--batch", "--decode-log", "--only")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Join the values by commas, then parse as ever."""
        joined: list[str] = []
        is_open = False
        for argument in args:
            if argument.startswith("-"):
                is_open = argument in self.LISTS
                joined.append(argument)
            elif is_open and not joined[-1].startswith("-"):
                joined[-1] += f",{argument}"
            else:
                joined.append(argument)
        return super().parse_args(ctx, joined)


def numbers(text: str, option: str, *, least: int) -> tuple[int, ...]:
    """``1,8,64``; none of nothing. Raises ``ConfigError``."""
    words = [word for word in text.replace(",", " ").split() if word]
    if any(not word.isdecimal() or int(word) < least for word in words):
        raise ConfigError(
            f"--{option} takes whole numbers of at least {least}, got {text!r}", param=option
        )
    return tuple(dict.fromkeys(int(word) for word in words))
