"""Tables of answers, plans, searches, gates, sweeps and oracle trials, with gaps, errors and two machines."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from lab.report import documents as report
from lab.report import real as report_real
from lab.report import tables
from lab.studies import blocks, figures, gpu_gates, sweep
from tessera.measure import evidence, trials, tune, verify
from tessera.measure.evidence import What
from tessera.measure.judge.paired import wilson
from tessera.measure.series import current
from tessera.measure.tune import ship

AMD = {"device": "cpu", "cpu": "AMD EPYC", "cores": 2}
INTEL = {"device": "cpu", "cpu": "Intel(R) Xeon(R) Processor", "cores": 2}
BENCH = "tessera bench --model"
PLAN = {"tile": 64, "query_tile": 32, "fraction": 0.1}


def on(machine, record):
    code = evidence.Code(commit="0123456789abcdef", dirty=False)
    return replace(record, code=code, where=replace(record.where, **machine))


def task(policy, kind, length, scores, suite="demo", density=0.2, machine=AMD, config=PLAN, error=None):
    """Build a record as the former `tessera eval --suite demo` wrote it."""
    low, high = (0.0, 0.0) if not scores else (min(scores), max(scores))
    if scores and set(scores) <= {0.0, 1.0}:
        low, high = wilson(int(sum(scores)), len(scores))
    facts = {"scores": scores, "low": low, "high": high, "length": length, "kind": kind, "policy": policy}
    what = What(op="eval task", kernel="kascade", workload=f"{kind} at {length}: {policy}", config=config)
    fields = {"error": error} if error else {"density": (density,), "facts": facts}
    samples = [float(np.mean(scores))] if scores else []
    command = f"tessera eval --suite {suite}"
    return on(machine, evidence.make(what, samples, command=command, unit="fraction", **fields))


def fidelity(policy, mean, suite="demo", machine=AMD, config=PLAN, error=None):
    """Build a record of closeness as the former suite wrote it."""
    facts = {"perplexity": 3.25, "perplexity_dense": 3.0, "agreement": 0.975, "mean": mean, "low": mean / 2}
    facts |= {"high": 2 * mean, "policy": policy}
    what = What(op="eval fidelity", kernel="kascade", workload=f"held-out text: {policy}", config=config)
    fields = {"error": error} if error else {"facts": facts}
    samples = () if error else [mean] * 5
    command = f"tessera eval --suite {suite}"
    return on(machine, evidence.make(what, samples, command=command, unit="nats", **fields))


def recall(policy, mean, suite="demo", machine=AMD, error=None):
    """Build a record of attention mass as the former suite wrote it."""
    facts = {"per_head": [[1.0, mean]], "sparse_layers": [0], "mean": mean, "low": mean - 0.02, "high": mean + 0.01}
    what = What(op="eval recall", kernel="kascade", workload=f"attention mass: {policy}", config=PLAN)
    fields = {"error": error} if error else {"facts": facts | {"policy": policy}}
    samples = () if error else [mean] * 5
    command = f"tessera eval --suite {suite}"
    return on(machine, evidence.make(what, samples, command=command, unit="fraction", **fields))


def lines(name, records):
    """Return (header, rows) of a table, after checking that all rows have as many cells as the header."""
    text = report.render(name, records, every_machine=True)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1
    assert "commit 012345678;" in text
    return table[0], table[2:]


def demo(machine=AMD):
    return [
        task("dense", "single", 4096, [1.0] * 10, density=1.0, machine=machine),
        task("dense", "multi_key", 4096, [1.0] * 9 + [0.0], density=1.0, machine=machine),
        fidelity("fraction 0.2", 0.004, machine=machine),
        task("fraction 0.2", "single", 4096, [1.0] * 8 + [0.0] * 2, density=0.1, machine=machine),
        task("fraction 0.2", "multi_key", 4096, [1.0, 0.5], density=0.3, machine=machine),
        task("fraction 0.2", "single", 1024, [0.0] * 10, machine=machine),
    ]


def test_policies_stand_side_by_side_at_the_longest_length():
    header, rows = lines("eval", demo())
    assert header == (
        "| policy, tasks of 4,096 tokens | machine | single | multi key | keys read | KL per token, nats (95 %) "
        "| same best guess |"
    )
    assert rows == [
        "| dense | AMD EPYC, 2 cores | 100 % (72 to 100 %) | 90 % (60 to 98 %) | 100.0 % |  |  |",
        "| fraction 0.2 | AMD EPYC, 2 cores | 80 % (49 to 94 %) | 75 % | 20.0 % "
        "| 0.00400 (0.00200 to 0.00800) | 97.5 % |",
    ]


def test_a_half_done_demo_on_a_second_machine_leaves_cells_empty_and_shows_its_error():
    second = [demo(INTEL)[0], task("fraction 0.2", "single", 4096, (), machine=INTEL, error="MemoryError: a | b")]
    _, rows = lines("eval", [*demo(), *second])
    assert rows[1] == "|  | Intel Xeon, 2 cores | 100 % (72 to 100 %) |  | 100.0 % |  |  |"
    assert rows[3] == "|  | Intel Xeon, 2 cores | error: MemoryError: a \\| b |  |  |  |  |"
    assert "\nIntel Xeon, 2 cores, jax " in report.render("eval", [*demo(), *second], every_machine=True)


def test_attention_mass_is_a_column_where_a_record_has_it():
    records = [
        *demo(),
        recall("fraction 0.2", 0.9725),
        *demo(INTEL),
        recall("fraction 0.2", 0, machine=INTEL, error="x"),
    ]
    header, rows = lines("eval", records)
    assert "| keys read | attention mass kept (95 %) | KL per token, nats (95 %) |" in header
    assert rows[0].endswith("| 100.0 % |  |  |  |"), "dense has no fidelity"
    assert rows[2].endswith("| 20.0 % | 97.2 % (95.2 to 98.2 %) | 0.00400 (0.00200 to 0.00800) | 97.5 % |")
    assert rows[3].endswith("| 20.0 % | error: x | 0.00400 (0.00200 to 0.00800) | 97.5 % |")
    assert "attention mass" not in report.render("eval", [*demo(), recall("fraction 0.2", 0.9, suite="smoke")])


@pytest.mark.parametrize("suite", ["study", "smoke", "demo --model FOLDER"])
def test_suites_that_ask_the_same_do_not_replace_each_other(suite):
    other = [fidelity("fraction 0.2", 0.5, suite), task("fraction 0.2", "single", 4096, [0.0], suite)]
    assert lines("eval", [*demo(), *other]) == lines("eval", demo())
    assert lines("eval", [*other, *demo()]) == lines("eval", demo())
    later = fidelity("fraction 0.2", 0.02)
    assert "0.0200 (0.0100 to 0.0400)" in report.render("eval", [*demo(), later])


def test_a_row_is_of_one_plan():
    """Answers of the previous plan appear in no cell of the new plan's row, and in no mean."""
    _, rows = lines("eval", demo())
    new = PLAN | {"minimum": 256}
    later = replace(task("fraction 0.2", "single", 4096, [1.0] * 10, config=new), date="2030-01-01T00:00:00+00:00")
    _, mixed = lines("eval", [*demo(), later])
    assert mixed == [rows[0], "| fraction 0.2 | AMD EPYC, 2 cores | 100 % (72 to 100 %) |  | 20.0 % |  |  |"]


