"""Tiny character-level and byte-level tokenizers, in the tokenizer classes that pipelines require."""

from __future__ import annotations

import importlib
import string
from typing import Any

from anyaccel.recipes.lazy_modules import transformers
from anyaccel.recipes.parts.tokenizer_backends import make_tokenizer

__all__ = [
    "BERT_VOCABULARY",
    "CLIP_VOCABULARY",
    "GEMMA_VOCABULARY",
    "GLM_IMAGE_CODES",
    "GLM_IMAGE_VOCABULARY",
    "GLM_VOCABULARY",
    "LLAMA_VOCABULARY",
    "QWEN_VOCABULARY",
    "ROBERTA_VOCABULARY",
    "T5_VOCABULARY",
    "XLM_VOCABULARY",
    "bert_tokenizer",
    "clip_tokenizer",
    "gemma_tokenizer",
    "glm_image_tokenizer",
    "glm_tokenizer",
    "llama_tokenizer",
    "qwen_tokenizer",
    "roberta_tokenizer",
    "t5_tokenizer",
    "xlm_tokenizer",
]


def byte_characters() -> list[str]:
    """Return the 256 characters that represent bytes in a byte-level vocabulary, in byte order."""
    # As in GPT-2: printable bytes stand for themselves, the others are mapped to characters from U+0100 on.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [characters[byte] for byte in range(256)]


def make_vocabulary(tokens: list[str]) -> dict[str, int]:
    """Return a dict that maps each token to its index in the list."""
    return {token: index for index, token in enumerate(tokens)}


# The end token must have the largest id: with an old config (eos_token_id 2), transformers finds it with argmax.
CLIP_VOCABULARY = make_vocabulary(
    [*byte_characters(), *(letter + "</w>" for letter in byte_characters()), "<|startoftext|>", "<|endoftext|>"]
)
T5_VOCABULARY = make_vocabulary(
    ["<pad>", "</s>", "<unk>", "▁", *string.ascii_letters, *string.digits, *string.punctuation]
)

