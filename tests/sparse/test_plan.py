"""The plan as a file: saved and loaded unchanged, and one clear sentence for each kind of damage."""

import json
import os
from dataclasses import replace

import pytest
import tiny
from tiny import PROMISE

from tessera.sparse.baselines import Dense, Oracle, Window
from tessera.sparse.kascade import Kascade
from tessera.sparse.plan import SCHEMA, Plan
from tessera.sparse.policies import POLICIES, policy_for

CONFIG = tiny.config(vocab_size=8, hidden_size=8, intermediate_size=8, head_dim=4, max_positions=256)
PLAN = Plan(
    model="abc", num_layers=3, num_kv_heads=2, anchors=(0, 1), head_map=((0, 1), (0, 1), (1, 1)), tile=16,
    crossover_tokens=100, provenance={"corpus": "x"}, metrics={"recall": [1.0, 1.0, 0.9]},
)  # fmt: skip

MEASURED = PROMISE["measured"]


def written(tmp_path, **changes):
    """Save the plan with some fields replaced, or dropped where the value is None, and return the file."""
    path = tmp_path / "plan.json"
    PLAN.save(path)
    found = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in found.items() if value is not None}))
    return path


def test_a_plan_comes_back_as_it_was(tmp_path):
    path = tmp_path / "new" / "plan.json"
    PLAN.save(path)
    assert Plan.load(path) == PLAN
    PLAN.save(str(path))
    assert Plan.load(str(path)) == PLAN
    assert [p.name for p in path.parent.iterdir()] == ["plan.json"]