def tiles(tile, query_tile, mean, found, machine=AMD):
    config = PLAN | {"tile": tile, "query_tile": query_tile}
    name = f"tile {tile}, query tile {query_tile}"
    scores = [1.0] * found + [0.0] * (10 - found)
    return [
        fidelity(name, mean, "study", machine, config),
        task(name, "single", 4096, scores, "study", machine=machine, config=config),
    ]


def test_tiles_make_a_grid_and_what_is_not_done_is_empty():
    broken = fidelity("tile 128, query tile 32", 0, "study", error="killed")
    records = [*tiles(128, 16, 0.01, 7), broken, *tiles(16, 16, 0.002, 10), *tiles(16, 32, 0.003, 9)[:1]]
    records += [*tiles(16, 16, 0.004, 8, INTEL), fidelity("tile 16, query tile 16", 9.0, "smoke")]
    header, rows = lines("granularity", records)
    assert header.endswith("keys per tile | machine | 16 queries | 32 queries |")
    assert rows == [
        "| 16 | AMD EPYC, 2 cores | 0.00200 (0.00100 to 0.00400); 10/10 | 0.00300 (0.00150 to 0.00600) |",
        "|  | Intel Xeon, 2 cores | 0.00400 (0.00200 to 0.00800); 8/10 |  |",
        "| 128 | AMD EPYC, 2 cores | 0.0100 (0.00500 to 0.0200); 7/10 | error: killed |",
    ]


