"""Interface of a sparse attention policy, which computes the attention of every layer."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from jax import Array
from jaxtyping import Float

from tessera.attention.contract import AttentionSpec, KeyValues, Positions, Shapes


class Reads(NamedTuple):
    """Key counts of one forward call, per layer and sequence.

    Attributes:
        read: key positions read, summed over query rows and KV heads.
        visible: key positions that a dense pass would have read, summed in the same way.
    """

    read: Float[Array, "L B"]
    visible: Float[Array, "L B"]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Decides, layer by layer, which keys attention reads. Subclasses are frozen and hashable, hence static under jit.

    `layer` is a Python int when layers are unrolled and a traced int32 under `lax.scan`; a policy must support both.
    The state is an ordinary pytree that lives for one forward call; a policy keeps no other memory.
    """

    @property
    def name(self) -> str:
        """Name by which users choose the policy."""
        raise NotImplementedError

    @property
    def query_tile(self) -> int:
        """Number of query positions that share a selection. Prompts are cut into chunks at its multiples.

        A subclass may make it a field.
        """
        return 1

    @property
    def layers_alike(self) -> bool:
        """Whether `attend` and `observe` compute the same for every layer, and use `layer` only to index their state.

        Unrolled layers then share one trace, in which `layer` is an array.
        """
        return False

    def init_state(self, num_layers: int, shapes: Shapes, spec: AttentionSpec) -> Any:
        """Return the state before layer 0 of one forward call."""
        raise NotImplementedError

    def attend(
        self, layer: int | Array, q: Array, kv: KeyValues, spec: AttentionSpec, positions: Positions, state: Any
    ) -> tuple[Float[Array, "B T N H"], Any]:
        """Compute one layer's attention of queries [B,T,N,H] to the layer's whole cache; return output and state.

        Change `spec` only by dataclasses.replace, since it carries the model's window and the mesh's stripe. Keys may
        be int8 (`kv.scales`), which matters only to a policy that reads `kv.k` itself.
        """
        raise NotImplementedError

    def observe(self, layer: int | Array, x: Array, y: Array, positions: Positions, state: Any) -> Any:
        """Return the state, updated with the residual stream before (x) and after (y) the attention block.

        Only policies that record statistics override this (`recording.py`).
        """
        return state

    def reads(self, state: Any) -> Reads | None:
        """Return the key counts of the call; None if the policy does not count, as in training."""
        return None

    def at_position(self, position: int, unit: int) -> "Policy":
        """Return the policy under which a prefill runs the token at a position; by default, this policy.

        It depends on neither the length of the prompt nor what follows the token: sequences that begin alike share
        keys. It changes only at multiples of `unit`.
        """
        return self

    def decode_at(self, position: int, unit: int) -> "Policy":
        """Return the policy under which a decode step feeds the token at a position; by default, as `at_position`."""
        return self.at_position(position, unit)
