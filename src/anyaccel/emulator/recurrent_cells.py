"""LSTM and GRU cells written with basic torch operations, for fused kernels that the CPU lacks."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["SUBSTITUTES"]


def run_lstm_cell(gates: Any, hidden_gates: Any, cell: Any, bias: Any = None, hidden_bias: Any = None) -> Any:
    """Compute one LSTM step; return the hidden state, the cell state and the gates."""
    gates = gates + hidden_gates if bias is None else gates + bias + hidden_gates + hidden_bias
    # Gate order of torch.nn.LSTM.
    input_gate, forget_gate, cell_gate, output_gate = gates.chunk(4, 1)
    cell = forget_gate.sigmoid() * cell + input_gate.sigmoid() * cell_gate.tanh()
    return output_gate.sigmoid() * cell.tanh(), cell, gates


def run_gru_cell(gates: Any, hidden_gates: Any, hidden: Any, bias: Any = None, hidden_bias: Any = None) -> Any:
    """Compute one GRU step; return the hidden state and the workspace tensor of torch's fused kernel."""
    if bias is not None:
        gates, hidden_gates = gates + bias, hidden_gates + hidden_bias
    reset, update, new = gates.chunk(3, 1)
    hidden_reset, hidden_update, hidden_new = hidden_gates.chunk(3, 1)
    reset, update = (reset + hidden_reset).sigmoid(), (update + hidden_update).sigmoid()
    new = (new + reset * hidden_new).tanh()
    return new + update * (hidden - new), torch.cat([reset, update, new, hidden, hidden_new], 1)


def differentiate_lstm_cell(
    grad_hidden: Any, grad_cell: Any, cell: Any, new_cell: Any, gates: Any, has_bias: bool
) -> tuple[Any, Any, Any]:
    """Return the gradients of the gates, the cell state and the biases for `run_lstm_cell`."""
    input_gate, forget_gate, cell_gate, output_gate = gates.chunk(4, 1)
    input_gate, forget_gate, output_gate = input_gate.sigmoid(), forget_gate.sigmoid(), output_gate.sigmoid()
    cell_gate, output = cell_gate.tanh(), new_cell.tanh()
    # A result that the loss does not depend on has no gradient.
    grad_hidden = torch.zeros_like(cell) if grad_hidden is None else grad_hidden
    total = grad_hidden * output_gate * (1 - output**2) + (0 if grad_cell is None else grad_cell)
    grad_gates = torch.cat(
        [
            total * cell_gate * input_gate * (1 - input_gate),
            total * cell * forget_gate * (1 - forget_gate),
            total * input_gate * (1 - cell_gate**2),
            grad_hidden * output * output_gate * (1 - output_gate),
        ],
        1,
    )
    return grad_gates, total * forget_gate, grad_gates.sum(0) if has_bias else None


def differentiate_gru_cell(grad_hidden: Any, workspace: Any, has_bias: bool) -> tuple[Any, ...]:
    """Return the gradients of both gates, the hidden state and both biases for `run_gru_cell`."""
    reset, update, new, hidden, hidden_new = workspace.chunk(5, 1)
    grad_new = grad_hidden * (1 - update) * (1 - new**2)
    grad_reset = grad_new * hidden_new * reset * (1 - reset)
    grad_update = grad_hidden * (hidden - new) * update * (1 - update)
    grad_gates = torch.cat([grad_reset, grad_update, grad_new], 1)
    grad_hidden_gates = torch.cat([grad_reset, grad_update, grad_new * reset], 1)
    biases = (grad_gates.sum(0), grad_hidden_gates.sum(0)) if has_bias else (None, None)
    return grad_gates, grad_hidden_gates, grad_hidden * update, *biases


SUBSTITUTES: dict[str, Any] = {
    "_thnn_fused_lstm_cell": run_lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": differentiate_lstm_cell,
    "_thnn_fused_gru_cell": run_gru_cell,
    "_thnn_fused_gru_cell_backward": differentiate_gru_cell,
}
