"""Tables come from records: rendering, refusal of figures without provenance, and a README that is up to date."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from lab.report import documents as report
from tessera.measure import evidence

ROOT = Path(__file__).parents[2]


AMD = {"device": "cpu", "cpu": "AMD EPYC", "cores": 2}
INTEL = {"device": "cpu", "cpu": "Intel(R) Xeon(R) Processor", "cores": 2}


def record(kernel, samples, workload="prefill", op="attention", title="dense prefill of 8,192", config=(), **fields):
    what = evidence.What(op=op, kernel=kernel, workload=workload, dtype="float32", title=title, config=dict(config))
    made = evidence.make(what, samples, command=f"python -m lab bench --suite cpu --only {workload}", **fields)
    return on(AMD, replace(made, code=evidence.Code(commit="0123456789abcdef", dirty=False)))


def on(machine, made):
    return replace(made, where=replace(made.where, **machine))


def compared():
    versus = evidence.Comparison(against="torch", ratio=2.0, interval=(1.9, 2.1), target=">= 1.5", met=True)
    return [
        record("torch", [2.0, 2.2, 1.8, 2.0, 2.0]),
        record("ours", [1.0, 1.1, 0.9, 1.0, 1.0], comparison=versus, density=(0.1, 0.3)),
    ]


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (0.01234, "s", "12.3 ms"),
        (12.34, "s", "12.3 s"),
        (2e-6, "s", "2.00 us"),
        (3 << 29, "bytes", "1.50 GiB"),
        (0.954, "fraction", "95.4 %"),
        (1234.4, "tokens/s", "1,234 tokens/s"),
        (0.0, "s", "0 us"),
    ],
)
def test_quantities_are_readable(value, unit, shown):
    assert report.quantity(value, unit) == shown


def test_speed_table_shows_both_sides_and_where_they_ran():
    text = report.render("speed", compared(), every_machine=True)
    row = "| AMD EPYC, 2 cores | 1.00 s | torch 2.00 s | 2.00x (1.90 to 2.10) | 20 % | >= 1.5x: met |"
    assert f"| dense prefill of 8,192, float32 {row}" in text
    assert "commit 012345678;" in text
    assert "repeat with `python -m lab bench --suite cpu`" in text
    assert "\nAMD EPYC, 2 cores, jax " in text


def test_studies_of_before_name_the_command_of_today():
    """Commands of old records are shown under the studies' present names."""
    from lab.report.markdown import RENAMED, repeat_with
    from lab.studies.commands import STUDIES

    [record, *_] = compared()
    for old, new in RENAMED.items():
        found = repeat_with(replace(record, command=f"python -m tessera.deviceless.{old}, and --report"))
        assert found == f"python -m lab study {new}, and --report"
        assert new.split()[0] in STUDIES
    assert repeat_with(record) == record.command
    for command in ("study fuzz; tessera study fuzz --report", "bench --suite cpu", "eval --suite cache", "demo"):
        today = command.replace("tessera", "python -m lab")
        assert repeat_with(replace(record, command=f"tessera {command}")) == f"python -m lab {today}"
    for command in ("tessera eval --suite real-full", "tessera bench --model smollm2"):
        assert repeat_with(replace(record, command=command)) == command


def test_a_deleted_study_is_repeated_at_the_commit_of_its_records():
    from lab.report.markdown import repeat_with

    [record, *_] = compared()
    commands = [
        "python -m tessera.deviceless.planner, and --report",
        "tessera study fusions",
        "tessera eval --suite study",
    ]
    for command in commands:
        assert repeat_with(replace(record, command=command)) == f"git checkout COMMIT; {command}"


def test_speed_table_keeps_a_run_whose_peer_was_not_there():
    facts = {"skipped": {"torch sdpa": "no environment", "jax splash attention": "needs a TPU"}}
    text = report.render("speed", [record("ours", [1.0], facts=facts), record("another", [1.0])], every_machine=True)
    rows = [line for line in text.splitlines() if line.startswith("| dense")]
    row = "| AMD EPYC, 2 cores | 1.00 s | left out: torch sdpa, jax splash attention |  |  |  |"
    assert rows == [f"| dense prefill of 8,192, float32 {row}"]


def test_each_machine_has_a_row_and_is_compared_with_itself():
    slower = [on(INTEL, replace(r, median=10 * r.median)) for r in compared()]
    text = report.render("speed", [*compared(), record("scan", [1.0]), *slower], every_machine=True)
    rows = [line for line in text.splitlines() if " torch " in line]
    assert rows == [
        "| dense prefill of 8,192, float32 | AMD EPYC, 2 cores | 1.00 s | torch 2.00 s | 2.00x (1.90 to 2.10) "
        "| 20 % | >= 1.5x: met |",
        "|  | Intel Xeon, 2 cores | 10.0 s | torch 20.0 s | 2.00x (1.90 to 2.10) | 20 % | >= 1.5x: met |",
    ]
    assert "\nIntel Xeon, 2 cores, jax " in text


