"""The demo end to end, on a tiny random model and on the fetched one: answers, record, page and exit code."""

import dataclasses
import html
import html.parser
import json
import re
from pathlib import Path

import numpy as np
import pytest
import tiny
from rich.console import Console
from tiny import optimized, random_params

from lab.demo import findings, pictures, reading, reading_report, run
from tessera import generate
from tessera.generate import load
from tessera.measure import evidence
from tessera.models.files import fetch
from tessera.models.files.checkpoint import fingerprint, load_params, save_folder
from tessera.models.files.source import open_source
from tessera.models.text.tokenizer import byte_tokenizer
from tessera.runtime import step
from tessera.runtime.answers import Generation
from tessera.sparse.kascade import Kascade
from tessera.sparse.plan import Plan

CONFIG = tiny.config(intermediate_size=64, num_layers=2, max_positions=4096, tie_embeddings=True)


@pytest.fixture(scope="module", autouse=True)
def small_chunks():
    """Use one chunk size for all prompts, so that each side compiles only two programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "CHUNK", 64)
        yield


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "model"
    params = random_params(CONFIG)
    save_folder(folder, params, CONFIG, byte_tokenizer())
    plan = Plan(
        model=fingerprint(params, CONFIG),
        num_layers=2,
        num_kv_heads=2,
        anchors=(0,),
        head_map=((0, 1),) * 2,
        tile=16,
        query_tile=16,
        minimum=32,
        crossover_tokens=3000,
    )
    plan.save(folder / "plan.json")
    document = folder.parent / "document.txt"
    document.write_text("# sizes\nWIDTH = 31\n" + "# filler <b>text</b>\n" * 10 + "# The door code is 77. Keep it.\n")
    return run.Settings(
        model=folder,
        document=document,
        subjects=("WIDTH", "the door code"),
        first_token_lengths=(450,),
        attention_lengths=(256,),
        passkey_lengths=(400,),
        tasks=2,
        repeats=2,
    )


@pytest.fixture(scope="module")
def outcome(settings, small_chunks, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "demo"
    return run.run(out, settings), out


def test_record_holds_what_was_measured(outcome, settings):
    body = json.loads((outcome[1] / "record.json").read_text())
    records = [evidence.decode(json.dumps(record)) for record in body["records"]]
    assert body["schema"] == evidence.SCHEMA
    by_key = {(r.what.workload, r.what.kernel): r for r in records}
    for workload in ("demo_first_token_450", "demo_attention_256"):
        assert by_key[workload, "dense"].median > 0
        assert by_key[workload, "kascade"].comparison.against == "dense"
    answers = by_key["demo_answers", "kascade"]
    assert answers.facts["expected"] == ["WIDTH = 31", "The door code is 77."]
    assert answers.density[0] == 1.0
    assert len(answers.density) == 2
    assert max(answers.density[1:]) < 0.5
    assert max(answers.facts["density"]) < 0.9
    assert by_key["demo_passkey_400", "dense"].facts["trials"] == 2


def test_exit_status_says_whether_answers_agree(outcome):
    """A random model's answers seldom agree between dense and Kascade; exit code and page must match the record."""
    records = json.loads((outcome[1] / "record.json").read_text())["records"]
    kascade = next(r for r in records if r["what"]["workload"] == "demo_answers" and r["what"]["kernel"] == "kascade")
    same = all(kascade["facts"]["same_as_dense"])
    assert outcome[0] == (0 if same else 1)
    assert ("DIFFER" in (outcome[1] / "index.html").read_text()) == (not same)


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_place_for_the_results_that_cannot_be_is_refused_before_any_work(tmp_path, monkeypatch, place):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(run, "load_models", lambda folder: pytest.fail("work began"))
    with pytest.raises(ValueError, match=f"--out .*/{place} is not a writable folder"):
        run.run(tmp_path / place)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_can_be_published(outcome, tmp_path):
    run.publish(outcome[1], str(tmp_path / "evidence"), str(tmp_path / "docs" / "demo.svg"))
    stored = evidence.collect(tmp_path / "evidence")
    assert len(stored) == len(json.loads((outcome[1] / "record.json").read_text())["records"])
    assert (tmp_path / "docs" / "demo.svg").read_text() in (outcome[1] / "index.html").read_text()