BERT_VOCABULARY = make_vocabulary(
    [
        *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
        *string.ascii_lowercase,
        *string.digits,
        *string.punctuation,
        # In WordPiece, all letters of a word but the first have this prefix.
        *(f"##{letter}" for letter in string.ascii_lowercase + string.digits),
    ]
)
QWEN_SPECIAL_TOKENS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
QWEN_VOCABULARY = make_vocabulary([*byte_characters(), "<|endoftext|>", *QWEN_SPECIAL_TOKENS])
GEMMA_VOCABULARY = make_vocabulary(
    [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<mask>",
        "▁",
        *string.printable[:94],
        "\n",
        # Byte fallback for characters outside of the vocabulary.
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
)
ROBERTA_VOCABULARY = make_vocabulary(["<s>", "<pad>", "</s>", "<unk>", *byte_characters(), "<mask>"])
XLM_VOCABULARY = make_vocabulary(["<s>", "<pad>", "</s>", "<unk>", "▁", *string.printable[:94], "<mask>"])
LLAMA_VOCABULARY = make_vocabulary(
    ["<unk>", "<s>", "</s>", "▁", *string.printable[:94], *(f"<0x{byte:02X}>" for byte in range(256))]
)
GLM_PREFIX_TOKENS = ("[gMASK]", "<sop>")
GLM_VOCABULARY = make_vocabulary([*byte_characters(), "<|endoftext|>", *GLM_PREFIX_TOKENS])
GLM_IMAGE_SPECIAL_TOKENS = {"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"}
# The codes of image tokens come first. The real vocabulary has 16384 of them.
GLM_IMAGE_CODES = 16
GLM_IMAGE_VOCABULARY = make_vocabulary(
    [
        *(f"<|dit_token_{code}|>" for code in range(GLM_IMAGE_CODES)),
        *("<|dit_token_16384|>", "<|dit_token_16385|>"),
        *byte_characters(),
        "<|endoftext|>",
        *GLM_IMAGE_SPECIAL_TOKENS.values(),
    ]
)

# The ChatML template of Qwen, without tools and the default system message: every character is a token here.
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
    """Return a CLIP tokenizer with one token per byte and with start and end tokens."""
    return make_tokenizer("CLIPTokenizer", CLIP_VOCABULARY, pad_token=pad_token, model_max_length=max_length)


def t5_tokenizer(*, max_length: int = 512) -> Any:
    """Return a T5 tokenizer with one token per character, an end token and padding with token ID 0."""
    # Unigram pieces with log probabilities. All letters have the same one, special tokens have 0.
    pieces = [(token, 0.0 if token.startswith("<") and len(token) > 1 else -2.0) for token in T5_VOCABULARY]
    return make_tokenizer("T5Tokenizer", pieces, extra_ids=0, model_max_length=max_length)


def qwen_tokenizer(*, max_length: int = 1024, **more: Any) -> Any:
    """Return a Qwen tokenizer with one token per byte and a chat template."""
    return make_tokenizer(
        "Qwen2Tokenizer",
        QWEN_VOCABULARY,
        additional_special_tokens=list(QWEN_SPECIAL_TOKENS),
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        **more,
    )


def gemma_tokenizer(*, max_length: int = 512, **more: Any) -> Any:
    """Return a Gemma tokenizer with one token per character, a start token and left padding."""
    return make_tokenizer("GemmaTokenizer", GEMMA_VOCABULARY, add_bos_token=True, model_max_length=max_length, **more)


def bert_tokenizer(*, max_length: int = 77) -> Any:
    """Return a BERT tokenizer with one token per character and with `[CLS]` and `[SEP]` tokens."""
    return make_tokenizer("BertTokenizer", BERT_VOCABULARY, model_max_length=max_length)


def glm_tokenizer(*, max_length: int = 1024) -> Any:
    """Return a GLM tokenizer with one token per byte, two prefix tokens and left padding."""
    # Assembled here: transformers has no tokenizer class for GLM and loads its tokenizer.json with a generic one.
    library = importlib.import_module("tokenizers")
    backend = library.Tokenizer(library.models.BPE(vocab=GLM_VOCABULARY, merges=[]))
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = library.decoders.ByteLevel()
    backend.post_processor = library.processors.TemplateProcessing(
        single=[*GLM_PREFIX_TOKENS, "$A"],
        special_tokens=[(token, GLM_VOCABULARY[token]) for token in GLM_PREFIX_TOKENS],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        padding_side="left",
        model_max_length=max_length,
    )


def glm_image_tokenizer() -> Any:
    """Return a GLM-Image tokenizer with one token per byte and tokens for images and their sizes."""
    library = importlib.import_module("tokenizers")
    backend = library.Tokenizer(library.models.BPE(vocab=GLM_IMAGE_VOCABULARY, merges=[]))
    backend.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = library.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        bos_token="<|dit_token_16384|>",
        padding_side="left",
        extra_special_tokens=GLM_IMAGE_SPECIAL_TOKENS,
    )


def llama_tokenizer(*, max_length: int = 512, **more: Any) -> Any:
    """Return a Llama tokenizer with one token per character and a start token."""
    options = {"add_bos_token": True, "pad_token": "<unk>", "model_max_length": max_length}
    return make_tokenizer("LlamaTokenizer", LLAMA_VOCABULARY, **options, **more)


def roberta_tokenizer(*, max_length: int = 77) -> Any:
    """Return a RoBERTa tokenizer with one token per byte and with start and end tokens."""
    return make_tokenizer("RobertaTokenizer", ROBERTA_VOCABULARY, model_max_length=max_length)


def xlm_tokenizer(*, max_length: int = 77) -> Any:
    """Return an XLM-RoBERTa tokenizer with one token per character and with start and end tokens."""
    pieces = [(token, -2.0) for token in XLM_VOCABULARY]
    return make_tokenizer("XLMRobertaTokenizer", pieces, model_max_length=max_length)