def test_other_choices_follow_the_plan_as_it_is():
    records = [fidelity("fraction 0.05", 0.01, "study"), *tiles(16, 32, 0.5, 1), *tiles(64, 32, 0.002, 10)]
    records += [*tiles(64, 32, 0.003, 9, INTEL)[:1], task("heads pooled", "single", 4096, [1.0, 0.0], "study")]
    records += [task("3 anchors", "single", 4096, (), "study", error="killed"), fidelity("fraction 0.05", 0.7)]
    _, rows = lines("study", records)
    assert rows == [
        "| the plan as it is | AMD EPYC, 2 cores | 0.00200 (0.00100 to 0.00400) | 3.25 (3.00) | 10/10 (72 to 100 %) "
        "| 20.0 % |",
        "|  | Intel Xeon, 2 cores | 0.00300 (0.00150 to 0.00600) | 3.25 (3.00) |  |  |",
        "| fraction 0.05 | AMD EPYC, 2 cores | 0.0100 (0.00500 to 0.0200) | 3.25 (3.00) |  |  |",
        "| heads pooled | AMD EPYC, 2 cores |  |  | 1/2 | 20.0 % |",
        "| 3 anchors | AMD EPYC, 2 cores |  |  | error: killed |  |",
    ]


def search(refused):
    """Build the record of a search whose winner held, or of one whose winner was refused."""
    searched = tune.task_of("prefill_16k_gqa", "dense")
    default = asdict(searched.kernel.default_config(searched.spec, searched.shapes))
    name, value = next((n, v) for n, v in default.items() if isinstance(v, int) and not isinstance(v, bool))
    better = default | {name: 2 * value}
    tried = [{"config": default, "error": None}, {"config": better, "error": None}, {"config": {}, "error": "hung"}]
    found = {"default": default, "winner": default if refused else better, "gain": 1.01 if refused else 1.25}
    found |= {"interval": (1.2, 1.3), "elsewhere": {}, "confirmed": not refused, "candidates": tried, "replayed": 0}
    found |= {"refused": better} if refused else {}
    ranks = {"seed_model_with_quick": 0.5, "seed_model_with_final": None, "quick_with_final": 0.875}
    made = ship.record(searched, tune.Budget(), found | {"rank_correlation": ranks}, "tessera tune --workload w")
    shown = (", ".join(f"{n} {v}" for n, v in default.items()), f"{name} {2 * value}")
    return made, shown, searched.kernel.name


def whole(kernel, machine, facts, comparison=None):
    what = What(op="model", kernel=kernel, workload="kascade_prefill", title="prefill, 16 tokens", dtype="float32")
    command = "python -m lab bench --suite cpu --only kascade_prefill"
    return on(machine, evidence.make(what, [2.0] * 5, command=command, facts=facts, comparison=comparison))


@pytest.mark.parametrize(("count", "shown"), [(4, False), (5, True)])
def test_no_page_shows_an_interval_of_fewer_than_five_samples(count, shown):
    """Older records, and records of few documents, still hold intervals of fewer than five samples."""
    versus = evidence.Comparison(against="dense", ratio=1.25, interval=(1.11, 1.33))
    facts = {"attention_share": 0.5, "attention_gain": 2.0, "amdahl_gain": 1.4, "found": [[1]] * count, "kept": 1.0}
    facts |= {"kept_low": 0.51, "kept_high": 1.0, "mean": 0.5, "low": 0.4, "high": 0.6, "scores": [1.0] * count}
    timed = whole("kascade", AMD, facts, versus)
    timed = replace(timed, samples=timed.samples[:count], how=replace(timed.how, iterations=count))
    text = [*(report.render(name, [timed], every_machine=True) for name in ("speed", "amdahl"))]
    text += [report_real.kept(timed), report_real.divergence(timed)]
    text += [draw(timed) for draw in (tables._score, tables._mass, tables._divergence)]
    assert ["(" in found.replace("(95 %)", "") for found in text] == [shown] * len(text)


