"""Records that describe attention kernels: where a kernel runs, which calls it refuses, and its tunable configs."""

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from tessera.attention import work
from tessera.attention.contract import AttentionOut, AttentionSpec, Shapes

ROLES = ("dense", "score", "sparse")
PLATFORMS = ("cpu", "gpu", "tpu")
"""First words of the names of kernels that run on one platform only."""


@dataclass(frozen=True, kw_only=True)
class Capability:
    """Range of NVIDIA compute capabilities that a kernel runs on, both ends included; most=None means no limit."""

    name: str  # for error messages, e.g. "9.0 (Hopper)"
    least: float
    most: float | None = None

    def includes(self, here: str) -> bool:
        if not re.fullmatch(r"\d+\.\d+", here):  # JAX reports a name instead of numbers for another vendor's GPU
            return False
        return self.least <= float(here) and (self.most is None or float(here) <= self.most)


@dataclass(frozen=True, kw_only=True)
class NoConfig:
    """Config of a kernel without tunable options."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One implementation of one role on one platform.

    Attributes:
        name: unique name, "<family>_<role>", e.g. "xla_prefill_dense". The name also states the kernel's `platform`,
            `phase` and `role`.
        launch: (q_BTNH, key_values, spec, positions, selection, config) -> AttentionOut; works under jax.jit. The
            launch of a dense kernel is also differentiable in q, k and v (see `gradient`).
        supports: (spec, shapes) -> why the kernel cannot run this call of its role, phase and dtypes, or None; the
            field is None if it runs all such calls. Callers use `refusal`, which also checks the other fields.
        Config: frozen dataclass of block sizes and other tunable options; `search_space` yields them for the tuner.
        own_work: what `cost` returns, if the kernel does other work than `work` counts for its phase and role.
        executions: (spec, shapes, config) -> number of times that each named scope of the kernel's body runs in the
            whole call, plus "step" (grid steps) and "hbm_bytes" (bytes moved between main memory and on-chip memory),
            from which the time of a call can be estimated with its compiled schedule, without the chip.
        capability: compute capabilities that the kernel needs; None if it does not depend on them.
        library: vendor library that compiles the kernel, which it can do only on the kernel's own chip; None if XLA or
            Pallas compiles the kernel.
        automatic_limit: largest call, in scores (B * N * T * S), that takes the kernel without naming it.
        scaled, paged: whether the kernel also reads int8 keys and values with scales, or keys and values in pages.
    """

    name: str
    dtypes: tuple[str, ...]
    launch: Callable[..., AttentionOut]
    supports: Callable[[AttentionSpec, Shapes], str | None] | None = None
    Config: type = NoConfig
    default_config: Callable[[AttentionSpec, Shapes], Any] = lambda spec, shapes: NoConfig()
    search_space: Callable[[AttentionSpec, Shapes], Iterator[Any]] = lambda spec, shapes: iter((NoConfig(),))
    own_work: Callable[[AttentionSpec, Shapes], Mapping[str, float]] | None = None
    executions: Callable[[AttentionSpec, Shapes, Any], Mapping[str, float]] | None = None
    capability: Capability | None = None
    library: str | None = None
    automatic_limit: int | None = None
    scaled: bool = False
    paged: bool = False

    def __post_init__(self):
        if self.role not in ROLES:
            raise ValueError(f"name={self.name!r} must end in _{', _'.join(ROLES)}: a kernel's name states its role")

    @property
    def platform(self) -> str:
        """The name's first word if that is "cpu", "gpu" or "tpu"; else "any"."""
        first = self.name.partition("_")[0]
        return first if first in PLATFORMS else "any"

    @property
    def phase(self) -> str:
        """Either "decode" (only calls of one query row per sequence) or "prefill" (any number of rows)."""
        return "decode" if self.family.endswith("_decode") else "prefill"

    @property
    def role(self) -> str:
        """The name's last word: "dense", "score" or "sparse"."""
        return self.name.rpartition("_")[2]

    @property
    def family(self) -> str:
        """The kernel's name without its role, e.g. "xla_prefill"; a family has at most one kernel per role."""
        return self.name.rpartition("_")[0]

    @property
    def simulable(self) -> bool:
        """Whether the kernel can be compiled and simulated without its chip."""
        return self.library is None

    def is_named(self, backend: str) -> bool:
        return backend in (self.name, self.family)

    def runs_on(self, capability: str | None) -> bool:
        """Return whether a GPU of this compute capability runs the kernel; True if the capability is unknown (None)."""
        return self.capability is None or capability is None or self.capability.includes(capability)

    def cost(self, spec: AttentionSpec, shapes: Shapes) -> Mapping[str, float]:
        """Count the flops of a call and the bytes that it moves: {"flops": float, "bytes": float}."""
        if self.own_work is not None:
            return self.own_work(spec, shapes)
        if self.phase == "decode":
            return work.decode(self.role, spec, shapes)
        return (work.sparse_prefill if self.role == "sparse" else work.prefill)(spec, shapes)

    def refusal(
        self,
        spec: AttentionSpec,
        shapes: Shapes,
        *,
        platform: str | None = None,
        capability: str | None = None,
        automatic: bool = False,
    ) -> str | None:
        """Return why the kernel cannot run the call; None if it can.

        If platform ("cpu", "gpu" or "tpu") or capability (of the GPU) is None, it is not checked. An `automatic` call
        names no backend, so `automatic_limit` applies.
        """
        if self.role != (role := role_of(spec, shapes)):
            return f"its role is {self.role}, but the call's is {role}"
        if platform is not None and self.platform not in ("any", platform):
            return f"it runs on {self.platform}, but this call runs on {platform}"
        if not self.runs_on(capability):
            return f"it needs compute capability {self.capability.name}, but this GPU has {capability}"
        if self.phase == "decode" and shapes.num_queries != 1:
            return f"it takes one query row per sequence, but the call has {shapes.num_queries}"
        if spec.stripe is not None:
            return f"it reads keys in order of position, but the call's are dealt in stripes of {spec.stripe} positions"
        if shapes.paged and not self.paged:
            return "it reads contiguous keys, but the call's are paged"
        if shapes.scaled and not self.scaled:
            return "it reads keys in the queries' dtype, but the call's are int8"
        if shapes.dtype not in self.dtypes:
            return f"dtype {shapes.dtype} is not one of {', '.join(self.dtypes)}"
        limit, way_out = self.automatic_limit, f"name backend={self.family!r} to run it anyway"
        if automatic and limit is not None and shapes.num_scores > limit:
            return f"it would hold {shapes.num_scores} scores, more than {limit}; {way_out}"
        return None if self.supports is None else self.supports(spec, shapes)


