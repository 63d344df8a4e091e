"""Backends of tokenizers for transformers 4, whose classes do not accept a vocabulary.

`tokenizer_backends.json` has the backend that each class of transformers 5 builds from a vocabulary, without the
vocabulary.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

from anyaccel.recipes.lazy_modules import transformers

__all__ = ["make_tokenizer"]

_BACKENDS = Path(__file__).with_suffix(".json")


def make_tokenizer(kind: str, vocabulary: dict[str, int] | list[tuple[str, float]], **options: Any) -> Any:
    """Return a tokenizer of a class of transformers; with transformers 4, of its fast class."""
    if importlib.metadata.version("transformers").split(".")[0] != "4":
        merges: dict[str, Any] = {"merges": []} if _read_backends()[kind]["model"]["type"] == "BPE" else {}
        return getattr(transformers, kind)(vocab=vocabulary, **merges, **options)
    backend = _read_backends()[kind]
    state = json.dumps({**backend, "model": {**backend["model"], "vocab": vocabulary}})
    library = importlib.import_module("tokenizers")
    return getattr(transformers, f"{kind}Fast")(tokenizer_object=library.Tokenizer.from_str(state), **options)


@functools.cache
def _read_backends() -> dict[str, Any]:
    backends: dict[str, Any] = json.loads(_BACKENDS.read_text(encoding="utf-8"))
    return backends
