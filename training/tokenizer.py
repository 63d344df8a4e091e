"""Tokenizer of the embedded model: a CLIP tokenizer trained on its captions."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import CLIPTokenizer

from training.captions import draw_scene
from training.things import Thing

__all__ = ["MAX_TOKENS", "make_tokenizer"]

MAX_TOKENS = 32
_START, _END = "<|startoftext|>", "<|endoftext|>"
_VOCABULARY = 3072


def make_tokenizer(things: tuple[Thing, ...], folder: Path) -> Any:
    """Train a BPE tokenizer on random captions and save it in the format of diffusers pipelines."""
    rng = random.Random(0)
    captions = [draw_scene(things, rng).caption for _ in range(40_000)]
    captions += [f"a {name}" for thing in things for name in thing.names for _ in range(20)]
    captions += [chr(code) for code in range(0x21, 0x100)]  # every byte must be able to end a word
    bpe = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token=_END))
    bpe.normalizer = normalizers.Lowercase()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=[_START, _END], initial_alphabet=alphabet, end_of_word_suffix="</w>"
    )
    bpe.train_from_iterator(captions, trainer)
    shutil.rmtree(folder, ignore_errors=True)  # an older tokenizer.json would take precedence
    folder.mkdir(parents=True)
    bpe.model.save(str(folder))
    tokenizer = CLIPTokenizer.from_pretrained(folder, model_max_length=MAX_TOKENS)
    tokenizer.save_pretrained(folder)
    return tokenizer