def test_page_is_whole_and_self_contained(outcome, settings):
    text = (outcome[1] / "index.html").read_text()
    opened = []

    class Checker(html.parser.HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag not in {"meta", "br", "path", "use"}:
                opened.append(tag)
            for name, value in attrs:
                assert name not in ("src", "href") or value.startswith("#"), f"{name}={value} leaves the page"

        def handle_startendtag(self, tag, attrs):
            pass

        def handle_endtag(self, tag):
            if tag not in {"path", "use"}:
                assert opened.pop() == tag

    Checker().feed(text)
    assert opened == []
    assert text.count("<svg") == 3
    assert "What is WIDTH?" in text
    assert "&lt;b&gt;" in text
    assert "cross-over is 3,000 tokens" in text


def test_a_question_the_document_does_not_answer_is_refused(settings):
    with pytest.raises(ValueError, match="DEPTH"):
        findings.ask({}, settings.document.read_text(), "DEPTH")


def test_same_and_right_are_what_they_say(settings):
    [given] = load(settings.model).generate(["x"], max_new_tokens=1)
    good = dataclasses.replace(given, text=" WIDTH = 31", tokens=[1, 2])
    bad = dataclasses.replace(given, text="WIDTH = 32", tokens=[1, 3])

    def answered(dense, kascade):
        return findings.Answered(question="?", expected="WIDTH = 31", dense=dense, kascade=kascade, control=bad)

    assert answered(good, good).same
    assert answered(good, good).right
    assert not answered(good, bad).same
    assert not answered(good, bad).right
    assert answered(bad, bad).same
    assert not answered(bad, bad).right


def test_read_map_is_causal_and_holds_the_diagonal(settings):
    kascade = run.load_models(settings.model)["kascade"]
    found = findings.read_map(kascade, list(range(100)) * 5)
    assert [anchor.layer for anchor in found.anchors] == [0]
    for anchor in found.anchors:
        shape = anchor.heads_BY.shape
        assert shape == (32, 32)
        assert (anchor.heads_BY[np.triu_indices(32, 1)] == -1).all()
        assert (np.diag(anchor.heads_BY) == 2).all()
        assert anchor.heads_BY.max() <= 2


def test_kascade_attention_time_follows_the_roles():
    layer = findings.LayerTimes({"dense": [1.0], "score": [1.5], "sparse": [0.25]})
    assert layer.total(("dense", "score", "sparse", "sparse")) == {"dense": 4.0, "kascade": 3.0}


def test_layers_of_one_kind_have_one_role_and_one_row_of_budgets():
    maps = {"head_map": ((0, 1),) * 4, "heads": "identity", "own": (1, 3)}
    budgets = ((1.0, 1.0), (0.0, 0.1), (0.5, 0.5), (0.0, 0.1))
    found = findings.kinds(Kascade(anchors=(0,), budgets=budgets, **maps))
    assert found == ("dense", "own 0 0.1", "sparse 0.5 0.5", "own 0 0.1")
    assert findings.kinds(Kascade(anchors=(0,), **maps)) == ("dense", "own", "sparse", "own")


def test_pictures_have_axes_with_units_and_dark_text():
    sides = {"dense": [0.1, 0.2], "Kascade": [0.05, 0.06]}
    panel = pictures.Panel(title="T", label="time (ms)", lengths=[1024, 2048], sides=sides)
    svg = pictures.times([panel])
    assert svg.startswith("<svg")
    assert svg.rstrip().endswith("</svg>")
    comments = " ".join(re.findall(r"<!--(.*?)-->", svg))  # matplotlib writes each text as a comment above its outline
    for words in ("prompt length (tokens)", "time (ms)", "2.0x", "3.3x", "1,024"):
        assert words in comments
    assert pictures.INK == "#1a1a1a"
    assert svg == pictures.times([panel])


# Tests with the real model: when it cannot be fetched, and on the fetched file.


def test_without_the_real_model_the_embedded_one_answers_and_says_so(settings, tmp_path, monkeypatch, capsys):
    def refuse(name):
        raise fetch.NotReachable(f"model {name!r} could not be fetched: no <network>")

    monkeypatch.setattr(fetch, "fetch", refuse)
    monkeypatch.setattr(run, "Settings", lambda: settings)
    assert run.run(tmp_path) in (0, 1)
    page = html.unescape((tmp_path / "index.html").read_text())
    said = " ".join(capsys.readouterr().out.split())
    for words in ("the small embedded model", "could not be fetched: no <network>", "`tessera fetch smollm2`"):
        assert words in page
        assert words in said
    assert "no <network>" not in (tmp_path / "index.html").read_text()
    assert (tmp_path / "lengths.svg").is_file()


def test_the_demo_asks_the_fetched_model(settings, tmp_path, monkeypatch):
    """Only the choice of model is tested here; later tests run the demo on it."""
    monkeypatch.setattr(fetch, "fetch", lambda name: tmp_path / f"{name}.gguf")
    chosen, missing = run.choose_model(Console())
    assert (chosen.model, missing) == (tmp_path / "smollm2.gguf", "")
    document = chosen.document.read_text()
    for question in chosen.questions:
        answer = question.expected(document)
        assert document.count(answer) == 1, f"{answer} must occur only once, at {question.start!r}"


FILLER = "\n\n".join(
    f"In week {week} nobody came to the island, and the keeper painted the {part} of the lighthouse."
    for week, part in enumerate(("door", "stairs", "lamp room", "railing", "windows"), 1)
)
SHORT = """The lighthouse keeper wrote the accounts of the island every evening.

The door code of the Oslo office is 48213.

""" + "\n\n".join(
    f"On day {day} the wind came from the {side}, and the boats stayed in the harbour until noon."
    for day, side in enumerate(("north", "south-west", "east", "north-west", "south", "west", "north-east") * 2, 1)
)


@pytest.fixture(scope="module")
def real(smollm2, tmp_path_factory):
    """Run the demo with two questions about a short document, under budgets ample for it.

    The layers are stacked, so that one layer's program compiles in place of thirty.
    """
    folder = tmp_path_factory.mktemp("real")
    text = f"{SHORT}\n\nThe colour of the spare key is turquoise.\n\nGoodbye, <b>friend</b>.\n{FILLER}"
    (folder / "short.txt").write_text(text)
    dense = load(smollm2)
    dense = dataclasses.replace(dense, params=load_params(open_source(smollm2), stacked=True))
    plan = Plan(
        model=fingerprint(dense.params, dense.config),
        num_layers=30,
        num_kv_heads=3,
        anchors=(),
        own=tuple(range(30)),
        head_map=((0, 1, 2),) * 30,
        heads="identity",
        local=32,
        sinks=16,
        minimum=0,
        budgets=((0.5,) * 3,) * 30,
        score_keys=1,
        crossover_tokens=4000,
    )
    asked = reading.QUESTIONS[0], reading.QUESTIONS[4]
    chosen = reading.Settings(
        model=smollm2, plan=plan, document=folder / "short.txt", questions=asked, turn_tokens=4, answer_tokens=8
    )
    with pytest.MonkeyPatch.context() as patch, optimized():
        patch.setattr(run, "load", lambda source: dense)
        return run.run(folder / "out", chosen), folder / "out"


def test_the_real_model_keeps_its_answers_and_the_control_does_not(real):
    """Dense and Kascade find both answers; the control, which is the plan without its selected keys, finds neither."""
    records = [evidence.decode(json.dumps(r)) for r in json.loads((real[1] / "record.json").read_text())["records"]]
    by_key = {(r.what.workload, r.what.kernel): r for r in records}
    asked = {name: by_key["demo_real_questions", name] for name in reading.SIDES}
    assert {name: record.facts["right"] for name, record in asked.items()} == {
        "dense": [True, True],
        "kascade": [True, True],
        "control": [False, False],
    }
    assert real[0] == 0
    assert asked["dense"].facts["density"] == [1.0, 1.0]
    assert max(asked["control"].facts["density"]) < min(asked["kascade"].facts["density"]) < 1
    assert len(asked["kascade"].density) == 30
    turn = by_key["demo_real_turn", "kascade"]
    assert turn.comparison.against == "dense"
    assert turn.how.compile_s > 0


def test_the_real_page_shows_each_answer_and_how_to_go_on(real):
    source = (real[1] / "index.html").read_text()
    shown = html.unescape(re.sub(r"<(?!b>|/b>)[^>]*>", "", source))
    for words in ("Kascade keeps all 2 answers", "The control keeps 0 of the 2", "What is the door code", "48213",
                  "cross-over is 4,000 tokens", "tessera chat --model smollm2 --attention kascade"):  # fmt: skip
        assert words in shown
    assert "&lt;b&gt;friend&lt;/b&gt;" in source
    assert source.count("<svg") == 1
    assert "src=" not in source


def test_the_real_run_can_be_published(real, tmp_path):
    run.publish(real[1], str(tmp_path / "evidence"), str(tmp_path / "docs" / "demo.svg"))
    assert len(evidence.collect(tmp_path / "evidence")) == 5
    assert not (tmp_path / "docs").exists()


def _findings(dense, kascade, control):
    """Build findings with one question per entry, whose answers are right or wrong as given."""
    given = Generation(text="", tokens=[1], logprobs=[0.0], finish_reason="stop", prompt_tokens=100, ttft_s=1.0,
                       decode_tokens_per_s=1.0, density=0.5, layer_density=(0.5,))  # fmt: skip

    def side(right):
        answers = tuple(dataclasses.replace(given, text=" yes" if good else " no") for good in right)
        return reading.Side(turn=given, answers=answers)

    questions = tuple(reading.Question(text=f"Q{n}?", start=f"A{n} is") for n in range(len(dense)))
    return reading.Findings(
        settings=reading.Settings(questions=questions),
        document="",
        expected=("yes",) * len(dense),
        crossover_tokens=0,
        compile_s=1.0,
        sides={"dense": side(dense), "kascade": side(kascade), "control": side(control)},
    )


def test_a_lost_answer_is_said_first_and_so_is_a_control_that_finds_everything():
    lost = _findings([True, True, False], [True, False, True], [False, False, False])
    assert lost.lost == [1]
    assert [lost.kept(side) for side in ("dense", "kascade", "control")] == [2, 1, 0]
    assert reading_report.notes(lost)[0] == "Kascade LOSES 1 of the 2 answers that dense finds: Q1?"
    kept = _findings([True, True, False], [True, True, False], [True, True, False])
    assert kept.lost == []
    assert "keeps all 2 answers" in reading_report.notes(kept)[0]
    assert any("do NOT show that selection matters" in note for note in reading_report.notes(kept))
    none = _findings([False], [False], [False])
    assert "Dense finds none" in reading_report.notes(none)[0]


def test_a_question_that_the_document_does_not_answer_is_refused():
    with pytest.raises(ValueError, match="The cat is"):
        reading.Question(text="?", start="The cat is").expected("The dog is old.")


def test_the_shipped_plan_is_found_for_the_fetched_file_after_the_one_next_to_it(settings, tmp_path, monkeypatch):
    """The shipped plan is found by the file's name, and refused for other weights; a plan next to the file wins."""
    model = load(settings.model)
    [source] = fetch.SOURCES.values()
    assert generate.shipped_plan(tmp_path / Path(source.member).name).name == "smollm2.plan.json"
    assert generate.shipped_plan(tmp_path / "other.gguf") is None
    shipped = tmp_path / "shipped.json"
    monkeypatch.setattr(generate, "shipped_plan", lambda source: shipped)
    Plan.load(settings.model / "plan.json").save(shipped)
    gguf = dataclasses.replace(model, source=str(tmp_path / "x.gguf"))
    assert gguf.with_attention("kascade").plan == Plan.load(shipped)
    dataclasses.replace(Plan.load(shipped), model="other weights").save(shipped)
    with pytest.raises(ValueError, match="the plan is of another model"):
        gguf.with_attention("kascade")
    (tmp_path / "x.gguf").touch()
    nearer = dataclasses.replace(Plan.load(settings.model / "plan.json"), minimum=48)
    nearer.save(tmp_path / "x.plan.json")
    assert gguf.with_attention("kascade").plan == nearer
