"""generation_config.json sets defaults of generate; the caller's values win; unsupported settings are reported."""

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import save_tiny

import tessera
from tessera.models.files.generation_config import GenerationConfig, parse_generation_config
from tessera.runtime.sampling import GREEDY, Method, Sampling

LLAMA3 = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 4096, "eos_token_id": [257, 261]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = save_tiny(tmp_path_factory.mktemp("sampled"), plan=False)
    (folder / "generation_config.json").write_text(json.dumps(LLAMA3 | {"max_new_tokens": 7, "top_k": 40}))
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return tessera.load(folder)


def test_the_file_sets_what_the_caller_does_not_give(model):
    [found] = model.generate(["ab"], seed=5)
    plain = replace(model, generation_config=GenerationConfig())
    how = {"max_new_tokens": 7, "temperature": 0.6, "top_p": 0.9, "top_k": 40}
    [expected] = plain.generate(["ab"], seed=5, **how)
    assert found.tokens == expected.tokens
    [best] = plain.generate(["ab"], max_new_tokens=7)
    assert found.tokens != best.tokens == model.generate(["ab"], **GREEDY)[0].tokens
    assert model.sampling(temperature=0.8, top_p=1) == Sampling(temperature=0.8, top_p=1, top_k=40)
    assert model.config.eos_ids == (257, 261)


def test_saving_keeps_it(model, tmp_path):
    tessera.save(model, tmp_path / "saved")
    again = tessera.load(tmp_path / "saved")
    assert again.generation_config == replace(model.generation_config, ignored={})
    assert again.config.eos_ids == model.config.eos_ids
    assert GenerationConfig().render() == {}


@pytest.mark.parametrize(
    ("raw", "temperature"),
    [
        ({}, 0.0),
        ({"temperature": 0.6}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0.6}, 0.6),
        ({"do_sample": False, "temperature": 0.6, "top_p": None}, 0.0),
    ],
)
def test_only_do_sample_draws(raw, temperature):
    assert parse_generation_config(raw).sampling() == {"temperature": temperature}


@pytest.mark.parametrize(
    ("key", "value"),
    [("do_sample", "yes"), ("temperature", -1), ("temperature", "0.6"), ("top_k", 1.5), ("top_p", 1.5), ("min_p", True),
     ("repetition_penalty", 0), ("max_new_tokens", 0), ("max_new_tokens", 2**40)],
)  # fmt: skip
def test_a_value_out_of_range_is_named(key, value):
    with pytest.raises(ValueError, match=f"{key}=.* must be .* in generation_config.json"):
        parse_generation_config({key: value})


def test_what_is_not_supported_is_said_when_the_model_is_loaded(folder, caplog):
    caplog.set_level("INFO", logger="tessera")
    tessera.load(folder)
    assert [r.getMessage() for r in caplog.records] == [
        "generation_config.json: ignoring max_length=4096 (not supported)"
    ]
    neutral = {"num_beams": 1, "typical_p": 1.0, "max_length": 20, "min_length": 0, "stop_strings": None}
    assert parse_generation_config(neutral).warning() == ""


def test_the_note_names_what_counts():
    sampled = parse_generation_config(LLAMA3)
    assert sampled.note({"temperature": None, "top_p": 0.5}) == (
        "generation_config.json sets temperature 0.6: flags override the file"
    )
    assert sampled.note({"temperature": 0.0}) == ""
    assert "penalty 1.1" in GenerationConfig(repetition_penalty=1.1, top_p=0.9).note({})
    assert GenerationConfig().note({}) == ""


def test_values_that_switch_a_filter_off_compile_no_filter():
    for top_k in (0, -1):  # transformers' value and vLLM's
        off = Sampling(temperature=1.0, top_k=top_k, top_p=1, min_p=0)
        assert off.method == Method(draw=True)
        assert int(off.values(50).top_k) == 50
        config = parse_generation_config({"do_sample": True, "top_k": top_k})
        assert Sampling(**config.sampling()).method == off.method
        assert config.note({"temperature": 1}) == ""


def test_evaluation_and_benchmarks_leave_nothing_to_the_file():
    """Every call sets its own temperature, since a checkpoint that draws by default must not change a stored figure."""
    calls = [
        (path.name, call)
        for room in (Path(tessera.__file__).parent / "measure", Path(__file__).parents[2] / "lab")
        for path in room.rglob("*.py")
        if not {"tests", "peers"} & set(path.parts)
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "generate"
    ]
    assert len(calls) > 5
    for name, call in calls:
        assert {"temperature", None} & {keyword.arg for keyword in call.keywords}, f"{name}:{call.lineno}"
