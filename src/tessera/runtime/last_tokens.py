"""The last token of every row of a lane, and counts of the tokens in the rows' prompts and answers, on the device."""

from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Int32

from tessera.core.mesh import keep, program, put
from tessera.runtime.sampling import Choice, Method


class LastTokens:
    """Arrays that the next decode step takes from the steps before; `counts` is None until a request has a penalty."""

    def __init__(self, rows: int, vocab_size: int, mesh: Mesh | None):
        self.mesh, self.vocab_size = mesh, vocab_size
        self.token = put(np.zeros(rows, np.int32), mesh)
        self.counts: Array | None = None

    def place(self, row: int, token: Int32[Array, "1"], counts: Int32[Array, "1 V"] | None) -> None:
        self.token = set_row(self.token, token, np.int32(row))
        if counts is not None:
            if self.counts is None:
                self.counts = put(np.zeros((len(self.token), self.vocab_size), np.int32), self.mesh)
            self.counts = set_row(self.counts, counts, np.int32(row))

    def take(
        self, rows: Int32[np.ndarray, "B"], *, counts: bool
    ) -> tuple[Int32[Array, "B"], Int32[Array, "B V"] | None]:
        return take_rows(self.token, rows), take_rows(self.counts, rows) if counts else None

    def update(self, rows: Int32[np.ndarray, "B"], choice: Choice) -> None:
        self.token = set_rows(self.token, choice.token, rows)
        if choice.counts is not None:
            self.counts = set_rows(self.counts, choice.counts, rows)

    def warm(self, methods: Iterable[Method], batches: Sequence[int] = ()) -> int:
        rows = len(self.token)
        arrays = [np.zeros(rows, np.int32)]
        if any(method.penalised for method in methods):
            arrays.append(np.zeros((rows, self.vocab_size), np.int32))
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
