"""The words that the embedded model was taught, so that a user is told of those that it was not."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

from anyaccel.embedded.judge import BACKGROUNDS

__all__ = ["find_unknown_words"]

_THINGS = Path(__file__).parent / "things.json"
_BETWEEN = """
a an the and with on in of to at next beside left right background white gray two three some several few one single
small tiny little large big huge cute beautiful nice pretty lovely simple colorful happy cool
draw me please show paint make create i want generate give can you there is picture emoji drawing icon photo image
"""
_ENDINGS = (("ies", "y"), ("ves", "f"), ("es", ""), ("s", ""))


def find_unknown_words(prompt: str) -> list[str]:
    """Those of a prompt's words that no caption had, in their order."""
    words = re.findall(r"[^\W_][\w'’-]*", prompt.lower())
    return [word for word in dict.fromkeys(words) if not _is_known(word)]


def _is_known(word: str) -> bool:
    if word in _known():
        return True
    return any(word.endswith(end) and word.removesuffix(end) + instead in _known() for end, instead in _ENDINGS)


@functools.cache
def _known() -> frozenset[str]:
    things = json.loads(_THINGS.read_text(encoding="utf-8"))["things"]
    named = " ".join(name for thing in things for name in thing["names"])
    plurals = {"men", "women", "children", "people", "mice", "geese", "teeth", "feet", "oxen", "knives"}
    return frozenset([*named.split(), *" ".join(BACKGROUNDS).split(), *_BETWEEN.split(), *plurals])
