"""The pool that holds the keys and values of many sequences in pages, and the programs that fill and read it.

One kind of program prefills the next tokens of one sequence; the other kind decodes one token for each of a few
sequences. Both take the sequences' page numbers as an argument. The same program thus runs wherever the pages of a
sequence are, and however many other sequences are in the pool.

The policy of a token depends only on its position (`Policy.at_position`). The keys in a page therefore depend only on
the model, the policy and the tokens up to the end of the page, and sequences that begin alike can share pages.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int32

from tessera.attention.contract import Positions
from tessera.core.files import sources
from tessera.core.mesh import keep, mesh_of, num_stripes, program, put
from tessera.core.shapes import ceil_div, round_up
from tessera.models.cache import Cache, keep_split
from tessera.models.config import ModelConfig
from tessera.models.decoder import forward
from tessera.models.files.checkpoint import fingerprint
from tessera.models.layers import Params
from tessera.models.pages import NULL, page_table
from tessera.runtime.prefix import salt
from tessera.runtime.prompt_scores import RowScores, score_prompt_rows
from tessera.runtime.step import allocate, decode_token, read_head
from tessera.sparse.contract import Policy, Reads


@dataclass(frozen=True, kw_only=True)
class Paging:
    """Sizes of a pool and of its programs.

    Attributes:
        num_pages: number of pages, including the null page (`pages.NULL`), which padding uses.
        page: number of positions per page.
        unit: prefills start at multiples of `unit` positions. It is a multiple of `page` and of the policy's query
            tile. The policy's cross-over to sparse attention is rounded up to a multiple of `unit`.
        sizes: numbers of rows of the prefill programs: descending multiples of `unit`, of which the last is `unit`.
        batches: numbers of sequences of the decode programs, ascending.
        spill: folder that stores pages that the prefix cache evicts (`spill.Spill`); None drops these pages.
        spill_bytes: maximum size of the folder in bytes.

    Raises:
        ValueError: a value breaks one of these rules.
    """

    num_pages: int
    page: int = 64
    unit: int = 64
    sizes: tuple[int, ...] = (512, 64)
    batches: tuple[int, ...] = (1, 4, 16)
    spill: Path | None = None
    spill_bytes: int = 8 << 30

    def __post_init__(self):
        if self.page < 1 or self.unit % self.page:
            raise ValueError(f"unit={self.unit} must be a multiple of page={self.page}, which must be at least 1")
        if not self.sizes or any(size % self.unit for size in self.sizes) or self.sizes[-1] != self.unit:
            raise ValueError(f"sizes={self.sizes} must be multiples of unit={self.unit}, and the last must be the unit")
        if list(self.sizes) != sorted(set(self.sizes), reverse=True):
            raise ValueError(f"sizes={self.sizes} must be in descending order, each once")
        if not self.batches or list(self.batches) != sorted(set(self.batches)) or self.batches[0] < 1:
            raise ValueError(f"batches={self.batches} must be positive numbers in ascending order, each once")

    def check(self, policy: Policy) -> None:
        """Raise ValueError if a prefill could end inside a query tile of the policy."""
        if self.unit % policy.query_tile:
            raise ValueError(f"unit={self.unit} must be a multiple of the policy's query tile {policy.query_tile}")


class Rows(NamedTuple):
    """Hidden states of a prefill: those of its last token, which predict the next token, and those of all its rows."""

    last: Float[Array, "1 D"]
    hidden: Float[Array, "T D"]


@program(static_argnames=("config", "policy"), donate_argnames="cache")
def prefill_rows(
    params: Params,
    cache: Cache,
    tokens_BT: Int32[Array, "1 T"],
    q_start_B: Int32[Array, "1"],
    q_len_B: Int32[Array, "1"],
    *,
    config: ModelConfig,
    policy: Policy,
) -> tuple[Cache, Rows, Reads | None]:
    """Prefill `q_len_B` tokens of one sequence from position `q_start_B` on; the rest of the T rows is padding.

    Return the cache, the hidden states and the key counts, which are None if the policy does not count.
    """
    positions = Positions(q_start_B, jnp.where(q_len_B > 0, q_start_B + q_len_B, 0), q_len_B)
    hidden, cache, state = forward(params, tokens_BT, cache, positions, config=config, policy=policy)
    row = jnp.maximum(q_len_B - 1, 0)[:, None, None]
    last = jnp.take_along_axis(hidden, row, axis=1)[:, 0]
    return keep_split(cache), *keep((Rows(last, hidden[0]), policy.reads(state)))


@program()
def read_page(cache: Cache, page: Int32[Array, ""]) -> Cache:
    """Return a copy of one page of a pool."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, page, x.ndim - 4, keepdims=False), cache)


