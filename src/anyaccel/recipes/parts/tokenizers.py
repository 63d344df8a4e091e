"""Tokenizers of the classes that the pipelines require, with character-level vocabularies."""

from __future__ import annotations

import importlib
import string
from typing import Any

from anyaccel.recipes.lazy_modules import transformers

__all__ = [
    "BERT_VOCABULARY",
    "CLIP_VOCABULARY",
    "GEMMA_VOCABULARY",
    "GLM_VOCABULARY",
    "LLAMA_VOCABULARY",
    "QWEN_VOCABULARY",
    "ROBERTA_VOCABULARY",
    "T5_VOCABULARY",
    "XLM_VOCABULARY",
    "bert_tokenizer",
    "clip_tokenizer",
    "gemma_tokenizer",
    "glm_tokenizer",
    "llama_tokenizer",
    "qwen_tokenizer",
    "roberta_tokenizer",
    "t5_tokenizer",
    "xlm_tokenizer",
]


def byte_letters() -> list[str]:
    """Return the 256 characters that represent bytes in a byte-level vocabulary, in byte order."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + place) for place, byte in enumerate(hidden)}
    return [letters[byte] for byte in range(256)]


def number(tokens: list[str]) -> dict[str, int]:
    """Return a vocabulary that maps each token to its index."""
    return {token: place for place, token in enumerate(tokens)}


# The end token has the largest id: older CLIP configurations find it with argmax.
CLIP_VOCABULARY = number(
    [*byte_letters(), *(letter + "</w>" for letter in byte_letters()), "<|startoftext|>", "<|endoftext|>"]
)
T5_VOCABULARY = number(["<pad>", "</s>", "<unk>", "▁", *string.ascii_letters, *string.digits, *string.punctuation])

BERT_VOCABULARY = number(
    [
        *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
        *string.ascii_lowercase,
        *string.digits,
        *string.punctuation,
        *(f"##{letter}" for letter in string.ascii_lowercase + string.digits),
    ]
)
QWEN_MARKS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
QWEN_VOCABULARY = number([*byte_letters(), "<|endoftext|>", *QWEN_MARKS])
GEMMA_VOCABULARY = number(
    [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<mask>",
        "▁",
        *string.printable[:94],
        "\n",
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
)
ROBERTA_VOCABULARY = number(["<s>", "<pad>", "</s>", "<unk>", *byte_letters(), "<mask>"])
XLM_VOCABULARY = number(["<s>", "<pad>", "</s>", "<unk>", "▁", *string.printable[:94], "<mask>"])
LLAMA_VOCABULARY = number(
    ["<unk>", "<s>", "</s>", "▁", *string.printable[:94], *(f"<0x{byte:02X}>" for byte in range(256))]
)
GLM_MARKS = ("[gMASK]", "<sop>")
GLM_VOCABULARY = number([*byte_letters(), "<|endoftext|>", *GLM_MARKS])

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else -%}
{%- for part in message.content -%}
{% if part.type == "image" %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor -%}
{%- endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""


def clip_tokenizer(*, pad_token: str = "<|endoftext|>", max_length: int = 77) -> Any:
    """Return the tokenizer of CLIP: one token per letter, with start and end tokens."""
    return transformers.CLIPTokenizer(
        vocab=CLIP_VOCABULARY, merges=[], pad_token=pad_token, model_max_length=max_length
    )


def t5_tokenizer(*, max_length: int = 512) -> Any:
    """Return the tokenizer of T5: one token per letter, an end token, zero padding."""
    pieces = [(token, 0.0 if token.startswith("<") and len(token) > 1 else -2.0) for token in T5_VOCABULARY]
    return transformers.T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=max_length)


def qwen_tokenizer(*, max_length: int = 1024, **more: Any) -> Any:
    """Return the tokenizer of Qwen: one token per byte, with a chat template."""
    return transformers.Qwen2Tokenizer(
        vocab=QWEN_VOCABULARY,
        merges=[],
        additional_special_tokens=list(QWEN_MARKS),
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        **more,
    )


def gemma_tokenizer(*, max_length: int = 512) -> Any:
    """Return the tokenizer of Gemma: one token per letter, a start token, left padding."""
    return transformers.GemmaTokenizer(
        vocab=GEMMA_VOCABULARY, merges=[], add_bos_token=True, model_max_length=max_length
    )


def bert_tokenizer(*, max_length: int = 77) -> Any:
    """Return the tokenizer of BERT: one token per letter, with class and separator tokens."""
    return transformers.BertTokenizer(vocab=BERT_VOCABULARY, model_max_length=max_length)


def glm_tokenizer(*, max_length: int = 1024) -> Any:
    """Return the tokenizer of GLM: one token per byte, two prefix tokens, left padding."""
    library = importlib.import_module("tokenizers")
    backend = library.Tokenizer(library.models.BPE(vocab=GLM_VOCABULARY, merges=[]))
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = library.decoders.ByteLevel()
    backend.post_processor = library.processors.TemplateProcessing(
        single=[*GLM_MARKS, "$A"], special_tokens=[(mark, GLM_VOCABULARY[mark]) for mark in GLM_MARKS]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        padding_side="left",
        model_max_length=max_length,
    )


def llama_tokenizer(*, max_length: int = 512, **more: Any) -> Any:
    """Return the tokenizer of Llama: one token per letter, a start token."""
    return transformers.LlamaTokenizer(
        vocab=LLAMA_VOCABULARY, merges=[], add_bos_token=True, pad_token="<unk>", model_max_length=max_length, **more
    )


def roberta_tokenizer(*, max_length: int = 77) -> Any:
    """Return the tokenizer of RoBERTa: one token per byte, with start and end tokens."""
    return transformers.RobertaTokenizer(vocab=ROBERTA_VOCABULARY, merges=[], model_max_length=max_length)


def xlm_tokenizer(*, max_length: int = 77) -> Any:
    """Return the tokenizer of XLM-RoBERTa: one token per letter, with start and end tokens."""
    pieces = [(token, -2.0) for token in XLM_VOCABULARY]
    return transformers.XLMRobertaTokenizer(vocab=pieces, model_max_length=max_length)