def family(name: str, roles: Sequence[str], **fields: Any) -> tuple[Kernel, ...]:
    """Return one kernel per role, named "<name>_<role>", with the same fields."""
    return tuple(Kernel(name=f"{name}_{role}", **fields) for role in roles)


def role_of(spec: AttentionSpec, shapes: Shapes) -> str:
    """Return the role of a call: "sparse" if it has a selection, "score" if spec.mass is set, else "dense"."""
    if shapes.capacity is not None:
        return "sparse"
    return "score" if spec.mass else "dense"


def distinct(default: Any, axes: Mapping[str, Sequence], cut: Callable[[Any], Hashable]) -> Iterator[Any]:
    """Yield one config per way to cut the call into blocks: of configs with equal `cut`, the nearest to the default.

    The candidates are all combinations of the values in `axes` (by name of the field) and the default's own values. A
    field that does not affect the call (such as a block longer than all keys) stays at its default value, so a search
    that changes one field at a time still finds every cut.
    """

    def nearest_first(name: str) -> list:
        own = getattr(default, name)
        return sorted({own, *axes[name]}, key=lambda value: abs(value - own))

    seen = set()
    for values in product(*map(nearest_first, axes)):
        config = replace(default, **dict(zip(axes, values, strict=True)))
        made = cut(config)
        if made not in seen:
            seen.add(made)
            yield config
