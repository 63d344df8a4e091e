"""Product names as users write them: `rtx4090`, `RTX 4090` and `NVIDIA GeForce RTX 4090` are the same product."""

from __future__ import annotations

import difflib
import re

from anyaccel.backends.sheet import Product, Sheet

__all__ = ["find_product", "suggest_product"]

# A longer list of products is shortened to the most similar ones.
_MAX_LISTED, _MAX_SIMILAR = 12, 4


def find_product(sheet: Sheet, word: str) -> Product | None:
    """Return the product with this name or title, or None; case, spaces, hyphens and underscores do not matter."""
    wanted = _squeeze(word)
    for product in sheet.products:
        _, _, title = product.title.partition(" ")
        if wanted in (_squeeze(product.name), _squeeze(product.title), _squeeze(title)):
            return product
    return None


def suggest_product(sheet: Sheet, word: str) -> str:
    """Return a hint for a name that looks like one of the vendor's products but is not on the sheet."""
    names = [product.name for product in sheet.products]
    variant = re.compile(re.escape(_squeeze(word)) + r"\d+gb")
    variants = [product for product in sheet.products if variant.fullmatch(_squeeze(product.name))]
    if variants:  # `rtx4060ti` exists with 8 and 16 GB
        variants.sort(key=lambda product: product.memory_bytes or 0)
        return f"{word} exists with several memory sizes: use {' or '.join(product.name for product in variants)}"
    size = f"use {sheet.name} with a memory size, such as {sheet.name}:24GiB"
    if len(names) <= _MAX_LISTED:
        return f"{size}, or a known product: {', '.join(names)}"
    similar = difflib.get_close_matches(word, names, n=_MAX_SIMILAR, cutoff=0.5)
    listed = f", or a similar product: {', '.join(similar)}" if similar else ""
    return f"{size}{listed}; `anyaccel devices {sheet.name}` lists all products"


def _squeeze(text: str) -> str:
    return re.sub(r"[\s_-]", "", text.lower())
