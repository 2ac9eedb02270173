"""The planner's memory, times and verdicts against sums by hand, stored records of the compiler, and its own laws."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tessera.core.hardware import CHIPS, LINK_BYTES_PER_S, USABLE_BYTES
from tessera.deviceless import plan_check
from tessera.deviceless.tpu.predict import CALIBRATED
from tessera.measure import evidence
from tessera.models.catalogue import MODELS
from tessera.models.files.source import open_source
from tessera.models.footprint import Types, divide, weight_bytes
from tessera.runtime import planner, roofline
from tessera.runtime.planner import CACHES, WEIGHTS, plan
from tessera.runtime.roofline import DERIVED, SHARES, Question, reading, recipe, speed
from tessera.sparse.kascade import Kascade

EVIDENCE = Path(__file__).parents[2] / "evidence"
LLAMA = MODELS["llama-3.1-8b"]


def question(name="llama-3.1-8b", **changes):
    config = MODELS[name]
    sizes = {"chip": "v6e", "devices": 8, "batch": 4, "length": 131072}
    return Question(config=config, policy=recipe(config, name), **(sizes | changes))


def test_every_chip_has_what_the_planner_needs():
    names = {chip.name for chip in CHIPS}
    assert names == LINK_BYTES_PER_S.keys() == USABLE_BYTES.keys() == SHARES.keys()
    for chip in CHIPS:
        assert 0.7 * chip.memory_bytes < USABLE_BYTES[chip.name] * chip.devices < 1.01 * chip.memory_bytes
    assert roofline.BANDWIDTH_SHARE == CALIBRATED.bandwidth_share


def test_shares_of_attention_are_those_of_the_schedules():
    """The newest schedules of a 131,072-token prefill: flops / time / peak."""
    peaks = {chip.name: chip.bf16_flops_per_s / chip.devices for chip in CHIPS}
    names = {"dense long": "dense", "score long 32": "score", "sparse kascade 32": "sparse"}
    found = {}
    for record in evidence.read(EVIDENCE / "tpu-figures.jsonl"):
        if record.what.workload.startswith("kascade prefill against dense"):
            chip = record.what.workload.rpartition(", ")[2]
            for call, role in names.items():
                if (facts := record.facts.get(call)) and "flops" in facts:
                    found[chip, role] = facts["flops"] / (facts["ms"] / 1e3) / peaks[chip]
    assert found == {
        (chip, role): pytest.approx(getattr(SHARES[chip], role), rel=0.01)
        for chip in DERIVED
        for role in names.values()
    }


def test_the_recipe_has_the_papers_anchors_and_reads_a_tenth():
    policy = recipe(LLAMA, "llama-3.1-8b")
    assert policy.anchors == (0, 2, 8, 13, 14)
    assert len(recipe(MODELS["llama-3.1-70b"]).anchors) == 13  # 5 of 32 layers, rounded up
    found = reading(LLAMA, policy, 131072)
    assert found.dense + found.score == 5 * 131072
    assert found.sparse == 27 * (13184 + 128)  # a tenth in whole tiles of 128, and the row's own tile
    assert reading(LLAMA, None, 1000) == (32 * 1000, 0, 0, 0)
    assert reading(replace(LLAMA, window=4096), None, 131072).dense == 32 * 4096
    assert reading(LLAMA, replace(policy, crossover_tokens=4096), 1000) == (32 * 1000, 0, 0, 0)


def test_a_plan_that_decodes_dense_is_predicted_as_dense():
    """Decode has its own cross-over, independent of prefill's."""
    asked, late = question(), replace(question().policy, decode_crossover=131073)
    dense, sparse = speed(asked, Types(), None), speed(asked, Types(), asked.policy)
    assert speed(asked, Types(), late).decode_ms == dense.decode_ms > sparse.decode_ms
    assert speed(asked, Types(), late).prefill_s == sparse.prefill_s
    early = replace(late, crossover_tokens=10**6, decode_crossover=0)
    assert speed(asked, Types(), early).decode_ms == sparse.decode_ms


def test_budgets_and_layers_that_choose_for_themselves():
    """Budget 0 reads only what is always read, 1 reads all; `own` layers also rank all keys."""
    heads = ((0, 1),) * 3
    policy = Kascade(
        anchors=(0,), own=(2,), head_map=heads, budgets=((1.0, 1.0), (0.0, 1.0), (0.5, 0.5)), tile=16, minimum=0
    )
    config = replace(LLAMA, num_layers=3, num_kv_heads=2)
    found = reading(config, policy, 1600)
    assert found == (0, 1600, (32 + 1600) / 2 + 800 + 32, 1600)


