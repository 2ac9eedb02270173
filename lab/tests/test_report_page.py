"""The HTML page: every picture comes from records with provenance, and predictions are marked."""

import dataclasses
import re
import warnings
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from lab import commands as cli
from lab.report import documents
from lab.report import labels as report_labels
from lab.report import page as report_page
from lab.report import pictures as report_pictures
from tessera.measure import evidence
from tessera.measure.evidence import Comparison, How, What

ROOT = Path(__file__).parents[2]
CODE = evidence.Code(commit="0123456789abcdef", dirty=False)


def record(op="attention", samples=(1.0, 1.1), *, kernel="ours", workload="case", config=None, **fields):
    what = What(op=op, kernel=kernel, workload=workload, dtype="float32", config=config or {})
    made = evidence.make(what, samples, command=fields.pop("command", "tessera bench --only case"), **fields)
    return dataclasses.replace(made, code=CODE)


def task(policy: str, kind: str, length: int, scores, *, suite="demo", **fields):
    mean = sum(scores) / len(scores)
    facts = {"policy": policy, "kind": kind, "length": length, "scores": scores, "low": mean / 2, "high": 1.0}
    facts |= {"depths": [(i + 0.5) / len(scores) for i in range(len(scores))]}
    return record("eval task", [mean], workload=f"{kind} at {length}: {policy}", unit="fraction", facts=facts,
                  density=(0.3,), command=f"tessera eval --suite {suite}", **fields)  # fmt: skip


def tiled(tile: int, rows: int, suite: str = "study"):
    title = f"tile {tile}, query tile {rows}"
    facts = {"policy": title, "mean": 0.15, "low": 0.1, "high": 0.2, "agreement": 0.9}
    words = {"workload": f"held-out text: {title}", "command": f"tessera eval --suite {suite}", "unit": "nats"}
    return record("eval fidelity", [0.1, 0.2], config={"tile": tile, "query_tile": rows}, facts=facts, **words)


def recall(policy: str, per_head, sparse_layers, *, suite="demo", **fields):
    facts = {"policy": policy, "per_head": per_head, "sparse_layers": sparse_layers, "mean": 0.9, "low": 0.8}
    words = {"workload": f"attention mass: {policy}", "command": f"tessera eval --suite {suite}", "unit": "fraction"}
    return record("eval recall", [0.9, 0.91], facts=facts | {"high": 1.0}, **words, **fields)


def prefill(kernel: str, tokens: int, seconds: float, **fields):
    words = {"workload": f"crossover_{tokens}", "command": "python -m lab bench --suite cpu --only crossover"}
    samples = [0.9 * seconds, seconds, 1.2 * seconds]
    return record("model", samples, kernel=kernel, config={"tokens": tokens}, **words, **fields)


def everything() -> list:
    candidates = [{"quick_s": t, "config": {}, "error": None if t else "killed"} for t in (0.3, None, 0.2)]
    figures = [
        record("predicted figure", [r], kernel="tpu", workload=f"dense prefill against the peer, {chip}", unit="ratio",
               how=How(check="predicted from the compiler's schedule, not measured"),
               comparison=Comparison(against="peer", ratio=r, target=">= 1.05", met=r > 1.05),
               facts={"dense": {"ms": 1.0, "busy": {"MXU": 0.9, "VLOAD": 0.5, "VLOAD:FILL": 0.4}}, "peer": {"ms": 1.1}})
        for chip, r in (("v5e", 1.1), ("v6e", 1.0))
    ]  # fmt: skip
    versus = [
        dataclasses.replace(
            record(comparison=Comparison(against="peer", ratio=r, target=">= 1.5", met=False)), date=f"2026-11-0{day}"
        )
        for day, r in ((1, 1.0), (2, 1.4))
    ]
    return [
        record(workload="rated", work={"flops": 1e9, "bytes": 1e6}, peak_fraction=0.5),
        *versus,
        *figures,
        *(task(p, k, n, [1.0, 0.0]) for p in ("dense", "kascade") for k in ("single", "tracking") for n in (512, 1024)),
        *(prefill("dense", n, n / 1000) for n in (512, 1024)),
        prefill("kascade", 512, 0.6),
        prefill("kascade", 1024, 0.8, facts={"crossover_tokens": 1024}),
        *(tiled(tile, rows) for tile in (16, 64) for rows in (16, 32)),
        recall("fraction 0.1", [[1.0, 1.0], [0.93, 0.88], [0.4, 0.97]], [1, 2]),
        recall("window 410 + sinks", [[0.9, 0.8], [0.5, 0.6], [0.7, 0.99]], [0, 1, 2]),
        record("tune", [1.2], unit="gain", facts={"candidates": candidates, "default": {}}),
        record("model", (), workload="broken", error="ValueError: <script>no</script>"),
    ]


