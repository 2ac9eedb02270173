"""The GPU script's check of gathered rows in shared memory: it finds a planted misplacement and names the slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab.gpu import layout
from tessera.attention.gpu import keys as gpu_keys
from tessera.attention.gpu import sparse_rows


def test_a_wrong_place_of_gathered_rows_is_seen_and_named(monkeypatch):
    """The planted fault swaps neighbouring rows of K, as a wrong swizzle of row numbers would."""

    def copy_rows(refs, item, first, slot, cut):
        last = sparse_rows.read(refs, item, "end") - 1
        listed = lambda row: refs.tiles[item.b, item.h, item.i, jnp.minimum(first + row, last)]  # noqa: E731

        def copy_row(row, _):
            refs.k_smem[slot, row] = refs.k[item.b, item.h, listed(row ^ 1)]
            refs.v_smem[slot, row] = refs.v[item.b, item.h, listed(row)]
            refs.ids[slot, row] = listed(row)

        jax.lax.fori_loop(0, cut.block_s, copy_row, None)

    monkeypatch.setattr(gpu_keys, "copy_rows", copy_rows)
    (kernel,) = gpu_keys.KERNELS
    config = gpu_keys.Config(rows=64, block_s=64, stages=3)
    said = "128 of 128 slots are misplaced; .*; tile 0 slot 0 gives slot 1's values; tile 0 slot 1 gives"
    with pytest.raises(ValueError, match=said):
        layout.look(kernel, 64, config, 1, 1)


def test_misplaced_columns_of_values_belong_to_no_slot():
    values = np.arange(128 * 64, dtype=np.float32).reshape(128, 64)
    assert layout.strangers(0, values, values, 1) == []
    swapped = values.copy()
    swapped[9] = np.roll(values[9], layout.COLUMN)
    assert layout.strangers(0, swapped, values, 1) == ["tile 0 slot 9 gives values of no slot"]