def test_amdahls_prediction_stands_beside_the_measured_gain():
    facts = {"attention_share": 0.5, "attention_gain": 2.0, "amdahl_gain": 4 / 3}
    versus = evidence.Comparison(against="dense", ratio=1.25, interval=(1.2, 1.3))
    records = [whole("dense", AMD, {}), whole("kascade", AMD, facts, versus)]
    facts = {"attention_share": 1.5, "attention_gain": 2.0}
    records.append(whole("kascade", INTEL, facts, replace(versus, interval=None)))
    _, rows = lines("amdahl", records)
    assert rows == [
        "| prefill, 16 tokens, float32 | AMD EPYC, 2 cores | 50.0 % | 2.00x | 1.33x | 1.25x (1.20 to 1.30) |",
        "|  | Intel Xeon, 2 cores | 150.0 % | 2.00x | attention alone took longer than the whole | 1.25x |",
    ]


def test_the_use_of_each_machine_stands_side_by_side():
    shares = {"mfu": 0.5, "bandwidth_share": 0.1}
    chip = shares | {"bandwidth_share_nominal": 0.05, "mfu_nominal": 0.25}
    tpu = {"device": "TPU v6 lite", "cpu": "Host", "cores": 2}
    records = [whole("dense", AMD, shares), whole("dense", tpu, chip), whole("kascade", AMD, shares)]
    header, rows = lines("use", [*records, whole("transformers", AMD, {})])
    assert header == "| flops; bandwidth in use |  | AMD EPYC, 2 cores | TPU v6 lite |"
    assert rows == [
        "| prefill, 16 tokens, float32 | dense | 50.0 %; 10.0 % | 50.0 %; 10.0 % (data sheet: 25.0 %; 5.0 %) |",
        "|  | kascade | 50.0 %; 10.0 % |  |",
    ]


def test_a_search_shows_what_won_how_sure_it_is_and_what_failed():
    (won, (default, better), kernel), (lost, _, _) = search(refused=False), search(refused=True)
    crashed = evidence.make(What(op="tune", kernel="k", workload="w"), (), command="c", error="no default runs")
    other = replace(on(AMD, won), suite="tpe")
    _, rows = lines("tune", [on(AMD, won), on(INTEL, lost), on(AMD, crashed), other])
    ranks = "| 3, 1 failed | 0.50 |  | 0.88 |"
    lead = f"| prefill_16k_gqa, dense | AMD EPYC, 2 cores | {kernel} | {default} "
    assert rows == [
        f"{lead}| {better} | genetic, random seeds | 1.25x (1.20 to 1.30) {ranks}",
        f"|  | Intel Xeon, 2 cores | {kernel} | {default} | the default; not confirmed: {better} "
        "| genetic, random seeds | 1.00x "
        f"{ranks}",
        "| w | AMD EPYC, 2 cores | k |  | error: no default runs | genetic |  |  |  |  |  |",
        f"{lead}| {better} | tpe, random seeds | 1.25x (1.20 to 1.30) {ranks}",
    ]


def test_tuned_blocks_of_tpus_have_a_column_per_chip_and_the_newest_stands():
    name = "decode dense"
    kernel = blocks.kernel_of(blocks.CASES[name])
    default = asdict(kernel.default_config(*blocks.CASES[name].call()))
    better = default | {"block_s": 2 * default["block_s"]}
    slow = {"chip": "v5e", "case": name, "default": True, "config": default, "ms": 2.0}
    fast = {"chip": "v5e", "case": name, "default": False, "config": better, "ms": 1.0}
    both, alone = blocks.record_of("v5e", name, [slow, fast]), blocks.record_of("v6e", name, [slow])
    old = replace(on(INTEL, alone), date="2020-01-01T00:00:00+00:00", median=9.0)
    header, rows = lines("blocks", [on(AMD, both), on(AMD, alone), old])
    assert header == "| kernel | call, predicted | v5e | v6e |"
    changed = f"1.00 ms, 2.00x: block_s {better['block_s']}"
    assert rows == [f"| {kernel.name} | decode dense | {changed} | 2.00 ms, default |"]


def choice(name, chip, samples, cycles, **result):
    """Build a record of the study of kernel choices, which no longer exists."""
    what = What(op="kernel choice", kernel="tpu_prefill_dense", workload=f"{name}, {chip}", dtype="bfloat16")
    facts = {"chip": chip, "choice": name, "full": {"cycles": cycles}}
    return on(AMD, evidence.make(what, samples, command="study", facts=facts, **result))


