"""Named attention calls: a catalogue of shapes that tests, the tuner and benchmarks share."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from tessera.attention.contract import AttentionSpec, Shapes
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
        name: unique name.
        batch, num_queries, num_keys, num_heads, num_kv_heads, head_dim: B, T, S, N, K, H.
        dtype: dtype of q, k and v in benchmarks; tests run all dtypes of a kernel.
        spec: options of the dense call; the score role sets `mass` in addition.
        fraction: share of the key tiles that the sparse role lists, if `budget` is None; the tiles are random.
        budget: options of `select_tiles`, which lists tiles by random masses; None lists random tiles.
        scaled: whether keys and values are int8 with scales.
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

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")
        for name in ("q_start", "kv_len", "q_len"):
            value = getattr(self, name)
            if value is not None and len(value) != self.batch:
                raise ValueError(f"{name}={value} must have batch={self.batch} entries, or be None")
        if self.budget is not None and len(self.budget.fraction) != self.num_kv_heads:
            raise ValueError(f"budget={self.budget} must have num_kv_heads={self.num_kv_heads} fractions")

    @property
    def num_query_tiles(self) -> int:
        """Number of query tiles: ceil(T / query_tile)."""
        return ceil_div(self.num_queries, self.spec.query_tile)

    @property
    def num_key_tiles(self) -> int:
        """Number of key tiles: ceil(S / tile)."""
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


WORKLOADS: tuple[Workload, ...] = (
    # Small calls for the oracles. They cover every tile size, G of 1, 2, 4 and 8, T and S that no block size divides,
    # ragged batches, rows before position 0, and sequences without keys or rows.
    Workload(
        name="aligned",
        num_queries=64,
        num_keys=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        spec=AttentionSpec(tile=16, query_tile=16),
        fraction=0.5,
        tags=("test", "prefill"),
    ),
    Workload(
        name="ragged",
        batch=3,
        num_queries=40,
        num_keys=90,
        num_heads=8,
        num_kv_heads=1,
        head_dim=8,
        spec=AttentionSpec(tile=16, query_tile=12),
        fraction=0.6,
        q_start=(50, -7, 0),
        kv_len=(90, 33, 0),
        q_len=(40, 40, 17),
        tags=("test", "prefill"),
    ),
    Workload(
        name="window_softcap",
        batch=2,
        num_queries=33,
        num_keys=70,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        spec=AttentionSpec(window=19, softcap=2.0, tile=1, query_tile=8),
        fraction=0.7,
        q_start=(37, 0),
        kv_len=(70, 33),
        q_len=(33, 20),
        tags=("test", "prefill"),
    ),
    Workload(
        name="both_ways",
        num_queries=20,
        num_keys=150,
        num_heads=4,
        num_kv_heads=1,
        head_dim=16,
        spec=AttentionSpec(causal=False, scale=0.3, tile=64, query_tile=32),
        fraction=0.7,
        kv_len=(131,),
        tags=("test", "prefill"),
    ),
    Workload(
        name="tail",
        num_queries=48,
        num_keys=300,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        spec=AttentionSpec(tile=128, query_tile=32),
        fraction=0.7,
        q_start=(252,),
        tags=("test", "prefill"),
    ),
    Workload(
        name="decode_ragged",
        batch=4,
        num_queries=1,
        num_keys=150,
        num_heads=8,
        num_kv_heads=2,
        head_dim=16,
        spec=AttentionSpec(tile=16),
        fraction=0.6,
        q_start=(149, 0, 70, 20),
        kv_len=(150, 1, 0, 21),
        q_len=(1, 1, 1, 0),
        tags=("test", "decode"),
    ),
    Workload(
        name="decode_window",
        batch=2,
        num_queries=1,
        num_keys=100,
        num_heads=3,
        num_kv_heads=3,
        head_dim=16,
        spec=AttentionSpec(window=37, softcap=2.0, tile=1),
        fraction=0.8,
        q_start=(99, 41),
        kv_len=(100, 42),
        tags=("test", "decode"),
    ),
    Workload(
        name="decode_both_ways",
        num_queries=1,
        num_keys=300,
        num_heads=8,
        num_kv_heads=1,
        head_dim=16,
        spec=AttentionSpec(causal=False, tile=128),
        fraction=0.7,
        kv_len=(290,),
        tags=("test", "decode"),
    ),
    # The same for Hopper, whose matrix products need a head_dim that fills swizzled lines of 64; G of 1, 2, 7 and 16.
    Workload(
        name="hopper_ragged",
        batch=3,
        num_queries=70,
        num_keys=200,
        num_heads=4,
        num_kv_heads=2,
        head_dim=128,
        dtype="bfloat16",
        spec=AttentionSpec(tile=32, query_tile=16),
        fraction=0.6,
        q_start=(130, -7, 0),
        kv_len=(200, 63, 0),
        q_len=(70, 70, 33),
        tags=("hopper", "prefill"),
    ),
    Workload(
        name="hopper_window",
        num_queries=40,
        num_keys=310,
        num_heads=7,
        num_kv_heads=1,
        head_dim=64,
        dtype="bfloat16",
        spec=AttentionSpec(window=50, softcap=2.0, tile=64, query_tile=32),
        fraction=0.8,
        q_start=(265,),
        kv_len=(305,),
        tags=("hopper", "prefill"),
    ),
    Workload(
        name="hopper_both_ways",
        num_queries=33,
        num_keys=500,
        num_heads=2,
        num_kv_heads=2,
        head_dim=64,
        dtype="bfloat16",
        spec=AttentionSpec(causal=False, scale=0.3, tile=128, query_tile=32),
        fraction=1.0,
        kv_len=(450,),
        tags=("hopper", "prefill"),
    ),
    Workload(
        name="hopper_decode",
        batch=4,
        num_queries=1,
        num_keys=700,
        num_heads=16,
        num_kv_heads=1,
        head_dim=128,
        dtype="bfloat16",
        spec=AttentionSpec(tile=64),
        fraction=0.6,
        q_start=(699, 128, 0, 20),
        kv_len=(700, 129, 0, 21),
        q_len=(1, 1, 1, 0),
        tags=("hopper", "decode"),
    ),
    # Lists as in a plan for the real model: local and sink tiles, and per KV head none, all or some of the far tiles.
    Workload(
        name="heads_16",
        num_queries=40,
        num_keys=210,
        num_heads=9,
        num_kv_heads=3,
        head_dim=16,
        spec=AttentionSpec(tile=16, query_tile=32),
        budget=Budget((0.0, 1.0, 0.2), 0, 32, 16),
        q_start=(165,),
        kv_len=(205,),
        tags=("lists", "prefill"),
    ),
    Workload(
        name="heads_32_wide",
        num_queries=130,
        num_keys=380,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        spec=AttentionSpec(tile=32, query_tile=128),
        budget=Budget((1.0, 0.0), 0, 64, 1),
        q_start=(241,),
        kv_len=(371,),
        tags=("lists", "tiles", "prefill"),
    ),
    Workload(
        name="decode_heads_16",
        batch=2,
        num_queries=1,
        num_keys=210,
        num_heads=9,
        num_kv_heads=3,
        head_dim=16,
        spec=AttentionSpec(tile=16),
        budget=Budget((0.0, 1.0, 0.2), 0, 32, 16),
        q_start=(204, 17),
        kv_len=(205, 18),
        tags=("lists", "decode"),
    ),
    Workload(
        name="decode_heads_32",
        num_queries=1,
        num_keys=380,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        spec=AttentionSpec(tile=32),
        budget=Budget((1.0, 0.0), 0, 64, 1),
        q_start=(370,),
        kv_len=(371,),
        tags=("lists", "tiles", "decode"),
    ),
    # Int8 keys and values: tails of blocks that are moved back or padded, a cap (the scale comes before it), sequences
    # that see nothing, one list per head.
    Workload(
        name="int8_ragged",
        batch=2,
        num_queries=40,
        num_keys=205,
        num_heads=6,
        num_kv_heads=3,
        head_dim=16,
        spec=AttentionSpec(softcap=3.0, tile=32, query_tile=32),
        budget=Budget((0.0, 1.0, 0.2), 0, 32, 32),
        scaled=True,
        q_start=(165, 3),
        kv_len=(203, 40),
        q_len=(38, 37),
        tags=("int8", "prefill"),
    ),
    Workload(  # tiles as long as a copy of scales on a TPU
        name="int8_wide",
        batch=2,
        num_queries=40,
        num_keys=450,
        num_heads=6,
        num_kv_heads=3,
        head_dim=16,
        spec=AttentionSpec(tile=128, query_tile=32),
        budget=Budget((0.0, 1.0, 0.4), 0, 64, 32),
        scaled=True,
        q_start=(405, 3),
        kv_len=(443, 40),
        q_len=(38, 37),
        tags=("int8", "prefill"),
    ),
    Workload(
        name="int8_decode",
        batch=3,
        num_queries=1,
        num_keys=300,
        num_heads=9,
        num_kv_heads=3,
        head_dim=16,
        spec=AttentionSpec(window=250, tile=32),
        budget=Budget((0.0, 1.0, 0.2), 0, 32, 32),
        scaled=True,
        q_start=(296, 17, 0),
        kv_len=(297, 18, 0),
        tags=("int8", "decode"),
    ),
    # Calls that benchmarks time.
    Workload(
        name="prefill_8k",
        num_queries=8192,
        num_keys=8192,
        num_heads=8,
        num_kv_heads=8,
        head_dim=128,
        tags=("bench", "prefill"),
    ),
    Workload(
        name="prefill_8k_bfloat16",
        num_queries=8192,
        num_keys=8192,
        num_heads=8,
        num_kv_heads=8,
        head_dim=128,
        dtype="bfloat16",
        tags=("bench", "prefill"),
    ),
    Workload(
        name="prefill_16k_gqa",
        num_queries=16384,
        num_keys=16384,
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        tags=("bench", "prefill"),
    ),
    Workload(  # last prefill chunk of the shipped model's context, with the tile sizes of that model's plan
        name="chunk_4k_gqa",
        num_queries=512,
        num_keys=4096,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        spec=AttentionSpec(tile=64, query_tile=64),
        q_start=(3584,),
        tags=("bench", "prefill"),
    ),
    Workload(
        name="decode_4k_gqa",
        num_queries=1,
        num_keys=4096,
        num_heads=12,
        num_kv_heads=4,
        head_dim=64,
        q_start=(4095,),
        tags=("bench", "decode"),
    ),
    Workload(
        name="decode_32k_gqa",
        num_queries=1,
        num_keys=32768,
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        q_start=(32767,),
        tags=("bench", "decode"),
    ),
)
"""All workloads; `tagged` selects from them."""


def tagged(*tags: str) -> tuple[Workload, ...]:
    """Return the workloads that have all of these tags, in catalogue order."""
    return tuple(w for w in WORKLOADS if set(tags) <= set(w.tags))
