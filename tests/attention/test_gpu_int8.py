"""Hopper kernels on int8 keys and values: right at ugly places, no more bytes than promised, refusals with a reason."""

import dataclasses
import functools

import calls
import numpy as np
import pytest

from tessera.attention import oracle
from tessera.attention.contract import AttentionSpec, Shapes
from tessera.attention.dispatch import KERNELS, choose
from tessera.attention.workloads import Workload
from tessera.deviceless import inspection
from tessera.deviceless.compiler import attention_program
from tessera.deviceless.gpu import compiler as gpu
from tessera.deviceless.gpu import gates

NAMED = {kernel.name: kernel for kernel in KERNELS}
LENGTHS = (300, 0, 1, 63, 65, 128)
DECODE = Workload(
    name="int8_every_border",
    batch=len(LENGTHS),
    num_queries=1,
    num_keys=300,
    num_heads=2,
    num_kv_heads=2,
    head_dim=64,
    dtype="bfloat16",
    spec=AttentionSpec(tile=16),
    fraction=0.6,
    scaled=True,
    q_start=tuple(max(n - 1, 0) for n in LENGTHS),
    kv_len=LENGTHS,
    q_len=(1, 1, 1, 1, 1, 0),
    tags=("int8", "decode"),
)
LONG = dataclasses.replace(
    DECODE, batch=1, num_keys=460, num_heads=8, q_start=(449,), kv_len=(450,), q_len=(1,), spec=AttentionSpec(tile=64)
)
ONE_ROW = dataclasses.replace(
    DECODE, num_queries=9, num_heads=4, spec=AttentionSpec(tile=32, query_tile=16), tags=("int8", "prefill")
)
# name -> kernel, workload, config beyond two stages of 64 keys and, in decode, two splits; None: the smallest
CASES = {
    "sparse, G of 1, short tiles": ("gpu_decode_sparse", DECODE, {}),
    "score, G of 3, cap": (
        "gpu_decode_score",
        dataclasses.replace(DECODE, num_heads=6, spec=AttentionSpec(tile=16, softcap=2.0)),
        {},
    ),
    "dense, G of 4, more blocks than stages": ("gpu_decode_dense", LONG, {"splits": 1}),
    "sparse, blocks of 128": ("gpu_decode_sparse", LONG, {"block_s": 128}),
    "prefill, up to one valid row": ("gpu_prefill_dense", ONE_ROW, None),
    "sparse prefill, G of 3, cap": (
        "gpu_prefill_sparse",
        dataclasses.replace(ONE_ROW, num_heads=6, spec=AttentionSpec(tile=64, query_tile=16, softcap=2.0)),
        None,
    ),
    "sparse prefill, two tiles a block": (
        "gpu_prefill_sparse",
        dataclasses.replace(
            ONE_ROW,
            num_queries=40,
            batch=1,
            q_start=(251,),
            kv_len=(290,),
            q_len=(39,),
            fraction=0.9,
            spec=AttentionSpec(tile=64, query_tile=32, window=200),
        ),
        {"rows": 64, "block_s": 128, "stages": 2},
    ),
}
FAULTS = {
    "scales of keys and values swapped": lambda x: x[:, :, ::-1],
    "another head's scales": lambda x: x[:, ::-1],
    "the keys' scales for values": lambda x: x[:, :, [0, 0]],
    "the values' scales for keys": lambda x: x[:, :, [1, 1]],
    "the next key's scales": lambda x: np.roll(x, 1, 3),
}


@functools.cache
def truth(name: str) -> tuple[oracle.Call, oracle.Answer, oracle.Answer]:
    """Return a case's call, answer and tolerance.

    Every scale past kv_len is NaN. Every seventh one is 0: such a key has score 0, whatever its int8 row holds.
    """
    kernel, workload, _ = CASES[name]
    call = calls.make(workload, NAMED[kernel].role, "bfloat16")
    scales = call.scales.copy()
    scales[..., 5::7] *= 0
    call = call._replace(scales=scales)
    answer = oracle.attend(call)
    return call, answer, oracle.tolerance(call, answer, "bfloat16", **calls.roundings(NAMED[kernel]))


