"""Compute the rooflines of the Hopper kernels' figures on an H200, and compare them with targets; nothing is timed.

    python -m lab study gpu-figures      # compiles its calls, appends the records to evidence/

The roofline is max(flops / rate, bytes / bandwidth, exponentials / rate) of the work, at ceilings that others measured
(`inspection.CEILINGS`). It is the least time that a call can take; our kernels may be much slower. A ratio compares two
calls at their rooflines: it is an upper bound on our kernels' gain over a dense kernel that reaches its own roofline.
Measured records replace these figures once `lab/gpu/check.sh` has run on an H200.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from lab.studies import figures
from tessera.attention.contract import AttentionSpec
from tessera.deviceless import inspection
from tessera.deviceless.gpu import inspection as gpu_inspection
from tessera.measure import evidence

COMMAND = "python -m lab study gpu-figures"
CHIP = "h200"
OP = "roofline figure"
SHORT, LONG = figures.SHORT, figures.LONG
TILE, QUERY_TILE = 64, 32
"""Tile and query tile that `lab/gpu/check.sh` times."""
SMALL_TILES = tuple((tile, query_tile) for tile in (32, 16) for query_tile in (128, 32))
"""(tile, query tile) of further sparse prefill calls; the further decode calls use only the tile."""
SPARSE = MappingProxyType({"length": LONG, "role": "sparse"})
CALLS = MappingProxyType(
    {
        "dense": {"length": SHORT},
        "dense long": {"length": LONG},
        "score long": {"length": LONG, "role": "score"},
        # A query tile lists a tenth of its visible keys, which averages to 0.05 of all keys over a causal prefill.
        "sparse long": {"length": LONG, "role": "sparse", "fraction": 0.05},
        "decode dense": {"length": LONG, "phase": "decode"},
        "decode score": {"length": LONG, "phase": "decode", "role": "score"},
        "decode sparse": {"length": LONG, "phase": "decode", "role": "sparse"},
        "decode dense, 16 sequences": {"length": LONG, "phase": "decode", "batch": 16},
        **{
            f"sparse {tile}/{rows}": {**SPARSE, "fraction": 0.05, "tile": tile, "query_tile": rows}
            for tile, rows in SMALL_TILES
        },
        **{f"decode sparse {tile}": {**SPARSE, "phase": "decode", "tile": tile} for tile in (32, 16)},
        "small": {"length": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "causal": False},
    }
)
"""Calls to compile. Defaults: bfloat16, 32 query heads and 8 KV heads of dim 128, causal, a tenth of the keys."""


PEER = "a peer's time"
"""Target of a figure that must beat a peer's measured time, which is unknown without a GPU."""


class Figure(NamedTuple):
    """One figure: its value at the roofline, its unit, its target (or PEER, or None), and the calls it comes from."""

    name: str
    bound: float
    unit: str
    target: str | None
    calls: tuple[str, ...]