@program(donate_argnames="cache")
def write_page(cache: Cache, part: Cache, page: Int32[Array, ""]) -> Cache:
    """Overwrite one page of a pool with `part`, a page that `read_page` copied."""
    new = jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, page, x.ndim - 4), cache, part)
    return keep_split(new)


class Pool:
    """Keys and values in pages, on the device.

    Args:
        params, config, policy: the model's weights, config and attention policy.
        context: maximum number of positions of a sequence.
        paging: sizes of the pool and of its programs.
        cache: dtype of keys and values: "int8", or None for the dtype of the weights.

    Raises:
        ValueError: `paging` does not fit the policy, or the mesh splits sequences over devices.
    """

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        policy: Policy,
        *,
        context: int,
        paging: Paging,
        cache: str | None = None,
    ):
        paging.check(policy)
        self.params, self.config, self.policy, self.paging = params, config, policy, paging
        self.mesh, self.dtype = mesh_of(params), str(params.embed.dtype)
        if num_stripes(self.mesh) > 1:
            raise ValueError(
                f"the mesh axis `context` has {num_stripes(self.mesh)} devices, but a page cannot be split over them: "
                "use a mesh that splits only heads, such as 4x1"
            )
        self.width = ceil_div(round_up(context, paging.unit), paging.page)
        self.cache = allocate(
            self.mesh,
            config=config,
            batch=paging.num_pages,
            num_keys=paging.page,
            dtype=cache or self.dtype,
            stacked=not isinstance(params.layers, tuple),
        )

    def salt(self) -> bytes:
        """Return a digest of everything except tokens on which the contents of a page depend."""
        return salt(
            weights=fingerprint(self.params, self.config),
            plan=repr(self.policy),
            dtype=f"{self.dtype} {jax.tree.leaves(self.cache)[0].dtype}",
            unit=self.paging.unit,
            crossover=self.boundary(0, self.width * self.paging.page),
            # `dispatch` chooses kernels and their configs by the device, the sizes and the tables among the sources.
            kernels={"device": jax.devices()[0].device_kind, "rows": str(self.paging.sizes), "keys": str(self.width)},
            code=f"{sources()} jax {jax.__version__}",
        )

    def policy_at(self, position: int) -> Policy:
        """Return the policy of the token at a position."""
        return self.policy.at_position(position, self.paging.unit)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """All policies that tokens of a sequence can have: one, or two if the context passes the cross-over."""
        return tuple(dict.fromkeys(self.policy_at(n) for n in (0, self.width * self.paging.page - 1)))

    def boundary(self, position: int, end: int) -> int:
        """Return the first position after `position` and before `end` where another policy begins, or `end`."""
        policy, unit = self.policy_at(position), self.paging.unit
        starts = range(position - position % unit + unit, end, unit)
        return next((start for start in starts if self.policy_at(start) != policy), end)

    def prefill(self, tokens: Sequence[int], start: int, pages: Sequence[int], size: int) -> tuple[Rows, Reads | None]:
        """Prefill tokens of one sequence and write their keys and values; return hidden states and key counts.

        Args:
            tokens: at most `size` tokens, all of which have the same policy.
            start: position of the first token, a multiple of `Paging.unit`.
            pages: all pages of the sequence in order of position, with room for the tokens.
            size: number of rows of the program: one of `Paging.sizes`.
        """
        padded = np.zeros((1, size), np.int32)
        padded[0, : len(tokens)] = tokens
        self.cache, rows, reads = prefill_rows(
            self.params,
            self._paged([pages]),
            padded,
            np.array([start], np.int32),
            np.array([len(tokens)], np.int32),
            config=self.config,
            policy=self.policy_at(start),
        )
        self._strip()
        return rows, reads

    def decode(
        self, policy: Policy, token_B: Array, position_B: Sequence[int], pages: Sequence[Sequence[int]]
    ) -> tuple[Float[Array, "B V"], list[Reads]]:
        """Feed one token to each of `len(pages)` sequences; return next-token logits and key counts.

        The first `len(pages)` entries of `token_B` are the tokens, and `position_B` has their positions. The rest of
        the batch is padding.
        """
        batch, count = token_B.shape[0], len(pages)
        position = np.zeros(batch, np.int32)
        position[:count] = position_B
        self.cache, out, reads = decode_token(
            self.params,
            self._paged([*pages, *[()] * (batch - count)]),
            token_B,
            position,
            np.arange(batch) < count,
            config=self.config,
            policy=policy,
        )
        self._strip()
        return out, [] if reads is None else [reads]

    def scores(self, last: Float[Array, "1 D"]) -> Float[Array, "1 V"]:
        """Compute next-token logits from the hidden state of the last token of a prefill."""
        return read_head(self.params, last)

    def score(self, rows: Rows, next_T: Int32[np.ndarray, "rows"]) -> RowScores:
        """Score the tokens `next_T`, each of which follows one row of a prefill; see `RowScores`."""
        return score_prompt_rows(self.params, rows.hidden, next_T)

    def examples(self) -> list[tuple[list[tuple[int, int]], list[int]]]:
        """Return the steps to time for `LinearCosts.fit`, each as the arguments (prefill, decode) of `Costs.step_s`."""
        last = self.width * self.paging.page
        prefills = [[(start, size)] for size in self.paging.sizes for start in dict.fromkeys((0, last - size))]
        decodes = [[keys] * batch for batch in self.paging.batches for keys in dict.fromkeys((1, last))]
        return [(prefill, []) for prefill in prefills] + [([], decode) for decode in decodes]

    def time(self, prefill: Sequence[tuple[int, int]], decode: Sequence[int]) -> float:
        """Run a step on the null page and return its seconds; the arguments are as in `Costs.step_s`."""
        began_s = time.perf_counter()
        for start, size in prefill:
            self.prefill([0] * size, start, [], size)
        if decode:
            token = put(np.zeros(len(decode), np.int32), self.mesh)
            self.decode(self.policy_at(decode[0] - 1), token, [keys - 1 for keys in decode], [[]] * len(decode))
        jax.block_until_ready(self.cache)
        return time.perf_counter() - began_s

    def save(self, pages: Sequence[int]) -> list[Cache]:
        """Copy pages to the host."""
        return [jax.tree.map(np.asarray, read_page(self.cache, np.int32(page))) for page in pages]

    def restore(self, pages: Sequence[int], saved: Sequence[Cache]) -> None:
        """Overwrite pages with the copies that `save` returned, in the same order."""
        for page, part in zip(pages, saved, strict=True):
            self.cache = write_page(self.cache, part, np.int32(page))

    def warm(self) -> int:
        """Run every program once, on the null page; return the number of programs."""
        count = 0
        for policy in self.policies:
            start = 0 if policy == self.policy_at(0) else self.width * self.paging.page - self.paging.unit
            for size in self.paging.sizes:
                rows, _ = self.prefill([], start, [], size)
                self.score(rows, np.zeros(size, np.int32))
            for batch in self.paging.batches:
                self.decode(policy, put(np.zeros(batch, np.int32), self.mesh), [], [])
            count += len(self.paging.sizes) + len(self.paging.batches)
        self.scores(rows.last)
        self.restore([NULL], self.save([NULL]))
        jax.block_until_ready(self.cache)
        return count + len(self.paging.sizes) + 3

    def _paged(self, rows: Sequence[Sequence[int]]) -> Cache:
        return self.cache._replace(pages=put(page_table(rows, self.width), self.mesh))

    def _strip(self) -> None:
        self.cache = self.cache._replace(pages=None)