def test_a_page_shows_the_machine_with_most_figures_and_counts_the_others():
    third = on(AMD | {"cpu": "Other"}, replace(compared()[1], error="killed"))
    text = report.render("speed", [*(on(INTEL, r) for r in compared()[1:]), *compared(), third])
    table, sentence, note = text.strip().split("\n\n")
    assert table.splitlines() == [
        "| workload | Tessera | against | ratio (95 %) | keys read | target |",
        "| --- | --- | --- | --- | --- | --- |",
        "| dense prefill of 8,192, float32 | 1.00 s | torch 2.00 s | 2.00x (1.90 to 2.10) | 20 % | >= 1.5x: met |",
    ]
    assert sentence.startswith("AMD EPYC, 2 cores, jax ")
    assert note == "`python -m lab report --show speed` also shows 2 other machines."
    assert "also shows" not in report.render("speed", compared())


@pytest.mark.parametrize("newer", [AMD, INTEL])
def test_a_page_shows_the_newest_machine_of_those_with_as_many_figures(newer):
    def dated(machine):
        date = "2030-01-02T00:00:00+00:00" if machine is newer else "2030-01-01T00:00:00+00:00"
        return [replace(on(machine, r), date=date) for r in compared()]

    text = report.render("headline", [*dated(AMD), *dated(INTEL)])
    assert f"| faster by | {dated(newer)[0].where.machine} | target |" in text
    assert "shows 1 other machine." in text


def test_a_models_own_times_are_a_table_of_their_own():
    ours = replace(compared()[1], suite=evidence.OWN_MODEL, case="smollm2")
    own = replace(ours, what=replace(ours.what, workload="own_model_8192", title="prefill of a model"))
    assert "prefill of a model" not in report.render("speed", [*compared(), own])
    assert "| prefill of a model, float32 | 1.00 s | torch | 2.00x" in report.render("own-model", [*compared(), own])


def test_memory_shows_every_length_and_its_line():
    line = {"slope_bytes_per_token": 2048.0, "growth_exponent": 1.0, "worst_residual": 0.01}
    weighed = [
        record(
            "peak",
            [n * 2048.0],
            workload=f"memory_{n}",
            op="memory",
            title=f"memory of prefill, {n:,} tokens, 2 layers",
            config={"tokens": n},
            unit="bytes",
            facts=line if n == 4096 else {},
        )
        for n in (1024, 2048, 4096)
    ]
    text = report.render("memory", weighed, every_machine=True)
    assert "| memory | machine | 1,024 tokens | 2,048 tokens | 4,096 tokens | growth |" in text
    assert (
        "| memory of prefill, 2 layers, float32, peak | AMD EPYC, 2 cores | 2.00 MiB | 4.00 MiB | 8.00 MiB "
        "| 2.00 KiB per token; a line fits within 1.0 % of the largest |"
    ) in text
    failed = on(INTEL, record("", (), workload="prefill_memory", op="memory", title="prefill memory", error="killed"))
    assert "| prefill memory, float32 | Intel Xeon, 2 cores |  |  |  | error: killed |" in report.render(
        "memory", [*weighed, failed], every_machine=True
    )


def test_a_missed_target_and_an_error_are_shown():
    slow = evidence.Comparison(against="torch", ratio=0.8, target=">= 1.5", met=False)
    text = report.render("speed", [record("ours", [1.0], comparison=slow), record("broken", (), error="out of memory")])
    assert "**missed**" in text
    assert "error: out of memory" in text


def test_later_records_win():
    text = report.render("costs", [record("scan", [9.0], op="compile"), record("scan", [3.0], op="compile")])
    assert "3.00 s" in text
    assert "9.00 s" not in text


def error_facts(points):
    shares = {"median_absolute_error": 0.02, "p90_absolute_error": 0.05, "spearman": 0.999}
    return shares | {"points": points, "no_fitted_constant": shares}


PREDICTED = {
    "tpu": (
        "predicted figure",
        {"comparison": evidence.Comparison(against="dense", ratio=1.5, target="<= 2", met=True)},
    ),
    "prediction": ("prediction", {"facts": error_facts(41)}),
    "steps": ("predicted step", {"facts": {"parts_ms": {}, "hbm_bytes": 1}}),
}


@pytest.mark.parametrize("name", PREDICTED)
def test_predictions_and_their_provenance_are_the_newest_of_each_chip_alone(name):
    op, fields = PREDICTED[name]
    new, other = (record("tpu", [1.0], f"score / dense, {chip}", op, f"on {chip}", **fields) for chip in ("v5e", "v6e"))
    old = replace(on(INTEL, new), date="2020-01-01T00:00:00+00:00", code=evidence.Code(commit="f" * 40, dirty=False))
    text = report.render(name, [new, old, other])
    assert text == report.render(name, [new, other])
    assert "2020" not in text
    assert "Intel" in report.render(name, [old, other])  # without a newer record, the old one stays


