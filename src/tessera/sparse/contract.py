"""Interface of a sparse attention policy, which owns every layer's attention call."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from jax import Array
from jaxtyping import Float

from tessera.attention.contract import AttentionSpec, KeyValues, Positions, Shapes


class Reads(NamedTuple):
    """How much of the visible context one forward call read, per layer and sequence.

    Attributes:
        read: key positions read, summed over query rows and KV heads.
        visible: key positions a dense pass would have read, same sum.
    """

    read: Float[Array, "L B"]
    visible: Float[Array, "L B"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Decides, layer by layer, what attention reads. Subclasses are frozen and hashable: they are static under jit.

    `layer` is a Python int when layers are unrolled and a traced int32 under `lax.scan`; a policy supports both.
    State is an ordinary pytree that lives for one forward call; a policy keeps no other memory.
    """

    @property
    def name(self) -> str:
        """Name by which users choose the policy."""
        raise NotImplementedError

    @property
    def query_tile(self) -> int:
        """Query positions that share a selection; prompts are cut at multiples of it. A field may replace it."""
        return 1

    def init_state(self, num_layers: int, shapes: Shapes, spec: AttentionSpec) -> Any:
        """State before layer 0 of one forward call."""
        raise NotImplementedError

    def attend(
        self, layer: int | Array, q: Array, kv: KeyValues, spec: AttentionSpec, positions: Positions, state: Any
    ) -> tuple[Float[Array, "B T N H"], Any]:
        """Attend in one layer: queries [B,T,N,H] and the whole cache of the layer -> output and new state."""
        raise NotImplementedError

    def observe(self, layer: int | Array, x: Array, y: Array, positions: Positions, state: Any) -> Any:
        """See the residual stream before (x) and after (y) the attention block; recorders override this."""
        return state

    def reads(self, state: Any) -> Reads | None:
        """Return how much the call read; None if the policy does not count (training)."""
        return None

    def at_length(self, num_tokens: int) -> "Policy":
        """Return the policy that serves a request that caches `num_tokens`; by default, itself.

        Prompt and answer count, also the part of `max_new_tokens` that is never generated, but not the last token,
        which is never fed back. A request thus keeps one policy from its first token on.
        """
        return self
