"""The demo end to end, on a tiny random model and on the fetched one: answers, record, page and exit code."""

import dataclasses
import html
import html.parser
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from tiny import optimized

from lab.demo import reading, report, run
from tessera import generate
from tessera.core.files import DEMO_MODEL
from tessera.generate import load
from tessera.measure import evidence
from tessera.models.files import fetch
from tessera.models.files.checkpoint import fingerprint, load_params
from tessera.models.files.source import open_source
from tessera.runtime.answers import Generation
from tessera.sparse.plan import Plan


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_place_for_the_results_that_cannot_be_is_refused_before_any_work(tmp_path, monkeypatch, place):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr(run, "choose_model", lambda console: pytest.fail("work began"))
    with pytest.raises(ValueError, match=f"--out .*/{place} is not a writable folder"):
        run.run(tmp_path / place)
    assert (tmp_path / "file").read_text() == "mine"


def test_without_the_real_model_the_shipped_one_answers_and_says_so(tmp_path, monkeypatch, capsys):
    """Dense and the plan find the pass key in the document; the control does not."""

    def refuse(name):
        raise fetch.NotReachable(f"model {name!r} could not be fetched: no <network>")

    monkeypatch.setattr(fetch, "fetch", refuse)
    with optimized():
        assert run.run(tmp_path) == 0
    source = (tmp_path / "index.html").read_text()
    said = " ".join(capsys.readouterr().out.split())
    for words in ("the small model in the package", "could not be fetched: no <network>", "`tessera fetch smollm2`"):
        assert words in html.unescape(source)
        assert words in said
    assert "no <network>" not in source
    assert "A chat turn" not in source
    records = json.loads((tmp_path / "record.json").read_text())["records"]
    right = {r["what"]["kernel"]: r["facts"]["right"] for r in records}
    assert right == {"dense": [True], "kascade": [True], "control": [False]}


def test_the_demo_asks_the_fetched_model(tmp_path, monkeypatch):
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
    assert report.notes(lost)[0] == "Kascade LOSES 1 of the 2 answers that dense finds: Q1?"
    kept = _findings([True, True, False], [True, True, False], [True, True, False])
    assert kept.lost == []
    assert "keeps all 2 answers" in report.notes(kept)[0]
    assert any("do NOT show that selection matters" in note for note in report.notes(kept))
    none = _findings([False], [False], [False])
    assert "Dense finds none" in report.notes(none)[0]


def test_a_question_that_the_document_does_not_answer_is_refused():
    with pytest.raises(ValueError, match="The cat is"):
        reading.Question(text="?", start="The cat is").expected("The dog is old.")


def test_the_shipped_plan_is_found_for_the_fetched_file_after_the_one_next_to_it(tmp_path, monkeypatch):
    """The shipped plan is found by the file's name, and refused for other weights; a plan next to the file wins."""
    model = load(DEMO_MODEL)
    [source] = fetch.SOURCES.values()
    assert generate.shipped_plan(tmp_path / Path(source.member).name).name == "smollm2.plan.json"
    assert generate.shipped_plan(tmp_path / "other.gguf") is None
    shipped = tmp_path / "shipped.json"
    monkeypatch.setattr(generate, "shipped_plan", lambda source: shipped)
    Plan.load(DEMO_MODEL / "plan.json").save(shipped)
    gguf = dataclasses.replace(model, source=str(tmp_path / "x.gguf"))
    assert gguf.with_attention("kascade").plan == Plan.load(shipped)
    dataclasses.replace(Plan.load(shipped), model="other weights").save(shipped)
    with pytest.raises(ValueError, match="the plan is of another model"):
        gguf.with_attention("kascade")
    (tmp_path / "x.gguf").touch()
    nearer = dataclasses.replace(Plan.load(DEMO_MODEL / "plan.json"), minimum=48)
    nearer.save(tmp_path / "x.plan.json")
    assert gguf.with_attention("kascade").plan == nearer
