"""Estimate the cost of a configuration before anything runs, from the work that its blocks do.

    seconds = scores x 4 H / RATE + steps x STEP_S          (H: head dim; 4 H flops per score)

The estimate counts the scores of whole blocks, so a large block wastes more above the diagonal and at the ends of
lists, while a small block takes more steps. Only the order of the estimates is used, so RATE and STEP_S need not be
exact: they set how many scores cost as much as one step. The model ignores caches. Its ranking is wrong on a CPU, so
the tuner does not use it there. The record of every search holds the rank correlation of estimates and times.
"""

from typing import Any

import numpy as np

from tessera.attention.contract import AttentionSpec, Shapes
from tessera.attention.kernel import Kernel
from tessera.core.shapes import ceil_div, round_up

RATE = 1e11
"""Assumed flops per second. Only its ratio to STEP_S matters."""
STEP_S = 2e-6
"""Assumed seconds per iteration of a kernel's loop. Only its ratio to RATE matters."""


def estimate(kernel: Kernel, spec: AttentionSpec, shapes: Shapes, config: Any) -> float:
    """Estimate seconds, accurately enough to rank configurations of one kernel on one call."""
    s = shapes
    groups = s.num_heads // s.num_kv_heads
    block_s = getattr(config, "block_s", 512)
    if kernel.phase == "decode":
        keys = round_up(s.num_keys if s.capacity is None else s.capacity * spec.tile, block_s)
        scores, steps = keys * groups, keys // block_s
    elif s.capacity is not None:
        tokens = spec.query_tile
        keys = round_up(s.capacity * spec.tile, block_s) + getattr(config, "mask_s", 0)
        lists = ceil_div(s.num_queries, tokens)
        scores, steps = lists * tokens * groups * keys, lists * ceil_div(keys, block_s)
    else:
        block_t = min(getattr(config, "block_t", 256), s.num_queries)
        first = np.arange(0, s.num_queries, block_t)
        end = np.minimum(first + block_t, s.num_queries) + s.num_keys - s.num_queries
        seen = np.full_like(end, s.num_keys) if not spec.causal else end
        keys = -(-seen // block_s) * block_s
        scores, steps = int(keys.sum()) * block_t * groups, int((keys // block_s).sum())
    parts = s.batch * s.num_kv_heads
    return parts * (4 * s.head_dim * scores / RATE + steps * STEP_S)
