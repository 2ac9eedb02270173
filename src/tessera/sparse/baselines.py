"""Policies to compare with: dense, window + sinks, and the oracle in which every layer scores itself."""

from dataclasses import dataclass
from typing import Any

from tessera.attention.dispatch import attention
from tessera.sparse.contract import Policy


@dataclass(frozen=True, kw_only=True)
class Dense(Policy):
    """Every row reads every key it sees."""

    @property
    def name(self) -> str:
        return "dense"

    def init_state(self, num_layers, shapes, spec) -> Any:
        return ()

    def attend(self, layer, q, k, v, spec, positions, state):
        out = attention(q, k, v, spec, q_start=positions.q_start, kv_len=positions.kv_len, q_len=positions.q_len)
        return out.out, state
