"""Options of `phrases`."""

from __future__ import annotations

from attrs import field, frozen, validators

__all__ = ["PhrasesConfig"]

_BOILERPLATE = (
    '<!DOCTYPE html>\n<html lang="en">\n<head>\n    <meta charset="utf-8">\n',
    '    <meta name="viewport" content="width=device-width, initial-scale=1">\n',
    'if __name__ == "__main__":\n    main()\n',
    "Licensed under the Apache License, Version 2.0 (the",
    'THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED',
    '{"name": "", "description": "", "type": "object", "properties": {',
)


@frozen
class PhrasesConfig:
    """
    Options of `phrases`, the section ``[plugin.phrases]`` of power.toml.

    Args:
        phrases: Texts that come up again and again: headers, keys, greetings.
        match: Tokens of a phrase that must stand there before the rest of it is proposed.
    """

    phrases: tuple[str, ...] = _BOILERPLATE
    match: int = field(default=2, validator=validators.ge(1))