def test_decode_by_hand():
    """8B, 4 x 131,072 keys on eight v6e: bytes over 0.8 of 1,638 GB/s, and what a ring sends over half the links."""
    found = speed(question(), Types(), None)
    weights = (32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096) * 2 / 8 + 65 * 4096 * 2
    keys = 2 * 32 * 4 * 131072 * 128 * 2
    assert found.decode_parts_ms["weights"] == pytest.approx(1e3 * weights / 1310.4e9)
    assert found.decode_parts_ms["cache"] == pytest.approx(1e3 * keys / 1310.4e9)
    sent = 32 * 2 * 2 * 7 / 8 * 4 * 4096 * 2 + 7 / 8 * 4 * 128256 * 4
    assert found.decode_parts_ms["links"] == pytest.approx(1e3 * sent / 224e9)
    parts = found.decode_parts_ms
    assert found.decode_ms == pytest.approx(parts["weights"] + parts["cache"] + parts["links"])
    assert found.decode_bound == "cache"
    assert found.tokens_per_s == pytest.approx(4e3 / found.decode_ms)
    sparse = speed(question(), Types(), question().policy)
    assert sparse.decode_ms < 0.4 * found.decode_ms
    assert sparse.prefill_s < found.prefill_s


def test_a_plan_says_how_a_prefill_chunk_is_shared():
    """Two ring sums of R x 4,096 bfloat16 against one layer's weights and queries, keys, values and outputs."""
    found = plan(question(chunk=131072, batch=1)).json()["exchange"]
    assert found["by_heads"] == 2 * 2 * 7 / 8 * 131072 * 4096 * 2
    assert found["by_rows"] == pytest.approx(7 / 8 * (218_103_808 * 2 + 16384 * (2 * 32 + 2 * 8) * 128 * 2))
    assert found["by_heads"] > 5 * found["by_rows"]
    assert plan(question(devices=1)).json()["exchange"] is None


def test_what_fits_and_the_first_choice():
    """70B, 4 x 131,072 tokens on eight v6e: not in bfloat16; the widest types that fit come first."""
    answer = plan(question("llama-3.1-70b"))
    pairs = {(pair.weights, pair.cache): pair for pair in answer.pairs}
    assert list(pairs) == [(name, cache) for name in WEIGHTS if name != "gguf" for cache in CACHES]
    assert not pairs["bfloat16", "bfloat16"].fits
    assert "of 31.2 GiB usable per device: weights 16.4 GiB, cache 20.0 GiB" in pairs["bfloat16", "bfloat16"].why_not
    assert answer.choice is pairs["bfloat16", "int8"]
    assert pairs["int8", "int8"].kascade.decode_ms <= 9.0
    alone = plan(question("llama-3.1-70b", devices=1))
    assert alone.choice is None
    assert all("the weights alone need" in pair.why_not for pair in alone.pairs)
    assert {(pair.longest, pair.largest) for pair in alone.pairs} == {(0, 0)}
    assert json.loads(json.dumps(answer.json()))["first_choice"] == {"weights": "bfloat16", "cache": "int8"}


def test_int8_weights_decode_faster():
    """8B, one sequence of 8,192 tokens on eight v6e: 1.7 times bfloat16's tokens, the cache being equal."""
    wide, _, narrow, _ = plan(question(batch=1, length=8192), weights=("bfloat16", "int8")).pairs
    assert wide.dense.decode_ms >= 1.7 * narrow.dense.decode_ms


def test_what_load_refuses_does_not_fit():
    """Groups that devices would cut, and an int8 cache dealt over a context axis, are refused by name."""
    cut = {pair.weights: pair for pair in plan(question(devices=8, length=8192), weights=("int4-g128", "int8")).pairs}
    assert cut["int4-g128"].fits
    config = replace(LLAMA, intermediate_size=14336 + 64 * 8)
    pairs = plan(replace(question(length=8192), config=config), weights=("int4-g128", "int4-g64")).pairs
    assert [pair.fits for pair in pairs] == [True, True, False, False]
    assert "multiple of 128 inputs, but mlp.down_proj.weight has 1856 on each of 8 devices" in pairs[2].why_not
    dealt = plan(question(devices=16, length=8192), weights=("bfloat16",)).pairs
    assert [pair.fits for pair in dealt] == [True, False]
    assert "cannot be split over devices" in dealt[1].why_not


