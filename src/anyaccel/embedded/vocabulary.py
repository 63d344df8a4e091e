"""The embedded model's vocabulary, used to warn about unknown words in a prompt."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

from anyaccel.embedded.judge import BACKGROUNDS
from anyaccel.embedded.motion import MOTIONS

__all__ = ["find_unknown_words"]

_THINGS = Path(__file__).parent / "things.json"
# Words of the caption templates, and common words in prompts that do not name an object.
_FUNCTION_WORDS = """
a an the and with on in of to at next beside left right background white gray two three some several few one single
small tiny little large big huge cute beautiful nice pretty lovely simple colorful happy cool
draw me please show paint make create i want generate give can you there is that picture emoji drawing icon photo image
video animation
"""
_PLURAL_ENDINGS = (("ies", "y"), ("ves", "f"), ("es", ""), ("s", ""))


def find_unknown_words(prompt: str) -> list[str]:
    """Return the words in a prompt that are not in the embedded model's vocabulary, in prompt order."""
    words = re.findall(r"[^\W_][\w'’-]*", prompt.lower())
    return [word for word in dict.fromkeys(words) if not _is_known(word)]


def _is_known(word: str) -> bool:
    if word in _vocabulary():
        return True
    # things.json contains only singular forms.
    return any(
        word.endswith(ending) and word.removesuffix(ending) + singular in _vocabulary()
        for ending, singular in _PLURAL_ENDINGS
    )


@functools.cache
def _vocabulary() -> frozenset[str]:
    things = json.loads(_THINGS.read_text(encoding="utf-8"))["things"]
    names = " ".join(name for thing in things for name in thing["names"])
    # Images show no motion, but the captions of their training data have the words, too.
    motions = " ".join(wording for wordings in MOTIONS.values() for wording in wordings)
    irregular_plurals = frozenset(
        ("men", "women", "children", "people", "mice", "geese", "teeth", "feet", "oxen", "knives")
    )
    texts = (names, motions, " ".join(BACKGROUNDS), _FUNCTION_WORDS)
    return irregular_plurals | {word for text in texts for word in text.split()}
