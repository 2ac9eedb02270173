"""The corner of the causal mask in the TPU prefill kernels: small blocks, every row, and how often each scope runs.

Results are compared with the plain reference, which test_attention.py checks against the oracle; the oracle itself
would take minutes here.
"""

import collections
import functools
import sys

import calls
import jax
import numpy as np
import pytest

from tessera.attention import reference
from tessera.attention.contract import AttentionSpec
from tessera.attention.tpu import prefill as tpu_prefill
from tessera.attention.tpu import prefill_blocks
from tessera.attention.workloads import Workload

KERNELS = {kernel.role: kernel for kernel in tpu_prefill.KERNELS}
PLAIN = next(kernel for kernel in reference.KERNELS if kernel.role == "score")
LOAD = tpu_prefill.load
SMALL = tpu_prefill.Config(block_t=128, block_s=512, chunk=128, step=128)


def workload(name, num_queries, num_keys, *, heads=1, kv_heads=1, head_dim=64, tile=16, softcap=None, **positions):
    spec = AttentionSpec(tile=tile, query_tile=16, softcap=softcap)
    sizes = {"num_queries": num_queries, "num_keys": num_keys, "num_heads": heads, "num_kv_heads": kv_heads}
    batch = len(positions["q_start"])
    return Workload(name=name, spec=spec, batch=batch, head_dim=head_dim, tags=("test",), **sizes, **positions)


# Sequences aligned to row blocks at 0, 128 and 384; before key 0, aligned and not; past all keys; no keys; few keys.
PLACES = {"q_start": (0, 128, 384, -128, -100, 700, 0, 0), "kv_len": (256, 384, 640, 128, 156, 700, 0, 200)}
BANK = workload("bank", 256, 2304, q_start=(2048,), kv_len=(2304,))
CASES = {
    "places": (SMALL, workload("places", 256, 700, heads=2, **PLACES)),
    "pieces": (
        tpu_prefill.Config(block_t=1024, block_s=1024, chunk=256, step=512, state_in_vmem=True),
        workload("pieces", 1024, 1024, q_start=(0,), kv_len=(1024,), softcap=3.0),
    ),
    "turns of two blocks": (
        tpu_prefill.Config(block_t=512, block_s=1024, chunk=128, step=512, matrix_sums=False),
        workload("turns", 512, 1100, heads=2, head_dim=128, tile=128, q_start=(512, 588), kv_len=(1024, 1100)),
    ),
    "a later bank": (
        tpu_prefill.Config(block_t=256, block_s=512, chunk=128, step=256),
        BANK,
    ),
    "a later bank, state in VMEM": (
        tpu_prefill.Config(block_t=256, block_s=512, chunk=128, step=256, state_in_vmem=True),
        BANK,
    ),
}


@pytest.mark.parametrize(
    ("name", "role"),
    [  # dense cases with "bank" are exhaustive: only masses have banks
        *((name, "score") for name in CASES),
        *((name, "dense") for name in CASES if "bank" not in name),
        *(pytest.param(name, "dense", marks=pytest.mark.exhaustive) for name in CASES if "bank" in name),
    ],
)
def test_every_row_of_a_corner_is_the_references(name, role):
    config, case = CASES[name]
    assert prefill_blocks.cut_call(case.role_spec(role), case.shapes(role, "float32"), config).corner
    call = calls.make(case, role, "float32")
    result = calls.run(KERNELS[role], call, "float32", config)
    plain = calls.run(
        PLAIN, calls.make(case, "score", "float32"), "float32", PLAIN.Config()
    )  # its out and lse serve both roles
    assert np.array_equal(np.isneginf(result.lse), np.isneginf(plain.lse))
    seen = ~np.isneginf(plain.lse)
    assert np.abs(result.out - plain.out).max() <= 2e-5
    assert np.abs(result.lse[seen] - plain.lse[seen]).max() <= 2e-5
    if role == "score":
        assert np.abs(result.mass - plain.mass).max() <= 2e-4


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        pytest.param(SMALL, (512, 512), marks=pytest.mark.exhaustive),  # other cases run its scopes
        (SMALL, (300, 700)),
        (tpu_prefill.Config(block_t=512, block_s=1024, chunk=128, step=256), (1024, 2560)),
    ],
    ids=["aligned", "ragged", "several turns"],
)
def test_scopes_run_as_often_as_the_prediction_says(config, sizes, monkeypatch):
    """Count scopes inside the simulated kernel, where each scope calls `load`."""
    queries, keys = sizes
    case = workload("counted", queries, keys, q_start=(keys - queries,), kv_len=(keys,))
    ran = collections.Counter()

    def load(refs, rows, bank):
        frame = sys._getframe(1)
        name = {"step": frame.f_locals.get("name", "before_corner")}.get(frame.f_code.co_name, frame.f_code.co_name)
        if name != "update":
            jax.debug.callback(functools.partial(ran.update, [name]))
        return LOAD(refs, rows, bank)

    monkeypatch.setattr(tpu_prefill, "load", load)
    jax.clear_caches()
    calls.run(KERNELS["dense"], calls.make(case, "dense", "float32"), "float32", config)
    jax.effects_barrier()
    jax.clear_caches()
    said = prefill_blocks.executions(case.role_spec("dense"), case.shapes("dense", "float32"), config)
    names = ("full", "corner", "before_corner", "whole_step", "masked_step")
    assert {name: ran[name] for name in names} == {name: said.get(name, 0) for name in names}