def kept(monkeypatch, draw, records) -> Figure:
    """Return the figure behind a picture."""
    drawn, figures = report_pictures.drawn, []

    def keep(draw, size):
        return drawn(lambda figure: (draw(figure), figures.append(figure)), size)

    monkeypatch.setattr(report_pictures, "drawn", keep)
    draw(records)
    return figures[0]


@pytest.fixture(scope="module")
def records():
    return everything()


@pytest.fixture(scope="module")
def page(records):
    return report_page.render(records)


def test_every_picture_shows_its_records_and_nothing_else(records):
    for name, draw in report_pictures.PICTURES.items():
        picture = draw(records)
        assert picture is not None, name
        assert picture.svg.startswith("<svg")
        assert picture.records
        assert draw([r for r in records if r not in picture.records]) is None, name


def test_suites_machines_and_errors_do_not_mix_in_a_picture(records):
    elsewhere = task("dense", "single", 512, [0.0, 0.0])
    others = [
        task("tile 16, query tile 16", "single", 4096, [0.0, 0.0], suite="study"),
        task("dense", "single", 512, [0.0, 0.0], suite="smoke"),
        dataclasses.replace(elsewhere, where=dataclasses.replace(elsewhere.where, device="TPU v6 lite")),
        tiled(32, 16, "demo"),
        recall("fraction 0.1", [[0.1, 0.2]], [0], suite="smoke"),
        record("eval recall", (), workload="attention mass: oracle", error="killed",
               command="python -m lab eval --suite demo"),
        record("eval task", (), workload="single at 512: window", error="killed",
               command="python -m lab eval --suite demo"),
        record("eval fidelity", (), workload="held-out text: tile 1, query tile 16", error="killed",
               command="python -m lab eval --suite study"),
    ]  # fmt: skip
    for name in ("needles", "recall", "quality", "granularity"):
        draw = report_pictures.PICTURES[name]
        mixed = draw([*others, *records])
        assert mixed.svg == draw(records).svg, name
        assert not set(map(id, mixed.records)) & set(map(id, others))
    page = report_page.render([*others, *records, task("dense", "single", 512, [1.0, 0.0], suite="study")])
    assert page.count("<svg") == len(report_pictures.PICTURES)
    assert page.count(">single at 512: dense<") == 4, "demo, study, smoke, and demo on another machine"


def test_the_heat_map_of_recall_says_which_layer_and_head_keeps_what(monkeypatch):
    """Each cell's text lies at its layer and head; read from the figure, because SVG text is drawn as outlines."""
    figure = kept(monkeypatch, report_pictures.recall, everything())
    kascade, window, scale = figure.axes
    cells = [{(int(t.get_position()[1]), int(t.get_position()[0])): t.get_text() for t in a.texts}
             for a in (kascade, window)]  # fmt: skip
    assert cells[0] == {(0, 0): "all", (0, 1): "all", (1, 0): "0.93", (1, 1): "0.88", (2, 0): "0.40", (2, 1): "0.97"}
    assert cells[1][0, 0] == "0.90"
    assert [a.get_title() for a in (kascade, window)] == ["fraction 0.1", "window 410 + sinks"]
    assert (kascade.get_ylabel(), figure.get_supxlabel(), scale.get_ylabel()) == (
        "layer", "KV head", "attention mass kept",
    )  # fmt: skip
    assert kascade.yaxis_inverted()