def test_choices_undone_show_how_much_longer_the_call_and_its_main_loop_take():
    slower = evidence.Comparison(against="as it is", ratio=0.8)
    found = [choice("as it is", "v5e", [10e-3], 1000), choice("prefetch", "v5e", [12.5e-3], 1000, comparison=slower)]
    found += [choice("as it is", "v6e", [4e-3], 500), choice("prefetch", "v6e", [], 0, error="VMEM: it is full")]
    header, rows = lines("choices", found)
    assert header == "| undone, predicted | v5e | v6e |"
    assert rows == [
        "| as it is | 10.0 ms; 1,000 cycles | 4.00 ms; 500 cycles |",
        "| prefetch | 1.25x; 1.00x | error: VMEM: it is full |",
    ]


def gate_case(kernel, config, registers, spilled=(0, 0), broken=()):
    report_of_one = {"kernel": "k", "registers": registers, "spill_bytes": spilled, "shared_bytes": 1024 * registers}
    case = {"kernel": kernel, "settings": config, "config": None, "broken": list(broken), "kernels": [report_of_one]}
    return case | {"head_dim": 128, "dtype": "bfloat16", "tile": 128, "mask": "causal", "group": 4}


def test_gates_count_configurations_and_cases_and_mark_what_breaks():
    found = [gate_case("gpu_a", "one", 128), gate_case("gpu_a", "one", 168), gate_case("gpu_a", "two", 100)]
    found += [gate_case("gpu_b", "one", 255, (64, 32), ["spilled"]), gate_case("gpu_b", "one", 90)]
    found += [gate_case("gpu_c", "one", 0, broken=["hung"]) | {"kernels": []}]
    made = [on(AMD, r) for r in gpu_gates.records(found, "python -m lab study compiles --platform gpu")]
    again = on(INTEL, made[0])  # what depends only on a compiler is counted once
    _, rows = lines("gates", [*made, again])
    assert rows == [
        "| gpu_a, h200 | 2 | 3 | 3 | 168 | 0 | 168 KiB |",
        "| gpu_b, h200 | 1 | 2 | **1** | 255 | **96** | 255 KiB |",
        "| gpu_c, h200 | 1 | 1 | **0** |  |  |  |",
    ]


def test_gates_forget_a_configuration_that_the_last_run_did_not_have():
    def run(day, *cases):
        made = gpu_gates.records([gate_case("gpu_a", *case) for case in cases], "gates")
        return [replace(on(AMD, record), date=f"2026-11-{day}T00:00:00+00:00") for record in made]

    _, rows = lines("gates", [*run(20, ("gone", 255), ("one", 200), ("two", 200)), *run(21, ("one", 100), ("two", 90))])
    assert rows == ["| gpu_a, h200 | 2 | 2 | 2 | 100 | 0 | 100 KiB |"]


def real(op, question, policy, density, facts, command="tessera eval --suite real-full"):
    what = What(op=f"eval real {op}", kernel="plan", workload=f"{question}: {policy}", dtype="float32")
    facts = facts | {"policy": policy, "of_dense": 8, "mcnemar_p": 1.0, "found": [[1, 1]] * 5}
    return on(AMD, evidence.make(what, [1.0] * 5, command=command, unit="fraction", density=(density,), facts=facts))


def needles(policy, kept, density, length=4096, **fields):
    facts = {"kind": "single", "length": length, "kept": kept, "kept_low": kept - 0.25, "kept_high": kept}
    return real("task", f"single at {length}", policy, density, facts, **fields)


def closeness(domain, policy, mean, density, start=4096, **fields):
    facts = {"domain": domain, "from": start, "to": 2 * start, "mean": mean, "low": mean / 2, "high": 2 * mean}
    return real("text", f"{domain}, tokens {start} to {2 * start}", policy, density, facts, **fields)


def prefill(kernel, seconds, tokens=8192, command=f"{BENCH} smollm2", date="2030-01-02", machine=AMD):
    versus = evidence.Comparison(against="dense", ratio=1.5) if kernel == "kascade" else None
    what = What(op="model", kernel=kernel, workload=f"own_model_{tokens}", dtype="float32", config={"tokens": tokens})
    density = (0.25,) if versus else (1.0,)
    made = evidence.make(what, [seconds], command=command, comparison=versus, density=density)
    return replace(on(machine, made), date=f"{date}T00:00:00+00:00")


