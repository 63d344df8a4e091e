"""Blocks of UNets and autoencoders as the host does them in fewest passes over memory: the same numbers.

What a block has just made and nobody else has is changed in place, and nothing is divided by one. The layers inside are
called as they are, by whatever stands in for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch.nn import functional

from anyaccel.runtime.fast_forward import find_hooks, find_own_methods, is_as_written, is_free
from anyaccel.runtime.tensor_state import TensorState, fingerprint, read_state

__all__ = ["install", "is_installed", "let_go"]

_SMALL = 256 * 256
"""The numbers of a weight up to which three products are slower than one; a second copy of such takes no memory."""


@dataclass(frozen=True)
class _Joined:
    """The weights of an attention's queries, keys and values side by side."""

    states: list[TensorState]
    held: list[torch.UntypedStorage]
    """The weights' memory, so that another weight cannot come to lie there unseen."""
    prints: list[torch.Tensor]
    weights: torch.Tensor

    def holds(self, attention: Any) -> bool:
        """Whether the weights are what they were."""
        layers = (attention.to_q, attention.to_k, attention.to_v)
        return all(
            type(layer) is torch.nn.Linear and torch.equal(before, fingerprint(layer.weight))
            for layer, before in zip(layers, self.prints, strict=True)
        )


_JOINED: weakref.WeakKeyDictionary[torch.nn.Module, _Joined] = weakref.WeakKeyDictionary()


