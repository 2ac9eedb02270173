"""Named attention calls: a catalogue of shapes that tests, the tuner and benchmarks share."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tessera.attention.contract import AttentionSpec, Shapes
from tessera.attention.contract import AttentionSpec as Spec
from tessera.attention.selection import capacity_for
from tessera.core.shapes import ceil_div


class Budget(NamedTuple):
    """Options of `selection.select_tiles`, with one fraction per KV head."""

    fraction: tuple[float, ...]
    minimum: int
    local: int
    sinks: int


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One attention call: everything except the contents of its arrays.

    Attributes:
        dtype: dtype of q, k and v in benchmarks; tests run all dtypes of a kernel.
        spec: options of the dense call; the score role sets `mass` in addition.
        fraction: share of the key tiles that the sparse role lists, if `budget` is None; the tiles are random.
        budget: options of `select_tiles`, which lists tiles by random masses; None lists random tiles.
        q_start, kv_len, q_len: one entry per sequence; None means 0, S and T.
        tags: "prefill" or "decode", and the uses: "test" (small, checked against the oracles), "hopper" (small, in
            shapes that the Hopper kernels take), "lists" (small, for the sparse role), "tiles" (workloads of "lists"
            that the score role also runs), "int8" (small, for kernels that read int8 keys), "bench" (timed).
    """

    name: str
    batch: int = 1
    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float32"
    spec: AttentionSpec = AttentionSpec()
    fraction: float = 0.1
    budget: Budget | None = None
    scaled: bool = False
    q_start: tuple[int, ...] | None = None
    kv_len: tuple[int, ...] | None = None
    q_len: tuple[int, ...] | None = None
    tags: tuple[str, ...]

    @property
    def num_query_tiles(self) -> int:
        return ceil_div(self.num_queries, self.spec.query_tile)

    @property
    def num_key_tiles(self) -> int:
        return ceil_div(self.num_keys, self.spec.tile)

    @property
    def capacity(self) -> int:
        """Length of a sparse call's lists, C, in tiles."""
        if self.budget is not None:
            return capacity_for(self.spec, self.num_keys, self.num_queries, **self.budget._asdict())
        return max(1, round(self.fraction * self.num_key_tiles))

    def role_spec(self, role: str) -> AttentionSpec:
        """Return the spec of the call in this role: `mass` is set for "score" only."""
        return replace(self.spec, mass=role == "score")

    def shapes(self, role: str, dtype: str | None = None) -> Shapes:
        """Return the static shapes of the call in this role; `dtype` replaces the workload's own."""
        capacity = self.capacity if role == "sparse" else None
        sizes = (self.batch, self.num_queries, self.num_keys, self.num_heads, self.num_kv_heads, self.head_dim)
        return Shapes(*sizes, capacity, dtype or self.dtype, scaled=self.scaled)


PLAIN = AttentionSpec()


def _call(
    name: str,
    tags: str,
    sizes: tuple[int, ...],
    spec: AttentionSpec = PLAIN,
    lists: float | Budget = 0.1,
    positions: tuple = (None, None, None),
    **more: Any,
) -> Workload:
    """Build a workload from a row of the catalogue.

    `sizes` are (B, T, S, N, K, H), `lists` is a fraction or a budget, and `positions` are (q_start, kv_len, q_len).
    """
    axes = ("batch", "num_queries", "num_keys", "num_heads", "num_kv_heads", "head_dim")
    more |= dict(zip(axes, sizes, strict=True)) | dict(zip(("q_start", "kv_len", "q_len"), positions, strict=True))
    more["budget" if isinstance(lists, Budget) else "fraction"] = lists
    return Workload(name=name, tags=tuple(tags.split()), spec=spec, **more)


BFLOAT16, INT8 = {"dtype": "bfloat16"}, {"scaled": True}