def test_a_failed_save_leaves_the_old_plan(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    PLAN.save(path)

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        replace(PLAN, tile=32).save(path)
    assert Plan.load(path) == PLAN
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere.json' does not exist: make one with `tessera calibrate`"):
        Plan.load(tmp_path / "nowhere.json")


@pytest.mark.parametrize("body", [b"", b"{", b'{"schema": 1', b"\xff\xfe\x00", b"null"])
def test_damaged_bytes(tmp_path, body):
    path = tmp_path / "plan.json"
    path.write_bytes(body)
    with pytest.raises(ValueError, match=r"plan.json'.*tessera calibrate"):
        Plan.load(path)


def test_a_plan_of_the_first_schema_still_loads(tmp_path):
    """The first schema has no local tiles, sinks, layers that choose for themselves, budgets or promise."""
    later = {name: None for name in ("local", "sinks", "own", "budgets", "score_keys", "score_rows", "promise")}
    plan = Plan.load(written(tmp_path, schema=1, **later))
    assert (plan.local, plan.sinks, plan.own, plan.budgets, dict(plan.promise)) == (0, 0, (), (), {})


def test_a_truncated_plan_is_refused_at_every_length(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    body = path.read_bytes().rstrip()
    for length in range(0, len(body), 37):
        path.write_bytes(body[:length])
        with pytest.raises(ValueError, match="not valid JSON"):
            Plan.load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": SCHEMA + 1}, f"schema {SCHEMA + 1}, newer than {SCHEMA}.*upgrade tessera"),
        ({"schema": "one"}, "schema 'one'"),
        ({"kind": "recipe"}, "JSON but not a plan"),
        ({"anchors": None}, "anchors is missing"),
        ({"anchors": [1, 2]}, r"anchors=\[1, 2\] must ascend from 0"),
        ({"anchors": [0, 2, 1]}, r"must ascend"),
        ({"anchors": [0, 3]}, r"below num_layers=3"),
        ({"anchors": []}, r"must ascend"),
        ({"anchors": [0, 1.5]}, "must be a list of integers"),
        ({"head_map": [[0, 1]] * 2}, r"head_map has shape \[2, 2\] instead of \[3, 2\]"),
        ({"head_map": [[0, 1], [0, 2], [0, 1]]}, r"head_map\[1\]=\[0, 2\] must name heads from 0 to 1"),
        ({"head_map": [[0, 1], 3, [0, 1]]}, r"head_map=.* must be a list of lists of heads"),
        ({"heads": "mix"}, "heads='mix' must be one of"),
        ({"tile": 48}, "tile=48 must be one of"),
        ({"tile": "16"}, "tile='16' must be a positive integer"),
        ({"query_tile": 0}, "query_tile=0"),
        ({"fraction": -1}, "fraction=-1 must be a number from 0 to 1"),
        ({"fraction": 1.5}, "fraction=1.5"),
        ({"minimum": -1}, "minimum=-1 must be an integer from 0"),
        ({"local": -1}, "local=-1 must be an integer from 0"),
        ({"sinks": "16"}, "sinks='16' must be an integer from 0"),
        ({"own": [0]}, r"own=\[0\] must ascend"),
        ({"own": [2], "head_map": [[0, 1], [0, 1], [1, 0]]}, r"head_map\[2\]=\[1, 0\] must be \[0, 1, "),
        ({"budgets": [[0.5, 0.5]]}, r"budgets have shape \[1, 2\] instead of \[3, 2\]"),
        ({"budgets": [["all", 1]] * 3}, r"budgets=.* must be a list of lists of numbers"),
        ({"score_keys": 0}, "score_keys=0 must be a positive integer"),
        ({"score_keys": 300}, "score_keys=300 must be a positive integer of at most 128"),
        ({"promise": None}, "promise is missing"),
        ({"promise": {"keep": 0.9}}, "promise lacks fresh, held, judged_tokens, measured"),
        ({"promise": PROMISE | {"measured": {}}}, "measured in the promise lacks asked"),
        ({"promise": PROMISE | {"measured": None}}, "measured=None in the promise"),
        ({"promise": PROMISE | {"max_kl": None}}, "max_kl=None in the promise must be a number"),
        ({"promise": PROMISE | {"max_kl": "0.02"}}, "max_kl='0.02' in the promise must be a number"),
        ({"promise": PROMISE | {"max_kl": True}}, "max_kl=True in the promise must be a number"),
        ({"promise": PROMISE | {"keep": float("nan")}}, "keep=nan must be a finite number"),
        ({"promise": PROMISE | {"colour": "red"}}, r"promise has unknown fields \['colour'\]"),
        ({"promise": PROMISE | {"judged_tokens": []}}, r"judged_tokens=\[\] in the promise must be a list"),
        ({"promise": PROMISE | {"fresh": 1}}, "fresh=1 in the promise must be true or false"),
        ({"promise": PROMISE | {"held": "yes"}}, "held='yes' in the promise must be true or false"),
        ({"promise": {k: v for k, v in PROMISE.items() if k != "max_kl"}}, "promise lacks keep or max_kl"),
        ({"promise": PROMISE | {"window_tokens": 512}}, r"promise has unknown fields \['window_tokens'\]"),
        ({"promise": PROMISE | {"measured": MEASURED | {"density": None}}}, "density=None in the promise"),
        ({"promise": PROMISE | {"measured": MEASURED | {"found": 1.5}}}, "found=1.5 in the promise must be an integer"),
        ({"promise": PROMISE | {"measured": MEASURED | {"x": 1}}}, r"measured in the promise has unknown fields"),
        ({"local": 2**40}, "local=1099511627776 must be an integer from 0 to 2147483647"),
        ({"sinks": 2**31}, "sinks=2147483648 must be an integer from 0"),
        ({"minimum": 2**31}, "minimum=2147483648 must be an integer from 0"),
        ({"query_tile": 10**9}, "query_tile=1000000000 must be a positive integer of at most 1024"),
        ({"crossover_tokens": -1}, "crossover_tokens=-1"),
        ({"num_layers": True}, "num_layers=True must be a positive integer of at most 65536"),
        ({"colour": "red"}, r"unknown fields \['colour'\]"),
    ],
)
def test_what_is_wrong_inside_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        Plan.load(written(tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_a_plan_of_another_model_is_refused():
    PLAN.check(CONFIG, "abc")
    with pytest.raises(ValueError, match="another model: it was made for 'abc', but this model is 'xyz'"):
        PLAN.check(CONFIG, "xyz")
    with pytest.raises(ValueError, match="its num_layers is 3, but this model's is 4"):
        PLAN.check(replace(CONFIG, num_layers=4))
    with pytest.raises(ValueError, match="its num_kv_heads is 2, but this model's is 4"):
        PLAN.check(replace(CONFIG, num_kv_heads=4))
    with pytest.raises(ValueError, match="tile=128 does not fit this model's context of 64"):
        replace(PLAN, tile=128).check(replace(CONFIG, max_positions=64))
    with pytest.raises(ValueError, match="query_tile=512 does not fit this model's context of 256"):
        replace(PLAN, query_tile=512).check(CONFIG)


def test_policies_by_name():
    assert policy_for("dense", CONFIG) == Dense()
    kascade = policy_for("kascade", CONFIG, PLAN, fraction=0.2)
    assert kascade == replace(Kascade.from_plan(PLAN), fraction=0.2)
    assert policy_for("window", CONFIG, window=64, sinks=4) == Window(window=64, sinks=4)
    assert policy_for("oracle", CONFIG, PLAN) == Oracle(tile=16, fraction=0.1)
    for name in POLICIES:
        policy = policy_for(name, CONFIG, PLAN)
        assert policy.name == name
        assert hash(policy) == hash(policy_for(name, CONFIG, PLAN))  # as static arguments, they share programs


def test_policy_errors():
    with pytest.raises(ValueError, match="attention='sparse' must be one of"):
        policy_for("sparse", CONFIG)
    with pytest.raises(ValueError, match="needs a plan"):
        policy_for("kascade", CONFIG)
    with pytest.raises(ValueError, match="windows=3 is not an option of Window"):
        policy_for("window", CONFIG, windows=3)
    with pytest.raises(ValueError, match="another model"):
        policy_for("kascade", replace(CONFIG, num_layers=4), PLAN)


def test_below_the_crossover_kascade_is_dense():
    policy = Kascade.from_plan(PLAN)
    assert [policy.at_position(n, 64) for n in (99, 100, 127, 128)] == [Dense(), Dense(), Dense(), policy]
    assert [policy.decode_at(n, 64) for n in (127, 128)] == [Dense(), policy]
    assert Dense().at_position(5, 64) == Dense().decode_at(5, 64) == Dense()


@pytest.mark.parametrize("unit", [64, 128, 256, 1024])
def test_a_crossover_is_one_position_in_every_pool(unit):
    """`generate` cuts at multiples of 64 rows, a server's pages on an accelerator at 256, a split context at 1,024."""
    policy = replace(Kascade.from_plan(PLAN), crossover_tokens=1100)
    assert [policy.at_position(n, unit) == Dense() for n in (1100, 1152, 1280, 2047, 2048)] == [True] * 4 + [False]


def test_decode_has_a_crossover_of_its_own(tmp_path):
    """A plan without the field is one whose decode nobody measured."""
    for value, dense in ((None, 128), (0, 0), (40, 40), (300, 300)):
        plan = replace(PLAN, decode_crossover=value)
        plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == plan
        policy = Kascade.from_plan(plan)
        assert [policy.decode_at(n, 64) for n in (max(dense - 1, 0), dense)] == [Dense() if dense else policy, policy]
        assert policy.at_position(127, 64) == Dense()
    raw = json.loads((tmp_path / "plan.json").read_text())
    del raw["decode_crossover"]
    (tmp_path / "plan.json").write_text(json.dumps(raw))
    assert Plan.load(tmp_path / "plan.json").decode_crossover is None
    with pytest.raises(ValueError, match="decode_crossover=-1 must be from 0 to"):
        replace(PLAN, decode_crossover=-1)
