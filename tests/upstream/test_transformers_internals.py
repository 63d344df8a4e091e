"""Checks every entry of transformers_internals.py against the installed transformers."""

from __future__ import annotations

import torch
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedModel, T5EncoderModel

from anyaccel.upstream.transformers_internals import OUTPUT_HOOKS_ATTRIBUTE, is_transformers_model, read_float32_modules


def make_model() -> CLIPTextModel:
    config = CLIPTextConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    return CLIPTextModel(config)


def test_capture_mark_is_set_on_models_with_hooks() -> None:
    model = make_model()
    model(torch.zeros(1, 4, dtype=torch.long), output_hidden_states=True)
    marked = [module for module in model.modules() if OUTPUT_HOOKS_ATTRIBUTE in vars(module)]
    assert marked, (
        "transformers uses another attribute to mark hooks: clones of tracing/meta_clone.py would not register hooks"
    )


def test_read_float32_modules() -> None:
    assert read_float32_modules(T5EncoderModel, "float16") == ("wo",)
    assert read_float32_modules(T5EncoderModel, "bfloat16") == ()
    assert hasattr(PreTrainedModel, "_keep_in_fp32_modules_strict")


def test_is_transformers_model() -> None:
    assert is_transformers_model(make_model())
    assert not is_transformers_model(torch.nn.Linear(2, 2))
