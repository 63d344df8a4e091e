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


SUBSTITUTES: dict[str, Any] = {"_thnn_fused_lstm_cell": run_lstm_cell, "_thnn_fused_gru_cell": run_gru_cell}
