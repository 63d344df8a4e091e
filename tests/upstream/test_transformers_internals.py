"""What anyaccel relies on in transformers, asked of the installed transformers."""

from __future__ import annotations

import torch
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedModel, T5EncoderModel

from anyaccel.upstream.transformers_internals import CAPTURE_MARK, is_transformers_model, read_float32_modules


def make_model() -> CLIPTextModel:
    config = CLIPTextConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    return CLIPTextModel(config)


def test_a_model_marks_that_it_added_hooks_to_itself() -> None:
    model = make_model()
    model(torch.zeros(1, 4, dtype=torch.long), output_hidden_states=True)
    marked = [part for part in model.modules() if CAPTURE_MARK in vars(part)]
    assert marked, "transformers notes its hooks elsewhere: tracing/meta_clone.py would copy a model that adds none"


def test_a_class_says_what_stays_in_float32() -> None:
    assert read_float32_modules(T5EncoderModel, "float16") == ("wo",)
    assert read_float32_modules(T5EncoderModel, "bfloat16") == ()
    assert hasattr(PreTrainedModel, "_keep_in_fp32_modules_strict")


def test_a_model_is_known_by_its_module() -> None:
    assert is_transformers_model(make_model())
    assert not is_transformers_model(torch.nn.Linear(2, 2))