def chip(name, ratio, met=True, figure=figures.KASCADE):
    versus = evidence.Comparison(against="dense", ratio=ratio, target=">= 3", met=met)
    what = What(op="predicted figure", kernel="tpu", workload=f"{figure}, {name}")
    return on(AMD, evidence.make(what, [ratio], command="python -m lab study tpu-figures", comparison=versus))


def promises():
    """Return row -> records for the headline's rows, and some records that belong in no row."""
    found = [gate_case("gpu_a", "one", 128), gate_case("gpu_a", "two", 168), gate_case("gpu_b", "one", 100)]
    texts = {"code": 0.02, "reference": 0.04, "help": 0.01}
    return {
        "needles": [
            *(needles("the plan", kept, 0.375, length=length) for length, kept in ((4096, 1.0), (8192, 0.875))),
            needles("window + sink", 0.5, 0.25),
            needles("control: nothing far", 0.25, 0.125),
            *(
                needles(f"rival {n}", 0.9, 0.5, command="tessera eval --suite real-full --model FOLDER")
                for n in range(9)
            ),
        ],
        "text": [
            *(closeness(domain, "the plan", mean, 0.125) for domain, mean in texts.items()),
            *(closeness(domain, "window + sink", 4 * mean, 0.25) for domain, mean in texts.items()),
            closeness("code", "the plan", 9.0, 0.5, start=1024),
        ],
        "prefill": [
            record
            for kernel, seconds in (("dense", 6.0), ("kascade", 4.0))
            for record in (
                prefill(kernel, seconds),
                prefill(kernel, 99.0, tokens=4096),
                prefill(kernel, 98.0, date="2030-01-01", machine=INTEL),
                prefill(kernel, 97.0, date="2030-01-03", machine={"device": "TPU v6 lite"}),
                prefill(
                    kernel, 96.0, date="2030-01-03", machine={"device": "cpu", "cpu": "X"}, command=f"{BENCH} x.gguf"
                ),
            )
        ],
        "kascade prefill": [
            *(chip("v5e", 3.5), chip("v6e", 4.25)),
            *(chip(name, ratio, figure=figures.KASCADE_32) for name, ratio in (("v5e", 3.0), ("v6e", 3.25))),
        ],
        "gates": [on(AMD, made) for made in gpu_gates.records(found, "python -m lab study compiles --platform gpu")],
    }


def test_the_headline_has_four_rows_each_from_its_records():
    _, rows = lines("summary", [record for own in promises().values() for record in own])
    assert rows == [
        "| SmolLM2-135M: needles kept, of those that dense finds "
        "| 4,096 tokens: 100 % (75 to 100), 38 % of keys read; "
        "8,192 tokens: **88 % (62 to 88), 38 % of keys read** "
        "| 4,096 tokens: window + sink, 50 % (25 to 50), 25 % of keys read; "
        "control: nothing far, 25 % (0 to 25), 12 % of keys read "
        "| measured, [answers](answers.md) |",
        "| SmolLM2-135M: KL to dense per token, tokens 4,096 to 8,192, the worst of 3 domains (reference) "
        "| 0.0400 (0.0200 to 0.0800) nats, 12 % of keys read "
        "| window + sink, 0.160 (0.0800 to 0.320) nats, 25 % of keys read | measured, [answers](answers.md) |",
        "| SmolLM2-135M: prefill of 8,192 tokens on 2 CPU cores | 4.00 s, 25 % of keys read | dense, 6.00 s: 1.50x "
        "| measured, [speed](speed.md) |",
        "| kernels without a chip: TPU prefill of 131,072 tokens; Hopper machine code "
        "| TPU, predicted: 3.00x to 3.25x as fast at the default query tile of 32, 3.50x to 4.25x at 128 (v5e, v6e); "
        "Hopper, compiled: 3 of 3 cases pass every gate "
        "| TPU: our dense kernel on the same chip "
        "| not run on a chip yet, [TPU](tpu-figures.md), [Hopper](gpu-figures.md) |",
    ]


def test_a_plan_as_it_runs_and_its_choice_alone_are_told_apart():
    """A run with a cross-over is what users get; a longer run without one judges the choice of keys from the start."""
    alone = [needles("the plan", 0.5, 0.25), needles("control: nothing far", 0.0, 0.1)]
    runs = needles("the plan", 1.0, 0.5)
    what = replace(
        runs.what, workload="single at 4096, dense before 2,048: the plan", config={"crossover_tokens": 2048}
    )
    runs = replace(runs, what=what, code=replace(runs.code, commit="d" * 40))
    assert "100 %" in report.render("real-tasks", [*alone, runs])
    assert "| 50 %" in report.render("real-tasks-alone", [*alone, runs])
    assert "| 50 %" in report.render("real-tasks", alone)


