"""The record of a kernel: what it is, which calls it refuses and why; the configs that its tuner may try."""

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from tessera.attention.contract import AttentionOut, AttentionSpec, Shapes


@dataclass(frozen=True, kw_only=True)
class Capability:
    """Compute capabilities of NVIDIA GPUs that a kernel runs on.

    Attributes:
        name: words for a refusal, e.g. "9.0 (Hopper)".
        least, most: lowest and highest capability; no highest if None.
    """

    name: str
    least: float
    most: float | None = None

    def includes(self, here: str) -> bool:
        """Whether a GPU of capability `here` runs the kernel."""
        if not re.fullmatch(r"\d+\.\d+", here):  # another vendor's GPU has a name there
            return False
        return self.least <= float(here) and (self.most is None or float(here) <= self.most)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One implementation of one role on one platform.

    Attributes:
        name: unique, family and role, e.g. "xla_prefill_dense".
        platform: "any", "cpu", "tpu" or "gpu".
        role: "dense", "score" or "sparse".
        phase: "prefill" or "decode" (one query row per sequence).
        dtypes: names of the q/k/v dtypes it takes.
        supports: (spec, shapes) -> None, or why the kernel cannot run a call of its role, phase and dtypes; None if it
            runs them all. Callers ask `refusal`, which checks the other fields too.
        launch: (q_BTNH, key_values, spec, positions, selection, config) -> AttentionOut; jit-able.
        Config: frozen dataclass of block sizes.
        default_config: (spec, shapes) -> Config.
        search_space: (spec, shapes) -> iterator of Config, for the tuner.
        cost: (spec, shapes) -> {"flops": float, "bytes": float}.
        executions: (spec, shapes, config) -> how often each named scope of the kernel's body runs in the whole call,
            with "step" (grid steps) and "hbm_bytes" (bytes moved between main memory and on-chip memory). Turns a
            compiled schedule into a time without the chip; None if no schedule is read.
        capability: GPUs that it runs on; None if they do not matter.
        library: vendor's library that compiles it, only on its chip; None if XLA or Pallas does.
        automatic_limit: most scores (B N T S) of a call that does not name it; None for no limit.
        scaled: whether it also reads int8 keys and values with scales.
    """

    name: str
    platform: str
    role: str
    phase: str
    dtypes: tuple[str, ...]
    launch: Callable[..., AttentionOut]
    Config: type
    default_config: Callable[[AttentionSpec, Shapes], Any]
    search_space: Callable[[AttentionSpec, Shapes], Iterator[Any]]
    cost: Callable[[AttentionSpec, Shapes], Mapping[str, float]]
    supports: Callable[[AttentionSpec, Shapes], str | None] | None = None
    executions: Callable[[AttentionSpec, Shapes, Any], Mapping[str, float]] | None = None
    capability: Capability | None = None
    library: str | None = None
    automatic_limit: int | None = None
    scaled: bool = False

    @property
    def family(self) -> str:
        """The name without the role, which names the kernels of all roles."""
        return self.name.rpartition("_")[0]

    @property
    def simulable(self) -> bool:
        """Whether it can be compiled, and simulated, without its chip."""
        return self.library is None

    def is_named(self, backend: str) -> bool:
        """Whether the backend is the kernel's name or its family."""
        return backend in (self.name, self.family)

    def runs_on(self, capability: str | None) -> bool:
        """Whether a GPU of this compute capability runs it; True if that is unknown (None) or does not matter."""
        return self.capability is None or capability is None or self.capability.includes(capability)

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

        Args:
            spec, shapes: the call.
            platform: where it would run: "cpu", "gpu" or "tpu"; None where the kernel's chip is.
            capability: compute capability of that GPU; None if unknown, or without a GPU.
            automatic: the call names no kernel.
        """
        if self.role != (role := role_of(spec, shapes)):
            return f"its role is {self.role}, the call's is {role}"
        if platform is not None and self.platform not in ("any", platform):
            return f"it runs on {self.platform}, this is {platform}"
        if not self.runs_on(capability):
            return f"it needs compute capability {self.capability.name}, this GPU has {capability}"
        if self.phase == "decode" and shapes.num_queries != 1:
            return f"it takes one query row per sequence, the call has {shapes.num_queries}"
        if shapes.paged:
            return "it reads contiguous keys, the call's are paged"
        if shapes.scaled and not self.scaled:
            return "it reads keys in the queries' dtype, the call's are int8"
        if shapes.dtype not in self.dtypes:
            return f"dtype {shapes.dtype} is not one of {', '.join(self.dtypes)}"
        limit, way_out = self.automatic_limit, f"name backend={self.family!r} to run it anyway"
        if automatic and limit is not None and shapes.num_scores > limit:
            return f"it would hold {shapes.num_scores} scores, more than {limit}; {way_out}"
        return None if self.supports is None else self.supports(spec, shapes)


def role_of(spec: AttentionSpec, shapes: Shapes) -> str:
    """Return the role of a call: sparse with a selection, score with spec.mass, else dense."""
    if shapes.capacity is not None:
        return "sparse"
    return "score" if spec.mass else "dense"


def distinct(default: Any, axes: Mapping[str, Sequence], cut: Callable[[Any], Hashable]) -> Iterator[Any]:
    """Yield configs of the axes' values and the default's own; of configs that cut alike, the nearest to the default.

    An axis that does not affect the call (a block longer than all keys) therefore stays at the default, and a search
    that changes one field at a time still finds every way to cut.

    Args:
        default: a config (a dataclass).
        axes: field -> values.
        cut: config -> how the kernel cuts the call with it.
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
