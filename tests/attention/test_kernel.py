"""The kernel record: every refusal that follows from its fields, and fields of the kernels in the table."""

from dataclasses import replace

import pytest

from tessera.attention.contract import AttentionSpec, Shapes
from tessera.attention.dispatch import KERNELS
from tessera.attention.kernel import Capability, Kernel

SPEC = AttentionSpec()
SHAPES = Shapes(1, 8, 8, 4, 2, 64, None, "bfloat16")
KERNEL = Kernel(name="gpu_family_dense", dtypes=("float32", "bfloat16"), launch=lambda *_: None)


def test_a_kernel_without_limits_takes_every_call_of_its_kind():
    assert KERNEL.refusal(SPEC, SHAPES) is None
    assert KERNEL.refusal(SPEC, SHAPES, platform="gpu", capability="9.0", automatic=True) is None
    assert KERNEL.refusal(SPEC, SHAPES._replace(num_queries=1)) is None  # a prefill kernel also takes one row


@pytest.mark.parametrize(
    ("fields", "spec", "shapes", "reason"),
    [
        ({}, {"mass": True}, {}, "its role is dense, but the call's is score"),
        ({}, {}, {"capacity": 3}, "its role is dense, but the call's is sparse"),
        ({"name": "gpu_decode_dense"}, {}, {}, "it takes one query row per sequence, but the call has 8"),
        ({}, {}, {"page": 64}, "it reads contiguous keys, but the call's are paged"),
        ({"scaled": True}, {}, {"page": 64, "scaled": True}, "it reads contiguous keys, but the call's are paged"),
        ({"paged": True}, {}, {"page": 64}, None),
        (
            {"paged": True},
            {},
            {"page": 64, "scaled": True},
            "it reads keys in the queries' dtype, but the call's are int8",
        ),
        ({}, {}, {"scaled": True}, "it reads keys in the queries' dtype, but the call's are int8"),
        ({"scaled": True}, {}, {"scaled": True}, None),
        ({}, {}, {"dtype": "int8"}, "dtype int8 is not one of float32, bfloat16"),
        ({"supports": lambda spec, shapes: f"tile={spec.tile}"}, {"tile": 16}, {}, "tile=16"),
    ],
)
def test_what_its_fields_exclude_is_refused(fields, spec, shapes, reason):
    kernel = replace(KERNEL, **fields)
    assert kernel.refusal(replace(SPEC, **spec), SHAPES._replace(**shapes)) == reason


def test_a_name_states_platform_phase_and_role():
    found = [(k.platform, k.phase, k.role) for k in (KERNEL, replace(KERNEL, name="xla_decode_score"))]
    assert found == [("gpu", "prefill", "dense"), ("any", "decode", "score")]
    with pytest.raises(ValueError, match="must end in _dense, _score, _sparse"):
        replace(KERNEL, name="gpu_family")


def test_its_own_limits_are_asked_last():
    """`supports` runs after the checks of the other fields, so it need not repeat them."""
    kernel = replace(KERNEL, supports=lambda spec, shapes: 1 / 0)
    assert "dtype int8" in kernel.refusal(SPEC, SHAPES._replace(dtype="int8"))


def test_a_platform_and_its_capability_matter_where_they_are_known():
    kernel = replace(KERNEL, capability=Capability(name="7.5 to 9.0", least=7.5, most=9.0))
    assert kernel.refusal(SPEC, SHAPES) is None
    assert kernel.refusal(SPEC, SHAPES, platform="tpu") == "it runs on gpu, but this call runs on tpu"
    assert replace(kernel, name="xla_family_dense").refusal(SPEC, SHAPES, platform="tpu") is None
    for here, runs in (("7.0", False), ("7.5", True), ("9.0", True), ("10.0", False), ("gfx942", False), (None, True)):
        reason = kernel.refusal(SPEC, SHAPES, platform="gpu", capability=here)
        assert reason == (None if runs else f"it needs compute capability 7.5 to 9.0, but this GPU has {here}")


def test_an_automatic_limit_binds_only_calls_that_name_no_kernel():
    kernel = replace(KERNEL, automatic_limit=4 * 8 * 8)
    assert kernel.refusal(SPEC, SHAPES, automatic=True) is None
    longer = SHAPES._replace(num_keys=9)
    reason = "it would hold 288 scores, more than 256; name backend='gpu_family' to run it anyway"
    assert kernel.refusal(SPEC, longer, automatic=True) == reason
    assert kernel.refusal(SPEC, longer) is None


def test_the_table_says_what_only_its_chip_runs():
    assert [kernel.name for kernel in KERNELS if not kernel.simulable] == ["gpu_cudnn_dense"]
    assert all((kernel.capability is not None) == (kernel.platform == "gpu") for kernel in KERNELS)
    assert {kernel.family for kernel in KERNELS if kernel.automatic_limit is not None} == {"reference"}