def test_the_readmes_status_has_one_figure_per_platform():
    found = promises()
    text = report.render("status", [record for own in found.values() for record in own])
    assert text.splitlines()[2:] == [
        "| CPU | measured | prefill of 8,192 tokens, SmolLM2-135M: 1.50x as fast as dense, 25 % of keys read "
        "| [speed](docs/speed.md), [answers](docs/answers.md) |",
        "| TPU (v5e, v6e) | compiled; times predicted | prefill of 131,072 tokens, the paper's recipe: "
        "3.00x to 3.25x as fast as dense, predicted | [TPU](docs/tpu-figures.md) |",
        "| Hopper | compiled and simulated; never timed | machine code: 3 of 3 cases pass every gate "
        "| [Hopper](docs/gpu-figures.md) |",
    ]
    found["kascade prefill"] += [chip("v7x", 2.5, met=False, figure=figures.KASCADE_32)]
    assert "**2.50x to 3.25x**" in report.render("status", [record for own in found.values() for record in own])


def test_the_headline_marks_what_missed_and_what_says_nothing():
    found = promises()
    found["kascade prefill"] += [chip("v7x", 2.0), chip("v7x", 2.5, met=False, figure=figures.KASCADE_32)]
    broken = gate_case("gpu_c", "one", 255, (64, 32), ["spilled"])
    found["gates"] += [
        on(AMD, made) for made in gpu_gates.records([broken], "python -m lab study compiles --platform gpu")
    ]
    plan = found["needles"][0]
    found["needles"][0] = replace(plan, facts=plan.facts | {"against_control": {"says_nothing": True}})
    text = report.render("summary", [record for own in found.values() for record in own])
    assert "that dense finds (says nothing about the choice of keys) |" in text
    assert "**2.50x to 3.25x** as fast at the default query tile of 32, 2.00x to 4.25x at 128 (v5e, v6e, v7x)" in text
    assert "Hopper, compiled: **3 of 4** cases" in text


@pytest.mark.parametrize("row", ["needles", "text", "prefill", "kascade prefill", "gates"])
def test_the_readmes_table_is_refused_without_one_of_its_rows(row):
    kept = [record for name, own in promises().items() if name != row for record in own]
    with pytest.raises(ValueError, match=f"table 'summary' has no record of {row}"):
        report.render("summary", kept)


def test_the_roadmap_says_of_every_target_what_its_record_says():
    found = promises()
    found["kascade prefill"].append(chip("v7x", 2.0, met=False))
    slow = evidence.Comparison(against="torch", ratio=0.9, target=">= 1.5", met=False)
    records = [record for own in found.values() for record in own]
    records += [whole("ours", AMD, {}, slow), whole("ours", INTEL, {}, replace(slow, ratio=1.6, met=True))]
    roofline = What(op="roofline figure", kernel="gpu", workload="decode, h200")
    roof = evidence.make(roofline, [4.0], command="c", unit="x", facts={"target": ">= 3"})
    _, rows = lines("roadmap", [*records, on(AMD, roof)])
    assert "| answers kept, SmolLM2-135M | >= 95 % of the needles at 4,096 tokens | 100 % (75 to 100) | yes |" in rows
    assert "|  | >= 95 % of the needles at 8,192 tokens | 88 % (62 to 88) | **no** |" in rows
    assert any(row.endswith("| 0.90x, 1.60x on 2 machines | **1 of 2** |") for row in rows)
    assert any(
        "query tile 128" in row and row.endswith("| v5e 3.50, v6e 4.25, v7x 2.00 | **2 of 4** |") for row in rows
    )
    assert rows[-1] == "| Hopper, speed | decode, h200: >= 3 | none; the roofline is 4.00 x | **not measured** |"


