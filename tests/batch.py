"""A reference for the engine: the programs of `runtime.step` over one contiguous cache, without a lane or a pool."""

from collections.abc import Sequence

import jax
import numpy as np

from tessera.core.mesh import mesh_of, num_stripes
from tessera.models.config import ModelConfig
from tessera.models.layers import Params
from tessera.runtime.step import allocate, decode_token, enlarge, prefill_chunk, read_head, sharing
from tessera.sparse.contract import Policy


class Batch:
    """Sequences that are prefilled and decoded together, in one cache, in chunks of `size` rows.

    `policy` runs every position, whatever its cross-over.
    """

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        policy: Policy,
        *,
        rows: int,
        num_keys: int,
        size: int,
        kv_dtype: str | None = None,
    ):
        self.params, self.config, self.policy, self.rows, self.size = params, config, policy, rows, size
        self.mesh, self.sharing = mesh_of(params), sharing(params, config)
        parts = num_stripes(self.mesh)
        self.stripe = None if parts == 1 else size // parts
        self.num_keys = num_keys
        sizes = {"batch": rows, "num_keys": num_keys, "kv_dtype": kv_dtype}
        self.cache = allocate(params, config=config, stripe=self.stripe, **sizes)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[jax.Array, list]:
        """Prefill all prompts; return next-token logits and the key counts of each chunk."""
        last, counted = np.zeros((self.rows, self.config.hidden_size), np.float32), []
        for start in range(0, max(map(len, prompts)), self.size):
            hidden, reads = self.chunk([prompt[start : start + self.size] for prompt in prompts], start)
            here = [len(prompt) > start for prompt in prompts]
            last = np.where(np.array(here)[:, None], np.asarray(hidden.last, np.float32), last)
            counted.append(reads)
        return read_head(self.params, last.astype(self.params.embed.dtype)), counted

    def chunk(self, parts: Sequence[Sequence[int]], start: int):
        """Prefill one chunk of each sequence; return its hidden states and key counts."""
        tokens = np.zeros((self.rows, self.size), np.int32)
        for row, part in zip(tokens, parts):
            row[: len(part)] = part
        self.cache, hidden, reads = prefill_chunk(
            self.params,
            self.cache,
            tokens,
            np.full(self.rows, start, np.int32),
            np.array([len(part) for part in parts], np.int32),
            config=self.config,
            policy=self.policy,
            stripe=self.stripe,
            spread=self.stripe is None and self.sharing.by_rows(self.rows * self.size),
        )
        return hidden, reads

    def decode(self, token, position, alive=None) -> tuple[jax.Array, list]:
        """Feed one token per sequence; return next-token logits and key counts."""
        alive = np.ones(self.rows, bool) if alive is None else alive
        how = {"config": self.config, "policy": self.policy, "stripe": self.stripe}
        self.cache, scores, reads = decode_token(self.params, self.cache, token, position, alive, **how)
        return scores, [reads]

    def enlarge(self, num_keys: int) -> None:
        """Make room for more keys."""
        self.num_keys = num_keys
        self.cache = enlarge(self.cache, num_keys=num_keys, stripe=self.stripe)