# fmt: off
WORKLOADS: tuple[Workload, ...] = (
    # Small calls for the oracles. They cover every tile size, G of 1, 2, 4 and 8, T and S that no block size divides,
    # ragged batches, rows before position 0, and sequences without keys or rows.
    _call("aligned", "test prefill", (1, 64, 64, 4, 2, 16), Spec(tile=16, query_tile=16), 0.5),
    _call("ragged", "test prefill", (3, 40, 90, 8, 1, 8), Spec(tile=16, query_tile=12), 0.6,
          ((50, -7, 0), (90, 33, 0), (40, 40, 17))),
    _call("window_softcap", "test prefill", (2, 33, 70, 2, 2, 16), Spec(window=19, softcap=2.0, tile=1, query_tile=8),
          0.7, ((37, 0), (70, 33), (33, 20))),
    _call("both_ways", "test prefill", (1, 20, 150, 4, 1, 16), Spec(causal=False, scale=0.3, tile=64, query_tile=32),
          0.7, (None, (131,), None)),
    _call("tail", "test prefill", (1, 48, 300, 4, 2, 32), Spec(tile=128, query_tile=32), 0.7, ((252,), None, None)),
    _call("decode_ragged", "test decode", (4, 1, 150, 8, 2, 16), Spec(tile=16), 0.6,
          ((149, 0, 70, 20), (150, 1, 0, 21), (1, 1, 1, 0))),
    _call("decode_window", "test decode", (2, 1, 100, 3, 3, 16), Spec(window=37, softcap=2.0, tile=1), 0.8,
          ((99, 41), (100, 42), None)),
    _call("decode_both_ways", "test decode", (1, 1, 300, 8, 1, 16), Spec(causal=False, tile=128), 0.7,
          (None, (290,), None)),
    # The same for Hopper, whose matrix products need a head_dim that fills swizzled lines of 64; G of 1, 2, 7 and 16.
    _call("hopper_ragged", "hopper prefill", (3, 70, 200, 4, 2, 128), Spec(tile=32, query_tile=16), 0.6,
          ((130, -7, 0), (200, 63, 0), (70, 70, 33)), **BFLOAT16),
    _call("hopper_window", "hopper prefill", (1, 40, 310, 7, 1, 64),
          Spec(window=50, softcap=2.0, tile=64, query_tile=32), 0.8, ((265,), (305,), None), **BFLOAT16),
    _call("hopper_both_ways", "hopper prefill", (1, 33, 500, 2, 2, 64),
          Spec(causal=False, scale=0.3, tile=128, query_tile=32), 1.0, (None, (450,), None), **BFLOAT16),
    _call("hopper_decode", "hopper decode", (4, 1, 700, 16, 1, 128), Spec(tile=64), 0.6,
          ((699, 128, 0, 20), (700, 129, 0, 21), (1, 1, 1, 0)), **BFLOAT16),
    # Lists as in a plan for the real model: local and sink tiles, and per KV head none, all or some of the far tiles.
    _call("heads_16", "lists prefill", (1, 40, 210, 9, 3, 16), Spec(tile=16, query_tile=32),
          Budget((0.0, 1.0, 0.2), 0, 32, 16), ((165,), (205,), None)),
    _call("heads_32_wide", "lists tiles prefill", (1, 130, 380, 2, 2, 16), Spec(tile=32, query_tile=128),
          Budget((1.0, 0.0), 0, 64, 1), ((241,), (371,), None)),
    _call("decode_heads_16", "lists decode", (2, 1, 210, 9, 3, 16), Spec(tile=16),
          Budget((0.0, 1.0, 0.2), 0, 32, 16), ((204, 17), (205, 18), None)),
    _call("decode_heads_32", "lists tiles decode", (1, 1, 380, 4, 2, 16), Spec(tile=32),
          Budget((1.0, 0.0), 0, 64, 1), ((370,), (371,), None)),
    # Int8 keys and values: tails of blocks that are moved back or padded, a cap (the scale comes before it), sequences
    # that see nothing, one list per head; in int8_wide, tiles as long as a copy of scales on a TPU.
    _call("int8_ragged", "int8 prefill", (2, 40, 205, 6, 3, 16), Spec(softcap=3.0, tile=32, query_tile=32),
          Budget((0.0, 1.0, 0.2), 0, 32, 32), ((165, 3), (203, 40), (38, 37)), **INT8),
    _call("int8_wide", "int8 prefill", (2, 40, 450, 6, 3, 16), Spec(tile=128, query_tile=32),
          Budget((0.0, 1.0, 0.4), 0, 64, 32), ((405, 3), (443, 40), (38, 37)), **INT8),
    _call("int8_decode", "int8 decode", (3, 1, 300, 9, 3, 16), Spec(window=250, tile=32),
          Budget((0.0, 1.0, 0.2), 0, 32, 32), ((296, 17, 0), (297, 18, 0), None), **INT8),
    # Calls that benchmarks time. chunk_4k_gqa is the last prefill chunk of the shipped model's context, with the tile
    # sizes of that model's plan.
    _call("prefill_8k", "bench prefill", (1, 8192, 8192, 8, 8, 128)),
    _call("prefill_8k_bfloat16", "bench prefill", (1, 8192, 8192, 8, 8, 128), **BFLOAT16),
    _call("prefill_16k_gqa", "bench prefill", (1, 16384, 16384, 8, 2, 128)),
    _call("chunk_4k_gqa", "bench prefill", (1, 512, 4096, 4, 2, 64), Spec(tile=64, query_tile=64),
          positions=((3584,), None, None)),
    _call("decode_4k_gqa", "bench decode", (1, 1, 4096, 12, 4, 64), positions=((4095,), None, None)),
    _call("decode_32k_gqa", "bench decode", (1, 1, 32768, 8, 2, 128), positions=((32767,), None, None)),
)
# fmt: on
"""All workloads; `tagged` selects from them."""


def tagged(*tags: str) -> tuple[Workload, ...]:
    """Return the workloads that have all of these tags, in catalogue order."""
    return tuple(w for w in WORKLOADS if set(tags) <= set(w.tags))