def test_the_sweep_counts_what_compiled_per_chip():
    first, second, *_ = kernels = sorted({case["kernel"] for case in sweep.cases(("v5e",))})
    names = [(kernel, "v5e", True) for kernel in kernels] + [(first, "v6e", True), (first, "v6e", False)]
    found = [{"kernel": kernel, "chip": chip, "compiled": compiled} for kernel, chip, compiled in names]
    every = on(AMD, sweep.records(found, "python -m lab study compiles --platform tpu")[0])
    header, rows = lines("sweep", [every])
    planned = sum(1 for _ in sweep.cases(tuple(sweep.tpu.TOPOLOGIES)))
    assert header == f"| compiled/tried; tried {len(names)} of {planned} planned | v5e | v6e |"
    assert rows[0] == f"| {first} | 1/1 | **1**/2 |"
    assert rows[-1] == f"| all | {len(kernels)}/{len(kernels)} | **1**/2 |"
    some = on(AMD, sweep.records([found[-2]], "python -m lab study compiles --platform tpu")[0])
    assert some.what.workload.startswith(first)
    _, rows = lines("sweep", [every, replace(some, date="2999-01-01T00:00:00+00:00")])
    assert rows[0] == f"| {first} | 1/1 | 1/1 |"


def test_verification_shows_the_distribution_and_names_what_failed():
    kernel = next(k for k in trials.kernels() if not trials.is_simulated(k))
    good, bad = (
        [
            verify.Outcome(trial, np.array([0.125, 0.25, worst]), ())
            for trial in list(verify.trials_of(kernel, 0, 7))[:2]
        ]
        for worst in (0.5, 3.0)
    )
    nothing = [verify.Outcome(good[0].trial, np.zeros(0), ("RuntimeError: a | b",))]
    records = [
        on(machine, verify.record(outcomes, f"tessera verify --seed 7 --random 0 --kernel {kernel.name}"))
        for machine, outcomes in ((AMD, good), (INTEL, bad))
    ]
    text = report.render("verify", records)
    _, rows = lines("verify", records)
    dtype = good[0].trial.dtype
    assert rows[0] == f"| {kernel.name} | {dtype} | AMD EPYC, 2 cores | 2 | 6 | 0.250 | 0.500 | 0 |"
    assert rows[1].startswith(f"|  | {dtype} | Intel Xeon, 2 cores | 2 | 6 | 0.250 | 3.00 | **2**: {kernel.name}, ")
    assert "repeat with `tessera verify --seed 7 --random 0`." in text
    [row] = lines("verify", [on(AMD, verify.record(nothing, "tessera verify"))])[1]
    assert "| 1 | 0 |  |  | **1**: " in row
    assert row.endswith("RuntimeError: a \\| b |")


@pytest.mark.parametrize("name", ["blocks", "sweep"])
def test_the_stored_records_fill_their_tables(name):
    text = report.render(name, evidence.collect(Path(__file__).parents[2] / "evidence"))
    header, _, *rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {"v5e", "v5p", "v6e", "v7x"} <= {cell.strip() for cell in header.split("|")}
    assert len(rows) > 5


def test_tiny_sizes_replace_no_figure():
    """A record of the bench suite smoke does not replace the cpu suite's record of the same case."""
    what = evidence.What(op="attention", kernel="ours", workload="case", dtype="float32")
    made = [
        evidence.make(what, [1.0], command=f"python -m lab bench --suite {s} --only case") for s in ("cpu", "smoke")
    ]
    assert current(made) == made
    assert len(current([made[0], replace(made[0], date="2030-01-01T00:00:00+00:00")])) == 1


def test_a_time_without_an_interval_replaces_none_that_has_one():
    def made(samples, **changed):
        what = evidence.What(op="attention", kernel="ours", workload="case", config={"tokens": 8})
        record = evidence.make(what, samples, command="python -m lab bench --suite cpu --only case")
        return replace(record, **changed)

    full, short, worse = made([1.0] * 5), made([0.5] * 3), made([2.0] * 5)
    error = replace(made([1.0]), samples=(), median=None, error="work was skipped")
    crash = replace(error, what=replace(error.what, kernel=""))
    other = replace(short, what=replace(short.what, config={"tokens": 9}))
    weighed = [made(samples, unit="bytes") for samples in ([1.0] * 5, [2.0])]
    assert current([short]) == [short]
    assert current([full, short]) == [full]
    assert current([short, full, short, worse, short]) == [worse]
    assert current([full, error]) == [error]
    assert current([full, error, short]) == [short]
    assert current([full, crash, short]) == [short]
    assert current([full, other]) == [other]
    assert current(weighed) == weighed[1:]
