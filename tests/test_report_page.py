"""The HTML page: every picture from its records, provenance or nothing, predictions marked."""

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from tessera import cli, evidence, report_page, report_pictures
from tessera.evidence import Comparison, How, What

CODE = evidence.Code(commit="0123456789abcdef", dirty=False)


def record(op="attention", samples=(1.0, 1.1), *, kernel="ours", workload="case", config=None, **fields):
    what = What(op=op, kernel=kernel, workload=workload, dtype="float32", config=config or {})
    made = evidence.make(what, samples, command=fields.pop("command", "tessera bench --only case"), **fields)
    return dataclasses.replace(made, code=CODE)


def task(policy: str, kind: str, length: int, scores, **fields):
    mean = sum(scores) / len(scores)
    facts = {"policy": policy, "kind": kind, "length": length, "scores": scores, "low": mean / 2, "high": 1.0}
    facts |= {"depths": [(i + 0.5) / len(scores) for i in range(len(scores))]}
    return record("eval task", [mean], workload=f"{kind} at {length}: {policy}", unit="fraction", facts=facts,
                  density=(0.3,), command="tessera eval", **fields)  # fmt: skip


def everything() -> list:
    candidates = [{"quick_s": t, "config": {}} for t in (0.3, None, 0.2)]
    figures = [
        record("predicted figure", [r], kernel="tpu", workload=f"dense prefill against the peer, {chip}", unit="ratio",
               how=How(check="predicted from the compiler's schedule, not measured"),
               comparison=Comparison(against="peer", ratio=r, target=">= 1.05", met=r > 1.05))
        for chip, r in (("v5e", 1.1), ("v6e", 1.0))
    ]  # fmt: skip
    versus = [
        dataclasses.replace(
            record(comparison=Comparison(against="peer", ratio=r, target=">= 1.5", met=False)), date=f"2026-11-0{day}"
        )
        for day, r in ((1, 1.0), (2, 1.4))
    ]
    tiles = [
        record("eval fidelity", [0.1, 0.2], kernel="kascade", workload=f"held-out text: tile {tile}, query tile {rows}",
               unit="nats", config={"tile": tile, "query_tile": rows}, command="tessera eval --suite study",
               facts={"policy": f"tile {tile}, query tile {rows}", "mean": 0.15, "low": 0.1, "high": 0.2})
        for tile in (16, 64) for rows in (16, 32)
    ]  # fmt: skip
    return [
        record(workload="rated", work={"flops": 1e9, "bytes": 1e6}, peak_fraction=0.5),
        *versus,
        *figures,
        *(task(p, k, n, [1.0, 0.0]) for p in ("dense", "kascade") for k in ("single", "tracking") for n in (512, 1024)),
        *tiles,
        record("tune", [1.2], unit="gain", facts={"candidates": candidates}),
        record("model", (), workload="broken", error="ValueError: <script>no</script>"),
    ]


def test_every_picture_shows_its_records_and_nothing_else():
    records = everything()
    for name, draw in report_pictures.PICTURES.items():
        picture = draw(records)
        assert picture is not None, name
        assert picture.svg.startswith("<svg")
        assert picture.records
        assert draw([r for r in records if r not in picture.records]) is None, name


def test_the_same_records_make_the_same_page():
    assert report_page.render(everything()) == report_page.render(everything())


def test_the_page_stands_alone_and_is_well_formed():
    page = report_page.render(everything())
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', page)
    assert "<script>" not in page  # an error's text is text
    assert page.count('<span class="predicted">predicted</span>') >= 3  # the words above, the picture, two rows
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


def test_a_number_without_provenance_is_refused():
    orphan = dataclasses.replace(record(), code=evidence.Code(commit=None, dirty=None))
    with pytest.raises(ValueError, match="names no commit"):
        report_page.render([orphan])


def test_changes_in_the_tree_are_said():
    dirty = dataclasses.replace(record(), code=evidence.Code(commit="0123456789abcdef", dirty=True))
    assert "012345678 + changes" in report_page.render([dirty])


def test_the_command_writes_the_page_of_a_folder(tmp_path, capsys):
    evidence.append(tmp_path / "records" / "a.jsonl", everything())
    out = tmp_path / "page" / "report.html"
    assert cli.main(["report", "--evidence", str(tmp_path / "records"), "--out", str(out)]) == 0
    assert "records" in capsys.readouterr().out
    assert out.read_text().startswith("<!doctype html>")
    assert cli.main(["report", "--evidence", str(tmp_path / "nothing"), "--out", str(out)]) == 2
    assert "holds no records" in capsys.readouterr().err
