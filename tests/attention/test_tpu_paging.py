"""Keys and values in pages on a simulated TPU: the oracle's answer and, bit for bit, that of contiguous keys."""

import dataclasses
import itertools

import calls
import paged_calls
import pytest

from tessera.attention.contract import AttentionSpec, Shapes
from tessera.attention.dispatch import KERNELS
from tessera.attention.tpu import decode_blocks

PAGED = {kernel.name: kernel for kernel in KERNELS if kernel.platform == "tpu" and kernel.paged}
WIDE = {"lengths": (514, 260, 0), "num_keys": 768}
"""Three pages of 256 keys, which hold several copies each."""
MANY = {"fraction": 0.8}
"""So many listed tiles that every head of every sequence sees some."""
CELLS = (
    ("tpu_decode_dense", "float32", 3, 64, {"head_dim": 128, "lengths": (390, 140, 90)}),
    ("tpu_decode_score", "int8", 1, 256, {"head_dim": 64, **WIDE}),
    ("tpu_decode_sparse", "float32", 4, 128, {"head_dim": 64, "window": 150, **MANY}),  # several tiles to a copy
    ("tpu_decode_sparse", "float32", 1, 64, {"head_dim": 128, **MANY}),
    ("tpu_prefill_dense", "int8", 4, 256, {"head_dim": 128, **WIDE}),
    ("tpu_prefill_score", "float32", 3, 64, {"head_dim": 128}),
    ("tpu_prefill_sparse", "float32", 1, 128, {"head_dim": 128, "window": 150, **MANY}),
)
"""Kernel, type of keys, G, page and other options of the calls that always run."""
BOTH_WAYS = ("tpu_decode_dense",)
"""Kernels whose calls in CELLS run on contiguous keys, too; the exhaustive cells run all both ways."""


def more_cells():
    """Yield every kernel with each type of keys, G, page and head dim that it takes; all are exhaustive."""
    for name, keys, groups, page, dim in itertools.product(PAGED, ("float32", "int8"), (1, 3, 4), (64, 128), (64, 128)):
        if (keys == "int8" and page < 128) or ("prefill" in name and dim < 128):
            continue
        tile = 128 if name == "tpu_prefill_sparse" and keys == "int8" else 16
        yield name, keys, groups, page, {"head_dim": dim, "tile": tile, **MANY}


def config(kernel):
    """Return blocks of 128 or 256 keys, so that sequences have several; score copies both KV heads at once."""
    small = calls.small_config(kernel)
    if kernel.phase == "prefill":
        return small
    block_s, heads = (256 if kernel.role == "dense" else 128), (2 if kernel.role == "score" else 1)
    return dataclasses.replace(small, block_s=block_s, block_heads=heads, splits=1)


def draw(kernel, keys: str, groups: int, options: dict):
    role = "sparse" if kernel.role == "sparse" else "dense"
    return paged_calls.draw(role, kernel.phase, keys, groups, **options)


@pytest.mark.parametrize(("name", "keys", "groups", "page", "options"), CELLS)
def test_pages_meet_the_oracle(monkeypatch, name, keys, groups, page, options):
    monkeypatch.setattr(decode_blocks, "TILES_AT_ONCE", 2)  # so that a whole block takes several runs of copies
    kernel = PAGED[name]
    call = draw(kernel, keys, groups, options)
    found = paged_calls.run(kernel, call, paged_calls.paged(call, page, shuffled=True), config(kernel))
    paged_calls.check_against_oracle(call, found, kernel)
    if name in BOTH_WAYS:
        whole = paged_calls.run(kernel, call, paged_calls.contiguous(call), config(kernel))
        assert [x.tobytes() for x in found] == [x.tobytes() for x in whole]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "keys", "groups", "page", "options"), list(more_cells()))
def test_pages_equal_contiguous_keys_bit_for_bit(name, keys, groups, page, options):
    kernel = PAGED[name]
    call = draw(kernel, keys, groups, options)
    whole = paged_calls.run(kernel, call, paged_calls.contiguous(call), config(kernel))
    for shuffled in (False, True):
        found = paged_calls.run(kernel, call, paged_calls.paged(call, page, shuffled=shuffled), config(kernel))
        assert [x.tobytes() for x in found] == [x.tobytes() for x in whole]


@pytest.mark.parametrize("name", PAGED)
def test_page_sizes_that_no_copy_could_bring_are_refused(name):
    kernel = PAGED[name]
    spec = AttentionSpec(tile=128 if kernel.role == "sparse" else 16, mass=kernel.role == "score")
    sizes = (1, 1, 1 << 14, 8, 2, 128, 3 if kernel.role == "sparse" else None, "bfloat16")
    for page, scaled, num_keys, reason in (
        (128, False, 1 << 20, None),
        (128, True, 1 << 20, None),
        (96, False, 96 << 4, "page size 96 must be a power of two of at least 16"),
        (8, False, 1 << 10, "page size 8 must be a power of two of at least 16"),
        (64, True, 1 << 10, "page size 64 must be a power of two of at least 128 with int8 keys"),
        (16, False, 1 << 19, "a table of 32768 pages is longer than the 16384 that fit in SMEM: use larger pages"),
    ):
        shapes = Shapes(*sizes, page, scaled)._replace(num_keys=num_keys)
        if kernel.name != "tpu_prefill_score" or num_keys < 1 << 19:  # its masses of a long context do not fit VMEM
            assert kernel.refusal(spec, shapes) == reason


def test_prefill_refuses_pages_that_xla_would_copy():
    """With 64 elements per key, a TPU stores a page keys-last: only decode reads that layout."""
    for kernel in PAGED.values():
        capacity = 3 if kernel.role == "sparse" else None
        shapes = Shapes(1, 1, 1 << 14, 8, 2, 64, capacity, "bfloat16", 128)
        reason = kernel.refusal(AttentionSpec(mass=kernel.role == "score"), shapes)
        assert (reason is None) == (kernel.phase == "decode")
        assert reason is None or "head_dim=64 must be a multiple of 128 for keys in pages" in reason


def test_the_table_counts_in_smem():
    """A list that just fits contiguous keys leaves no room for a table."""
    kernel = PAGED["tpu_prefill_sparse"]
    spec, shapes = AttentionSpec(tile=16), Shapes(1, 64, 1 << 20, 8, 2, 128, 63000, "bfloat16")
    assert kernel.refusal(spec, shapes) is None
    assert "a list takes" in kernel.refusal(spec, shapes._replace(page=128))
