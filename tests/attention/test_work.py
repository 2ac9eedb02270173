"""Counts of work against a mask that is written out."""

import numpy as np
import pytest

from tessera.attention import work
from tessera.attention.contract import AttentionSpec, Shapes


@pytest.mark.parametrize(("num_queries", "num_keys"), [(8, 8), (3, 8), (8, 3)])
@pytest.mark.parametrize("causal", [True, False])
def test_flops_count_the_pairs_of_the_mask(num_queries, num_keys, causal):
    """The queries are the last positions: with more queries than keys, the first ones see no key if causal."""
    position = np.arange(num_queries)[:, None] + num_keys - num_queries
    visible = np.arange(num_keys) <= position if causal else np.ones((num_queries, num_keys), bool)
    counted = work.prefill(AttentionSpec(causal=causal), Shapes(2, num_queries, num_keys, 4, 2, 16, None, "float32"))
    assert counted["flops"] == 4 * 2 * 4 * 16 * visible.sum()