def _can_change(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def forward_residual(self: Any, input_tensor: torch.Tensor, temb: torch.Tensor | None = None, *more: Any) -> Any:
    """The forward of diffusers' `ResnetBlock2D`."""
    without_times = (temb is None) is not (self.time_emb_proj is None)
    if more or without_times or not _can_change(input_tensor) or not _is_plain(self):
        return type(self).forward(self, input_tensor, temb, *more)
    made = self.conv1(functional.silu(self.norm1(input_tensor), inplace=True))
    if temb is not None:
        times = self.time_emb_proj(temb if self.skip_time_act else functional.silu(temb))
        made.add_(times[:, :, None, None])
    made = self.conv2(functional.silu(self.norm2(made), inplace=True))
    return made.add_(input_tensor if self.conv_shortcut is None else self.conv_shortcut(input_tensor))


def forward_transformer(
    self: Any,
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    encoder_hidden_states: torch.Tensor | None = None,
    encoder_attention_mask: torch.Tensor | None = None,
    timestep: torch.Tensor | None = None,
    cross_attention_kwargs: dict[str, Any] | None = None,
    class_labels: torch.Tensor | None = None,
    added_cond_kwargs: dict[str, torch.Tensor] | None = None,
) -> Any:
    """The forward of diffusers' `BasicTransformerBlock`."""
    masked = attention_mask is not None or encoder_attention_mask is not None
    odd = masked or cross_attention_kwargs or hidden_states.dim() != 3 or not _can_change(hidden_states)
    if odd or not _is_plain(self):
        return type(self).forward(
            self, hidden_states, attention_mask, encoder_hidden_states, encoder_attention_mask, timestep,
            cross_attention_kwargs, class_labels, added_cond_kwargs,
        )  # fmt: skip
    made = _attend(self.attn1, self.norm1(hidden_states), None).add_(hidden_states)
    made = _attend(self.attn2, self.norm2(made), encoder_hidden_states).add_(made)
    gated, _, last = self.ff.net
    numbers, gate = gated.proj(self.norm3(made)).chunk(2, dim=-1)
    return last(functional.gelu(gate).mul_(numbers)).add_(made)


def _attend(attention: Any, states: torch.Tensor, others: torch.Tensor | None) -> torch.Tensor:
    def part(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(tensor.shape[0], tensor.shape[1], attention.heads, -1).transpose(1, 2)

    if others is None:
        query, key, value = _project(attention, states)
    else:
        query, key, value = attention.to_q(states), attention.to_k(others), attention.to_v(others)
    made = functional.scaled_dot_product_attention(part(query), part(key), part(value))
    joined: torch.Tensor = attention.to_out[0](made.transpose(1, 2).flatten(2))
    return joined


def _project(attention: Any, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values of the same rows: one product where three would be small."""
    layers = (attention.to_q, attention.to_k, attention.to_v)
    if not all(_is_small(layer) for layer in layers):
        return tuple(layer(states) for layer in layers)
    written = [read_state(layer.weight) for layer in layers]
    kept = _JOINED.get(attention)
    if kept is None or kept.states != written:
        weights = torch.cat([layer.weight.detach().t() for layer in layers], 1)
        held = [layer.weight.untyped_storage() for layer in layers]
        kept = _JOINED[attention] = _Joined(written, held, [fingerprint(layer.weight) for layer in layers], weights)
    return (states @ kept.weights).chunk(3, dim=-1)


def _is_small(layer: Any) -> bool:
    plain = type(layer) is torch.nn.Linear and layer.bias is None and is_free(layer)
    return plain and layer.weight.numel() <= _SMALL


def _is_plain(block: Any) -> bool:
    """Whether a block does what its class does and nobody looks into it: asked at each call, since users change it."""
    way = _find_way(block)
    if way is None or block.training or any(find_hooks(part for part in block.modules() if part is not block)):
        return False
    return is_as_written(type(block), "forward") and way[0](block) and not find_own_methods(block)


def _does_nothing(part: Any) -> bool:
    """Whether a layer gives what it is given, so that it can be passed over."""
    return type(part) is torch.nn.Dropout and not part.training and is_free(part)


def _is_plain_residual(block: Any) -> bool:
    """Whether nothing but norms, convolutions and the time is in it."""
    return (
        block.upsample is None
        and block.downsample is None
        and (block.time_embedding_norm == "default" or block.time_emb_proj is None)
        and block.output_scale_factor == 1
        and type(block.nonlinearity) is torch.nn.SiLU
        and is_free(block.nonlinearity)
        and is_as_written(torch.nn.SiLU, "forward")
        and _does_nothing(block.dropout)
        and type(block.norm1) is type(block.norm2) is torch.nn.GroupNorm
    )


def _is_plain_transformer(block: Any) -> bool:
    """Whether it is attention, attention to the prompt and a gate, each after its norm, with nothing between them."""
    if block.norm_type != "layer_norm" or block.pos_embed is not None or block.only_cross_attention:
        return False
    if block.attn2 is None or block._chunk_size is not None or hasattr(block, "fuser"):
        return False
    kinds = tuple(type(part).__name__ for part in block.ff.net)
    passed_over = (block.attn1, block.attn2, block.ff, block.ff.net[0])
    return (
        kinds == ("GEGLU", "Dropout", "Linear")
        and _does_nothing(block.ff.net[1])
        and all(is_free(part) and not find_own_methods(part) for part in passed_over)
        and all(is_as_written(type(part), "forward") for part in passed_over)
        and all(_is_plain_attention(part) for part in passed_over[:2])
    )


def _is_plain_attention(attention: Any) -> bool:
    extras = ("spatial_norm", "group_norm", "norm_q", "norm_k", "norm_cross", "residual_connection")
    return (
        type(attention).__name__ == "Attention"
        and type(attention.processor).__name__ == "AttnProcessor2_0"
        and is_as_written(type(attention.processor), "__call__")
        and _does_nothing(attention.to_out[1])
        and not any(getattr(attention, name, None) for name in extras)
        and attention.rescale_output_factor == 1
    )


_WAYS: dict[tuple[str, str], tuple[Callable[[Any], bool], Callable[..., Any]]] = {
    ("diffusers.models.resnet", "ResnetBlock2D"): (_is_plain_residual, forward_residual),
    ("diffusers.models.attention", "BasicTransformerBlock"): (_is_plain_transformer, forward_transformer),
}
for _, _forward in _WAYS.values():
    _forward.__name__ = "forward"  # so that what is pickled or copied finds the class's own again


def _find_way(module: torch.nn.Module) -> tuple[Callable[[Any], bool], Callable[..., Any]] | None:
    return _WAYS.get((type(module).__module__, type(module).__name__))


def install(module: torch.nn.Module) -> bool:
    """Let a block be done so if it is one that can be, and tell whether what was made of its weights still holds.

    One that no longer can is as it was.
    """
    way = _find_way(module)
    if way is None and is_installed(module):  # it is of another class since
        let_go(module)
        return False
    if way is None or not (is_free(module) or is_installed(module)):
        return True
    stale = [part for part in module.children() if part in _JOINED and not _JOINED[part].holds(part)]
    for part in stale:
        del _JOINED[part]
    if not _is_plain(module):
        let_go(module)
    elif not is_installed(module):
        vars(module)["forward"] = MethodType(way[1], module)
    return not stale


def is_installed(module: torch.nn.Module) -> bool:
    """Whether a block is done so."""
    forward = getattr(vars(module).get("forward"), "__func__", None)
    return any(forward is one for _, one in _WAYS.values())


def let_go(module: torch.nn.Module) -> None:
    """Let a block be as diffusers does it."""
    if is_installed(module):
        for part in module.children():
            _JOINED.pop(part, None)
        del vars(module)["forward"]