def excess(name: str, fault=None) -> float:
    """Run a case, with wrong scales if given; return its largest error in tolerances, by the right scales."""
    (kernel, _, sizes), (call, true, allowed) = CASES[name], truth(name)
    kernel = NAMED[kernel]
    least = {"block_s": 64, "stages": 2} | ({"splits": 2} if kernel.phase == "decode" else {})
    config = None if sizes is None else kernel.Config(**(least | sizes))
    if fault is not None:
        wrong = fault(call.scales)
        call = call._replace(scales=np.where(np.isnan(call.scales) | np.isnan(wrong), call.scales, wrong))
    found = calls.run(kernel, call, "bfloat16", config)
    empty = np.isinf(true.lse)
    assert np.all(found.out[empty] == 0)
    assert np.array_equal(np.isneginf(found.lse), empty)
    errors = [np.abs(found.out - true.out).max() / allowed.out]
    errors.append(np.abs(found.lse[~empty] - true.lse[~empty]).max() / allowed.lse)
    if kernel.role == "score":
        errors.append(np.abs(found.mass - true.mass).max() / allowed.mass)
    return max(errors)


REPEATED = {"sparse, blocks of 128"}
"""Exhaustive only: the catalogue's calls and the other cases cover all but the width of the block."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.exhaustive] if n in REPEATED else []) for n in CASES]
)
def test_int8_keys_meet_the_oracle(name):
    assert excess(name) <= 1


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_scales_miss_the_oracle(fault):
    """The oracle can tell which scale belongs to which number. This call is compiled already."""
    assert excess("sparse, G of 1, short tiles", FAULTS[fault]) > 2


SHAPES = Shapes(4, 1, 131072, 32, 8, 128, None, "bfloat16", scaled=True)


def shapes_of(role: str, **change) -> Shapes:
    return SHAPES._replace(**({"capacity": 820} if role == "sparse" else {}) | change)


@pytest.mark.parametrize("role", ["dense", "score", "sparse"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_decode_takes_int8_keys_and_half_the_bytes(role, head_dim):
    spec, shapes = AttentionSpec(tile=16, mass=role == "score"), shapes_of(role, head_dim=head_dim)
    kernel = choose(spec, shapes, platform="gpu", capability="9.0")
    assert kernel.name == f"gpu_decode_{role}"
    wide = kernel.cost(spec, shapes._replace(scaled=False))["bytes"]
    assert 0.5 < kernel.cost(spec, shapes)["bytes"] / wide <= 0.52
    space = list(kernel.search_space(spec, shapes))
    assert kernel.default_config(spec, shapes) in space


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("gpu_decode_dense", {"dtype": "float16"}, "dtype=float16"),
        (
            "gpu_decode_score",
            {"head_dim": 256},
            "tile=16 must be at least 64 at head_dim=256 with int8 keys",
        ),
        ("gpu_prefill_dense", {"num_queries": 512, "dtype": "float16"}, "dtype=float16"),
        ("gpu_prefill_score", {"num_queries": 512, "head_dim": 256}, "head_dim=256 must be at most 128 with int8 keys"),
        ("gpu_prefill_sparse", {"num_queries": 512}, "tile=16 must be at least 64 with int8 keys"),
        (
            "gpu_prefill_sparse",
            {"num_queries": 512, "head_dim": 256},
            "head_dim=256 must be at most 128 with int8 keys",
        ),
    ],
)
def test_what_int8_keys_are_refused_is_said(name, change, reason):
    """The portable kernels run such calls."""
    kernel = NAMED[name]
    spec, shapes = AttentionSpec(tile=16, mass=kernel.role == "score"), shapes_of(kernel.role, **change)
    assert reason in kernel.refusal(spec, shapes)
    assert choose(spec, shapes, platform="gpu", capability="9.0").platform == "any"


@pytest.mark.parametrize(
    ("role", "phase", "tile"),
    [
        ("sparse", "decode", 16),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (("dense", "decode", 128), ("score", "decode", 16), ("dense", "prefill", 128),
                         ("score", "prefill", 16))
        ),
    ],
)  # fmt: skip
def test_kernels_compile_on_int8_keys_without_spills(role, phase, tile):
    """The cache, as stored, is nearly all that the program holds: no converted copy of it."""
    length = 32768 if phase == "decode" else 8192
    spec, shapes = inspection.call(
        role=role, phase=phase, batch=2, length=length, heads=8, kv_heads=2, head_dim=128, dtype="bfloat16",
        spec=AttentionSpec(tile=tile), fraction=0.1,
    )  # fmt: skip
    found = gpu.compile_for("h200", attention_program(f"gpu_{phase}_{role}", spec, shapes._replace(scaled=True)))
    assert found.error is None
    assert gates.broken_program(found.kernels) == []
    cache = 2 * 2 * 2 * length * (128 + 2)
    if phase == "decode":
        assert cache <= found.hbm_bytes < 1.1 * cache