def test_speed_over_length_is_drawn_half_done_without_errors_and_without_a_crossover():
    begun = [prefill("dense", 512, 0.5), prefill("kascade", 512, 0.6)]
    assert report_pictures.lengths(begun) is None, "one length is no line"
    broken = record("model", (), kernel="", workload="crossover_9", error="killed")
    half = [*begun, prefill("dense", 1024, 1.0)]
    assert report_pictures.lengths([*half, broken]).records == tuple(half)
    assert report_pictures.lengths([*half, prefill("kascade", 1024, 1.1, facts={"crossover_tokens": None})]) is not None


def test_predicted_pictures_show_the_newest_of_each_chip():
    new = [r for r in everything() if r.what.op == "predicted figure"]
    old = [
        dataclasses.replace(r, date="2020-01-01T00:00:00+00:00", median=9.0, facts={"dense": {"busy": {"MXU": 0.1}}},
                            where=dataclasses.replace(r.where, cpu="Old CPU")) for r in new
    ]  # fmt: skip
    for name in ("predicted", "slots"):
        draw = report_pictures.PICTURES[name]
        assert draw([*new, *old]).records == draw(new).records == tuple(new)
        assert draw([*new, *old]).svg == draw(new).svg


def test_texts_beside_crowded_marks_do_not_meet():
    """With 20 marks at one place and one at an edge, all texts lie inside the axes without overlap."""
    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log", xlim=(1, 1e4), ylim=(1e-3, 1e3))
    figure.draw_without_rendering()
    points = [(1e3, 1.0)] * 20 + [(1.01, 1.0), (9.9e3, 9e2)]
    notes = report_labels.place(axes, points, ["50"] * 22, ["black"] * 22)
    figure.draw_without_rendering()  # draws the notes at their places
    boxes = [Text.get_window_extent(note) for note in notes]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    room = axes.get_window_extent()
    assert all(room.contains(*corner) for box in boxes for corner in box.corners())
    assert [note.arrow_patch is not None for note in notes[:20]].count(True) > 5, "far texts need arrows to their marks"
    assert notes[0].arrow_patch is None


def test_the_roofline_draws_the_newest_ceilings_and_says_where_there_are_none(monkeypatch):
    def rated(kernel, ceiling, date, machine="cpu", **fields):
        facts = {"ceiling_flops_per_s": ceiling, "ceiling_bytes_per_s": 1e9} if ceiling else {}
        made = record("model", kernel=kernel, work={"flops": 1e9, "bytes": 1e6}, facts=facts, **fields)
        return dataclasses.replace(made, date=date, where=dataclasses.replace(made.where, device=machine))

    records = [rated("a", 2e12, "2026-01-02"), rated("b", 9e12, "2026-01-01", peak_fraction=0.5)]
    records += [rated("a", None, "2026-01-02", "TPU v6 lite")]
    first, second = kept(monkeypatch, report_pictures.roofline, records).axes
    assert "roof: 2,000 Gflop/s in float32, 1.00 GB/s" in first.get_title()
    [roof] = [line for line in first.lines if len(line.get_xdata()) > 1]
    x, y = np.array(roof.get_data())
    assert y.tolist() == np.minimum(2000.0, x).tolist()
    assert 2000.0 in x, "the roof needs a corner at the ridge"
    assert "no record holds its ceilings" in second.get_title()
    assert all(len(line.get_xdata()) == 1 for line in second.lines)
    assert [text.get_text() for text in first.texts] == ["50"]


def test_every_series_of_the_progress_has_its_own_colour_mark_and_width(monkeypatch):
    made = []
    for number in range(10):
        versus = Comparison(against="dense", ratio=1.0, target=">= 1", met=True)
        for date in ("2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00"):
            made.append(dataclasses.replace(record(workload=f"figure {number}", comparison=versus), date=date))
    [axes] = kept(monkeypatch, report_pictures.progress, made).axes
    lines = [line for line in axes.lines if not line.get_label().startswith("_")]
    for style in ("color", "marker", "linewidth"):
        assert len({getattr(line, f"get_{style}")() for line in lines}) == 10, style
    assert sorted(lines, key=lambda line: -line.get_linewidth()) == lines, "thin lines must be drawn over thick ones"