def test_a_gguf_file_is_planned_as_it_is_stored(tmp_path):
    """Its blocks come after the float types that it is widened to; another model has none to keep."""
    import gguf
    from gguf_files import Q, tiny_model, write_gguf

    metadata, tensors = tiny_model(256, hidden=64)
    kept = {name: (gguf.quants.quantize(x, Q.Q4_1), Q.Q4_1) for name, (x, _) in tensors.items() if x.ndim == 2}
    path = write_gguf(tmp_path / "x.gguf", metadata, tensors | kept)
    source = open_source(path)
    policy = recipe(source.config)
    asked = Question(config=source.config, chip="v6e", devices=1, batch=1, length=64, policy=policy)
    pairs = plan(asked, source=source).pairs
    assert [pair.weights for pair in pairs[::2]] == list(WEIGHTS)
    matrices = sum(x.size for x, _ in tensors.values() if x.ndim == 2)
    assert pairs[2].parts.weights == matrices * 5 // 8 + 128 * len(kept) + pairs[2].parts.vectors
    with pytest.raises(ValueError, match="weights='gguf' keeps the blocks of a GGUF file: name such a file"):
        plan(question(), weights=("gguf",))
    with pytest.raises(ValueError, match="weights='int5' must be one of bfloat16, gguf, int8"):
        plan(question(), weights=("int5",))


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.2-1b"])
def test_the_longest_and_the_largest_are_just_that(name):
    asked = question(name, devices=4, batch=2, length=8192)
    for pair in plan(asked, weights=("bfloat16", "int4-g32")).pairs:
        types = Types(weights=pair.weights, cache=pair.cache)
        for field, size in (("length", pair.longest), ("batch", pair.largest)):
            assert planner.fits(planner.peak(asked, types, **{field: size}), pair.usable_bytes)
            assert not planner.fits(planner.peak(asked, types, **{field: size + 1}), pair.usable_bytes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"chip": "v9"}, "chip='v9' must be one of v4, v5e"),
        ({"length": 0}, "length=0 must be from 1 to 2,147,483,647"),
        ({"batch": 10**12}, "batch=1000000000000 must be from 1 to"),
        ({"policy": recipe(MODELS["llama-3.2-1b"])}, "the Kascade plan has 16 layers and the model 32"),
    ],
)
def test_bad_questions(changes, words):
    with pytest.raises(ValueError, match=words):
        replace(question(), **changes)


WORDS = re.compile(
    r"(?P<model>\S+) (?P<phase>\w+) B (?P<batch>\d+) S (?P<length>\d+), (?P<devices>\d+) x (?P<chip>\w+)"
    r"(?:, (?P<weights>\w+) weights)?(?:, (?P<cache>\w+) cache)?"
)
"""How a stored record names a step."""


def planned_ms(case, call):
    """Predict a compiled step's milliseconds: the roofline time, plus the time of the copies that its scan makes.

    A prefill step is the prompt's last chunk. Its roofline time is the whole prompt's minus the earlier chunks'.
    """
    config, chip = MODELS[case["model"]], roofline.chip(case["chip"])
    given = {name: case.get(name) or config.dtype for name in ("weights", "cache")}
    types, policy = Types(**given, dtype=config.dtype), recipe(config, case["model"])
    moved = plan_check.planned(config, case["chip"], case["devices"], call).cache
    if case["chip"] in plan_check.LAID_OUT_AGAIN:
        kinds = weight_bytes(config, types=types, division=divide(config, case["devices"]))
        moved += kinds["attention"] + kinds["mlp"]
    copies_ms = 2e3 * moved / (chip.bytes_per_s / chip.devices * roofline.BANDWIDTH_SHARE)

    def at(length):
        sizes = {name: case[name] for name in ("chip", "devices", "batch")}
        asked = Question(config=config, policy=policy, length=length, **sizes)
        return speed(asked, types, policy if call["attention"] == "kascade" else None)

    if case["phase"] == "decode":
        return at(case["length"]).decode_ms + copies_ms
    before = at(case["length"] - roofline.CHUNK).prefill_s if case["length"] > roofline.CHUNK else 0.0
    return 1e3 * (at(case["length"]).prefill_s - before) + copies_ms


def test_stored_steps_agree_with_the_compiler():
    """Memory within 2 % of the compiler's, 3 % for prefill, and never below it; never "fits" where it refused; decode
    times within 11 % of the schedules'.

    The largest error, 10.0 %, is int8's at 8,192 tokens: the 0.09 ms by which bfloat16 is above, too, of half the time.
    """
    records = [r for r in evidence.read(EVIDENCE / "tpu-planner.jsonl") if r.what.op == "planned step"]
    assert len({f"{record.what.workload} {record.what.kernel}" for record in records}) >= 12
    for record in records:
        facts = record.facts
        found = {name: word for name, word in WORDS.fullmatch(record.what.workload).groupdict().items() if word}
        case = found | {name: int(found[name]) for name in ("batch", "length", "devices")}
        call = {"queries": roofline.CHUNK, "tile": 128, "query_tile": 32, "fraction": 0.1}
        call |= {name: case[name] for name in ("phase", "batch", "length", "weights", "cache") if name in case}
        call["attention"] = record.what.kernel
        mine = plan_check.planned(MODELS[case["model"]], case["chip"], case["devices"], call)
        assert mine.total == facts["planned_bytes"], "the planner has changed: `tessera fit --compile` checks it"
        usable = USABLE_BYTES[case["chip"]]
        if facts["hbm_bytes"] is None:
            assert not planner.fits(mine, usable)
        else:
            assert 0 <= mine.total / facts["hbm_bytes"] - 1 <= {"decode": 0.02, "prefill": 0.03}[case["phase"]]
            assert not planner.fits(mine, usable) or facts["hbm_bytes"] <= usable
        if "planned_ms" in facts:
            near = {"decode": 0.11, "prefill": 0.13}[case["phase"]]
            assert planned_ms(case, call) == pytest.approx(facts["predicted_ms"], rel=near)