def test_a_prediction_says_how_many_of_the_planned_points_it_covers():
    facts = error_facts(41) | {"planned": 76}
    assert "| on v7x, float32 | 41 of 76 |" in report.render(
        "prediction", [record("splash", [1.0], "v7x", "prediction", "on v7x", facts=facts)]
    )


def test_a_prediction_is_held_to_its_goals_per_head_dim_too():
    near, far = (error_facts(points) | {"p90_absolute_error": p90, "spearman": rank}
                 for points, p90, rank in ((9, 0.12, 0.99), (8, 0.148, 0.979)))  # fmt: skip
    facts = error_facts(19) | {"by_head_dim": {"64": near, "192": far | {"points": 2}, "256": far}}
    text = report.render("prediction", [record("splash", [1.0], "v7x", "prediction", "on v7x", facts=facts)])
    assert "| 64: 12.0 %, **192: 14.8 %**, **256: 14.8 %** | 0.9990 | 64: 0.990, **256: 0.979** |" in text
    assert "| 90th percentile (<= 12 %) | by head dim | rank correlation (>= 0.99) | by head dim |" in text


@pytest.mark.parametrize(
    "lack", [{"code": evidence.Code(commit=c, dirty=None)} for c in (None, "")] + [{"command": " "}, {"date": ""}]
)
def test_figures_without_provenance_are_refused(lack):
    with pytest.raises(ValueError, match="must name a commit, a date and a command"):
        report.render("speed", [replace(compared()[1], **lack)])


def test_tables_that_are_not_there_or_empty_are_refused():
    with pytest.raises(ValueError, match="must be one of"):
        report.render("dreams", compared())
    with pytest.raises(ValueError, match="no record"):
        report.render("quality", compared())


def test_rewriting_a_file_makes_it_fresh_and_an_edit_makes_it_stale(tmp_path):
    evidence.append(tmp_path / "evidence" / "cpu.jsonl", compared())
    readme = tmp_path / "README.md"
    readme.write_text("# T\n<!-- records:speed -->\nold\n<!-- end -->\ntail\n")
    assert report.stale(readme, tmp_path / "evidence") == ["speed"]
    readme.write_text(report.rewrite(readme.read_text(), compared()))
    assert report.stale(readme, tmp_path / "evidence") == []
    assert readme.read_text().startswith("# T\n")
    assert readme.read_text().endswith("<!-- end -->\ntail\n")
    readme.write_text(readme.read_text().replace("2.00x", "3.00x"))
    assert report.stale(readme, tmp_path / "evidence") == ["speed"]


def test_the_readme_shows_what_the_records_say():
    for page in report.PAGES:
        assert report.stale(ROOT / page, ROOT / "evidence") == [], page


def test_every_record_names_code_that_this_history_holds():
    """A record names its commit, or the commit that its work landed in; otherwise its figure could not be repeated."""

    def git(*words):
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("no git history here")
    known = set(git("rev-list", "HEAD").stdout.split())
    records = evidence.collect(ROOT / "evidence")
    named = {(r.code.landed or r.code.commit, r.command) for r in records}
    assert [name for name in sorted(named) if name[0] not in known] == []
    assert [r.key for r in report.replaced(records) if r.code.landed] == []


def test_a_record_is_replaced_on_its_machine_and_a_compilers_on_any():
    old, new = (replace(record("ours", [1.0] * 5), date=f"2030-01-0{day}T00:00:00+00:00") for day in (1, 2))
    compiled = replace(old, what=replace(old.what, op="predicted figure"))
    later = on(INTEL, replace(compiled, date=new.date))
    assert report.replaced([old, on(INTEL, old), new, compiled, later]) == [old, compiled]
    lost = replace(new.code, landed="f" * 40)
    assert lost.name == "012345678 (not in this history; landed in fffffffff)"


def test_headline_has_a_column_per_machine_and_marks_what_missed():
    missed = [on(INTEL, r) for r in compared()]
    versus = replace(missed[1].comparison, ratio=1.2, met=False)
    records = [*compared(), missed[0], replace(missed[1], comparison=versus)]
    text = report.render("headline", records, every_machine=True)
    assert "| faster by | AMD EPYC, 2 cores | Intel Xeon, 2 cores | target |" in text
    assert "| dense prefill of 8,192, float32: ours against torch | 2.00x | **1.20x** | >= 1.5x |" in text


def test_a_clients_faults_are_bold_and_what_the_model_did_wrong_is_named():
    cases = [{"case": "loop", "kept": {}}, {"case": "form", "model": "Wrong"}, {"case": "form", "fault": "400"}]
    named = {"op": "client loops", "config": {"versions": {"openai": "3.0"}}, "unit": "fraction"}
    made = record("openai", [1 / 3], facts={"cases": cases, "faults": 1}, **named)
    assert "| openai 3.0 | prefill | 1 of 3 | form | **1** |" in report.render("clients", [made])
