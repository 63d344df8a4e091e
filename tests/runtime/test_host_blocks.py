"""Blocks as the host does them in fewest passes: the same numbers, and only where nothing else is in a block."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models import attention, attention_processor, resnet

from anyaccel.runtime import host_blocks

MODELS: Any = diffusers
BLOCKS: Any = resnet
ATTENTION: Any = attention
PROCESSORS: Any = attention_processor


def residual(**options: Any) -> Any:
    torch.manual_seed(0)
    given = {"in_channels": 32, "out_channels": 64, "temb_channels": 48, "groups": 8, **options}
    return BLOCKS.ResnetBlock2D(**given).eval()


def transformer(**options: Any) -> Any:
    torch.manual_seed(0)
    return ATTENTION.BasicTransformerBlock(32, 4, 8, **{"cross_attention_dim": 24, **options}).eval()


def run(block: Any) -> torch.Tensor:
    torch.manual_seed(1)
    given: dict[str, torch.Tensor | None]
    if isinstance(block, BLOCKS.ResnetBlock2D):
        temb = None if block.time_emb_proj is None else torch.randn(2, 48)
        given = {"input_tensor": torch.randn(2, block.in_channels, 8, 8), "temb": temb}
    else:
        given = {"hidden_states": torch.randn(2, 16, 32), "encoder_hidden_states": torch.randn(2, 5, 24)}
    before = {name: None if tensor is None else tensor.clone() for name, tensor in given.items()}
    made: torch.Tensor = block(**given)
    for name, tensor in given.items():
        assert tensor is None or tensor.equal(before[name]), f"{name} is the caller's"  # type: ignore[arg-type]
    return made


PLAIN: dict[str, Callable[[], Any]] = {
    "a residual block": residual,
    "without a change of channels": lambda: residual(out_channels=32),
    "of an autoencoder": lambda: residual(temb_channels=None),
    "with a time that is not activated": lambda: residual(skip_time_act=True),
    "a transformer block": transformer,
    "with a bias in attention": lambda: transformer(attention_bias=True),
}
OTHER: dict[str, Callable[[], Any]] = {
    "halves its picture": lambda: residual(down=True, out_channels=32),
    "doubles its picture": lambda: residual(up=True, out_channels=32),
    "scales by the time": lambda: residual(time_embedding_norm="scale_shift"),
    "divides its result": lambda: residual(output_scale_factor=2.0),
    "has another activation": lambda: residual(non_linearity="mish"),
    "norms by the time": lambda: transformer(num_embeds_ada_norm=10, norm_type="ada_norm"),
    "has another gate": lambda: transformer(activation_fn="gelu"),
    "has places of its own": lambda: transformer(positional_embeddings="sinusoidal", num_positional_embeddings=16),
    "looks at the prompt alone": lambda: transformer(only_cross_attention=True),
}


@torch.no_grad()
@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_block_gives_the_same_numbers(name: str) -> None:
    block = PLAIN[name]()
    expected = run(block)
    host_blocks.install(block)
    assert host_blocks.is_installed(block)
    torch.testing.assert_close(run(block), expected, rtol=1e-6, atol=1e-6)
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        torch.testing.assert_close(run(other), expected, rtol=1e-6, atol=1e-6)
    host_blocks.let_go(block)
    assert "forward" not in vars(block)
    torch.testing.assert_close(run(block), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", OTHER)
def test_any_other_block_is_left_alone(name: str) -> None:
    block = OTHER[name]()
    host_blocks.install(block)
    assert not host_blocks.is_installed(block)


def change_processor(block: Any) -> None:
    block.attn1.processor = PROCESSORS.AttnProcessor()


def halve_attention(block: Any) -> None:
    class Halved(PROCESSORS.AttnProcessor2_0):  # type: ignore[misc]
        def __call__(self, *given: Any, **named: Any) -> Any:
            return super().__call__(*given, **named) / 2

    block.attn1.processor = Halved()


def hook_attention(block: Any) -> None:
    block.attn2.register_forward_hook(lambda module, given, made: made / 2)


def exchange_nonlinearity(block: Any) -> None:
    block.nonlinearity = torch.nn.ReLU()


def drop_some(block: Any) -> None:
    for part in block.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.5
            part.train()


def exchange_dropout(block: Any) -> None:
    block.dropout = torch.nn.Tanh()


def exchange_output(block: Any) -> None:
    block.attn1.to_out[1] = torch.nn.Tanh()


def change_forward(block: Any) -> None:
    block.ff.forward = lambda states: states


def add_hook(block: Any) -> None:
    block.norm2.register_forward_hook(lambda *given: None)


def change_gelu(block: Any) -> None:
    block.ff.net[0].gelu = torch.relu


def change_nonlinearity(block: Any) -> None:
    block.nonlinearity.forward = torch.relu


def change_class(block: Any) -> None:
    block.__class__ = type("Merged", (type(block),), {"forward": lambda self, *given, **named: torch.ones(2)})


def train(block: Any) -> None:
    block.train()


def chunk(block: Any) -> None:
    block.set_chunk_feed_forward(1, 1)


@pytest.mark.parametrize(
    ("make", "change"),
    [(transformer, change_processor), (transformer, change_forward), (transformer, chunk), (transformer, add_hook),
     (residual, add_hook), (residual, train), (transformer, train), (transformer, change_gelu),
     (residual, change_nonlinearity), (transformer, change_class), (residual, change_class),
     (transformer, drop_some), (residual, drop_some), (residual, exchange_dropout), (transformer, exchange_output),
     (transformer, halve_attention), (transformer, hook_attention), (residual, exchange_nonlinearity)],
)  # fmt: skip
@torch.no_grad()
def test_a_block_that_was_changed_is_as_it_was(make: Callable[[], Any], change: Callable[[Any], None]) -> None:
    block, plain = make(), make()
    host_blocks.install(block)
    assert host_blocks.is_installed(block)
    change(block)
    change(plain)
    torch.testing.assert_close(run(block), run(plain), rtol=1e-6, atol=1e-6)  # at once: at a step, or in a user's loop
    host_blocks.install(block)  # as every call of a pipeline does
    assert not host_blocks.is_installed(block)


@pytest.mark.parametrize(
    ("make", "kind", "name"),
    [(transformer, PROCESSORS.AttnProcessor2_0, "__call__"), (transformer, ATTENTION.BasicTransformerBlock, "forward"),
     (residual, BLOCKS.ResnetBlock2D, "forward"), (residual, torch.nn.SiLU, "forward")],
)  # fmt: skip
@torch.no_grad()
def test_what_is_exchanged_for_a_whole_class_is_done(
    make: Callable[[], Any], kind: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, plain, before = make(), make(), getattr(kind, name)
    host_blocks.install(block)
    monkeypatch.setattr(kind, name, lambda *given, **named: before(*given, **named) / 2)
    torch.testing.assert_close(run(block), run(plain), rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_hooks_for_all_layers_see_all_layers() -> None:
    block, plain = transformer(), transformer()
    host_blocks.install(block)
    everywhere: Any = torch.nn.modules.module
    hook = everywhere.register_module_forward_hook(
        lambda module, given, made: made / 2 if type(module).__name__ == "Attention" else None
    )
    try:
        torch.testing.assert_close(run(block), run(plain), rtol=1e-6, atol=1e-6)
    finally:
        hook.remove()


@torch.no_grad()
def test_weights_that_are_joined_are_those_of_now() -> None:
    block, plain = transformer(), transformer()
    host_blocks.install(block)
    run(block)
    assert host_blocks._JOINED.get(block.attn1) is not None
    for one in (block, plain):
        one.attn1.to_k.weight.mul_(3)
    torch.testing.assert_close(run(block), run(plain), rtol=1e-6, atol=1e-6)
    for one in (block, plain):
        one.attn1.to_v.weight.data.mul_(3)  # past torch's count of writes
    host_blocks.install(block)  # as every call of a pipeline does
    torch.testing.assert_close(run(block), run(plain), rtol=1e-6, atol=1e-6)
    host_blocks.let_go(block)
    assert host_blocks._JOINED.get(block.attn1) is None


@torch.no_grad()
def test_a_mask_and_other_types_go_the_usual_way() -> None:
    block, plain = transformer(), transformer()
    host_blocks.install(block)
    states, mask = torch.randn(2, 16, 32), torch.zeros(2, 1, 16)
    mask[:, :, 8:] = -10_000
    told = {"attention_mask": mask, "encoder_hidden_states": torch.randn(2, 5, 24)}
    assert torch.equal(block(states, **told), plain(states, **told))
    assert not torch.allclose(block(states, **told), block(states, encoder_hidden_states=told["encoder_hidden_states"]))
    half = residual().to(torch.bfloat16)
    expected = half(torch.ones(1, 32, 8, 8, dtype=torch.bfloat16), torch.ones(1, 48, dtype=torch.bfloat16))
    host_blocks.install(half)
    made = half(torch.ones(1, 32, 8, 8, dtype=torch.bfloat16), torch.ones(1, 48, dtype=torch.bfloat16))
    assert torch.equal(made, expected)


@torch.no_grad()
def test_a_users_own_forward_stays() -> None:
    block = residual()
    block.forward = lambda *given: given[0]
    host_blocks.install(block)
    assert not host_blocks.is_installed(block)