def inspect(name: str, limit_s: float) -> gpu_inspection.Inspection:
    """Compile one of CALLS for CHIP.

    Raises:
        RuntimeError: the call does not compile.
    """
    call = {"role": "dense", "phase": "prefill", "batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128}
    call |= {"dtype": "bfloat16", "fraction": 0.1, "causal": True, "tile": TILE, "query_tile": QUERY_TILE}
    call |= CALLS[name]
    spec = AttentionSpec(**{option: call.pop(option) for option in ("causal", "tile", "query_tile")})
    spec, shapes = inspection.call(spec=spec, **call)
    found = gpu_inspection.inspect_call(CHIP, spec, shapes, limit_s=limit_s)
    if not found.compiled:
        raise RuntimeError(f"{name}: {found.error}")
    return found


def selection_ms(phase: str) -> float:
    """Return a lower bound on the milliseconds to choose tiles: the time to read the float32 masses once."""
    rows = LONG // QUERY_TILE if phase == "prefill" else 1
    return 1e3 * 4 * 8 * rows * (LONG // TILE) / gpu_inspection.CEILINGS[CHIP].bytes_per_s


def all_figures(found: Mapping[str, gpu_inspection.Inspection]) -> Iterator[Figure]:
    """Yield every figure of the inspected calls."""
    ms = {name: result.roofline_ms for name, result in found.items()}

    def rate(name: str) -> float:
        return found[name].flops / ms[name] / 1e9

    def against_dense(dense: str, anchor: float, sparse: str) -> float:
        ours = figures.ANCHORS * anchor + (figures.LAYERS - figures.ANCHORS) * ms[sparse]
        return figures.LAYERS * ms[dense] / ours

    yield Figure(f"dense prefill, {SHORT:,} tokens", rate("dense"), "TFLOP/s", ">= 570", ("dense",))
    name = "decode dense, 16 sequences"
    yield Figure(
        f"dense decode, 16 x {LONG:,} keys", found[name].moved_bytes / ms[name] / 1e9, "TB/s", ">= 4.1", (name,)
    )
    score = ms["score long"] / ms["dense long"]
    yield Figure(f"score / dense, {LONG:,} tokens", score, "x", "<= 1.08", ("score long", "dense long"))
    yield Figure(
        f"sparse prefill, {LONG:,} tokens, a tenth", rate("sparse long"), "TFLOP/s", ">= 500", ("sparse long",)
    )
    calls = "dense long", "score long", "sparse long"
    ratio = against_dense(calls[0], ms[calls[1]] + selection_ms("prefill"), calls[2])
    yield Figure(f"Kascade prefill against dense, {LONG:,} tokens", ratio, "x", ">= 3.4", calls)
    calls = "decode dense", "decode score", "decode sparse"
    ratio = against_dense(calls[0], ms[calls[1]] + selection_ms("decode"), calls[2])
    yield Figure(f"Kascade decode against dense, {LONG:,} keys", ratio, "x", ">= 5", calls)
    # A hypothetical kernel: score with K alone (half of dense's bytes), then read V of the chosen tiles (half of
    # sparse's bytes).
    ratio = against_dense(calls[0], ms[calls[0]] / 2 + selection_ms("decode") + ms[calls[2]] / 2, calls[2])
    name = "the same, were anchors to read V of their chosen tiles alone"
    yield Figure(name, ratio, "x", ">= 5", calls)
    for tile, rows in SMALL_TILES:
        call = f"sparse {tile}/{rows}"
        name = f"sparse prefill, {LONG:,} tokens, a tenth, tile {tile}, query tile {rows}"
        yield Figure(name, rate(call), "TFLOP/s", None, (call,))
    for tile in dict.fromkeys(tile for tile, _ in SMALL_TILES):
        call = f"decode sparse {tile}"
        yield Figure(f"sparse decode, {LONG:,} keys, a tenth, tile {tile}", 1e3 * ms[call], "us", None, (call,))
    yield Figure("dense, 1 x 8 x 512 x 64, both ways", 1e3 * ms["small"], "us", PEER, ("small",))


def record(figure: Figure, found: Mapping[str, gpu_inspection.Inspection]) -> evidence.Record:
    """Build the record: the figure at the roofline, the target's share of the roofline, facts of the compiled calls."""
    facts: dict[str, Any] = {"target": figure.target}
    if figure.target not in (None, PEER):
        sign, goal = figure.target.split()
        facts["of_roofline"] = round(float(goal) / figure.bound if sign == ">=" else figure.bound / float(goal), 4)
    names = ("kernel", "config", "roofline_ms", "bound_by", "flops", "moved_bytes", "registers", "spill_bytes", "gates")
    facts |= {call: {name: getattr(found[call], name) for name in names} for call in figure.calls}
    what = evidence.What(op=OP, kernel="gpu", workload=f"{figure.name}, {CHIP}", dtype="bfloat16")
    how = evidence.How(check="a bound from the call's work, not measured")
    return evidence.make(what, [figure.bound], command=COMMAND, unit=figure.unit, how=how, facts=facts)


def study(options: Any) -> int:
    """Compile the calls and append a record per figure."""
    found = {}
    for name in CALLS:
        found[name] = inspect(name, options.limit_s)
        print(f"{name}: at least {found[name].roofline_ms:.4g} ms, bound by {found[name].bound_by}", flush=True)
    made = [record(figure, found) for figure in all_figures(found)]
    evidence.append(options.evidence, made)
    for each in made:
        print(f"{each.what.workload}: {each.median:.4g} {each.unit} at the roofline; target {each.facts['target']}")
    return 0