def test_the_page_shows_every_machine_of_the_tables_that_documents_cut_to_one():
    assert set(report_page.TABLES) == set(documents.MACHINE_TABLES)
    versus = Comparison(against="<peer>", ratio=0.5, target=">= 1.5", met=False)
    ours = record(comparison=versus)
    others = [dataclasses.replace(ours, where=dataclasses.replace(ours.where, device=name)) for name in ("One", "Two")]
    page = report_page.render(others)
    title = f"<h2>{report_page.TABLES['speed']}</h2>"
    table = page[page.index(title) :].partition("</table>")[0]
    assert "<tr><th>workload</th><th>machine</th>" in table
    assert "<td>One</td>" in table
    assert "<tr><td></td><td>Two</td><td>1.05 s</td><td>&lt;peer&gt;</td><td>0.50x</td>" in table
    assert "&gt;= 1.5x: <b>missed</b></td>" in table
    assert report_page.TABLES["memory"] not in page, "no record, no table"


def test_the_same_records_make_the_same_page(records, page):
    assert report_page.render(records) == page


def test_the_page_stands_alone_and_is_well_formed(page):
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', page)
    assert "<script>" not in page  # the text of an error is escaped
    assert page.count('<span class="predicted">predicted</span>') >= 3  # the introduction, the picture and two rows
    assert "0123456789"[:9] in page
    assert page.count("<svg") == len(report_pictures.PICTURES)
    opened = []

    class Check(HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "br", "path", "use", "image", "rect", "circle"):
                opened.append(tag)

        def handle_startendtag(self, tag, attrs):
            pass

        def handle_endtag(self, tag):
            if opened and opened[-1] == tag:
                opened.pop()

    Check().feed(page)
    assert not opened


@pytest.mark.parametrize(
    "lack", [{"code": evidence.Code(commit=c, dirty=None)} for c in (None, "")] + [{"command": " "}, {"date": ""}]
)
def test_a_number_without_provenance_is_refused(lack):
    with pytest.raises(ValueError, match="must name a commit, a date and a command"):
        report_page.render([dataclasses.replace(record(), **lack)])


def test_changes_in_the_tree_are_said():
    dirty = dataclasses.replace(record(), code=evidence.Code(commit="0123456789abcdef", dirty=True))
    assert "012345678 with uncommitted changes" in report_page.render([dirty])


def test_the_command_writes_the_page_of_a_folder(tmp_path, capsys):
    evidence.append(tmp_path / "records" / "a.jsonl", everything())
    out = tmp_path / "page" / "report.html"
    assert cli.main(["report", "--evidence", str(tmp_path / "records"), "--out", str(out)]) == 0
    assert "records" in capsys.readouterr().out
    assert out.read_text().startswith("<!doctype html>")
    assert cli.main(["report", "--evidence", str(tmp_path / "nothing"), "--out", str(out)]) == 2
    assert "holds no records" in capsys.readouterr().err


def test_progress_says_met_where_less_is_better():
    """A ratio of 1.0 with a target of at most 1.1 is above the line; a panel holds nine figures without overflow."""
    made = []
    for date, ratio in (("2026-01-01T00:00:00+00:00", 1.0), ("2026-01-02T00:00:00+00:00", 2.2)):
        for chip in ("v5e", "v5p", "v6e", "v7x"):
            for number in range(9):
                comparison = Comparison(against="dense", ratio=ratio, target="<= 1.1", met=ratio <= 1.1)
                name = f"figure {number}, {chip}"
                found = record("predicted figure", [ratio], workload=name, comparison=comparison)
                made.append(dataclasses.replace(found, date=date))
    assert [round(report_pictures._of_target(r), 3) for r in (made[0], made[-1])] == [1.1, 0.5]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shown = report_pictures.PICTURES["progress"](made)
    assert len(shown.records) == len(made)


def test_the_stored_page_is_of_the_stored_records():
    """The page names the digest of its records; bytes are not compared, as they depend on matplotlib's version."""
    page = (ROOT / "docs" / "report.html").read_text()
    assert f'content="{report_page.digest(evidence.collect(ROOT / "evidence"))}"' in page, "run `make readme`"
