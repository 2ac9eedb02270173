"""The last token of every row of a lane, and masks of the tokens in the rows' prompts and answers, on the device."""

from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Bool, Int32

from tessera.core.mesh import keep, program, put
from tessera.runtime.sampling import Choice, Method


class LastTokens:
    """Arrays that the next decode step takes from the steps before it.

    Args:
        rows: number of rows.
        vocab_size: tokens in the vocabulary.
        mesh: mesh of the model's weights.

    Attributes:
        token: last token of every row.
        seen: mask [rows,V] of the tokens in each row's prompt and answer; None until a request with a penalty needs it.
    """

    def __init__(self, rows: int, vocab_size: int, mesh: Mesh | None):
        self.mesh, self.vocab_size = mesh, vocab_size
        self.token = put(np.zeros(rows, np.int32), mesh)
        self.seen: Array | None = None

    def set(self, choice: Choice) -> None:
        """Replace all rows."""
        self.token, self.seen = choice.token, choice.seen

    def place(self, row: int, token: Int32[Array, "1"], seen: Bool[Array, "1 V"] | None) -> None:
        """Replace one row."""
        self.token = set_row(self.token, token, np.int32(row))
        if seen is not None:
            if self.seen is None:
                self.seen = put(np.zeros((len(self.token), self.vocab_size), bool), self.mesh)
            self.seen = set_row(self.seen, seen, np.int32(row))

    def take(self, rows: Int32[np.ndarray, "B"], *, seen: bool) -> tuple[Int32[Array, "B"], Bool[Array, "B V"] | None]:
        """Return the last tokens of `rows`, and the rows' masks of seen tokens, which are None if `seen` is false.

        An index past the last row is padding.
        """
        return take_rows(self.token, rows), take_rows(self.seen, rows) if seen else None

    def update(self, rows: Int32[np.ndarray, "B"], choice: Choice) -> None:
        """Replace some rows; an index past the last row is padding."""
        self.token = set_rows(self.token, choice.token, rows)
        if choice.seen is not None:
            self.seen = set_rows(self.seen, choice.seen, rows)

    def warm(self, methods: Iterable[Method], batches: Sequence[int] = ()) -> int:
        """Run every program once; return the number of programs. `take` and `update` run for each size in `batches`."""
        rows = len(self.token)
        arrays = [np.zeros(rows, np.int32)]
        if any(method.penalised for method in methods):
            arrays.append(np.zeros((rows, self.vocab_size), bool))
        for array in arrays:
            whole = put(array, self.mesh)
            jax.block_until_ready(set_row(whole, put(array[:1], self.mesh), np.int32(0)))
            for batch in batches:
                padding = np.full(batch, rows, np.int32)
                jax.block_until_ready(set_rows(whole, take_rows(whole, padding), padding))
        return len(arrays) * (1 + 2 * len(batches))


@program()
def set_row(array: Array, new: Array, row: Int32[Array, ""]) -> Array:
    """Return the array with one row replaced by the only row of `new`; steps in flight still read the old array."""
    return keep(array.at[row].set(new[0]))


@program()
def take_rows(array: Array, rows: Int32[Array, "B"]) -> Array:
    """Return rows of an array; an index past the last row returns the last row."""
    return keep(array.at[rows].get(mode="clip"))


@program()
def set_rows(array: Array, new: Array, rows: Int32[Array, "B"]) -> Array:
    """Return the array with rows `rows` replaced by `new`; an index past the last row changes nothing."""
    return keep(array.at[rows].set(new, mode="drop"))
