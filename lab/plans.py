"""Make the plans that the package ships: `python -m lab.plans {demo | smollm2} [again]`.

"again" keeps the budgets of the shipped plan and measures the rest again: the promise, which states how much of dense
attention's quality the plan keeps, and the cross-over, which is the prompt length from which the plan is faster than
dense attention. Cross-overs are timed, so run nothing else meanwhile.
"""

import sys
from collections.abc import Sequence
from types import MappingProxyType

import numpy as np

from lab.passkeys import calibration_texts, with_pass_keys
from tessera.calibration.calibrate import calibrate
from tessera.calibration.remeasure import measure_again
from tessera.core.files import DEMO_MODEL, SHIPPED
from tessera.generate import Model, load
from tessera.measure.judge.library import library_calibration, library_corpus
from tessera.measure.judge.texts import DOMAINS, windows_of
from tessera.models.files.fetch import fetch
from tessera.sparse.plan import Plan
from tessera.sparse.promise import summary

DEMO_TARGET = MappingProxyType({"max_kl": 0.05})
"""Arguments of `calibrate`; `max_kl` is in nats per token. Only layer 1 of the demo model finds pass keys. With this
target, no head of layer 1 gets budget 1, with which it would read all keys. The control, `contenders.without_choice`,
then reads no distant keys in layer 1 and so finds no pass keys."""


REAL_PLAN = SHIPPED / "smollm2.plan.json"
REAL_TARGET = MappingProxyType({"max_kl": 0.02, "minimum": 224})
"""Arguments of `calibrate`; `max_kl` is in nats per token, `minimum` in keys. In every domain of the evaluation,
`max_kl` is below the divergence of a sliding window that reads as many keys as the plan (docs/answers.md). Without
`minimum`, a head with a small budget would read too few keys at 2,048 tokens (LOG.md)."""


def search_demo(model: Model) -> Plan:
    """Search for the budgets of the demo model's plan, on `calibration_texts`."""
    rows = calibration_texts(model.config.max_positions)
    return calibrate(model, rows, max_tokens=sum(map(len, rows)), **DEMO_TARGET, crossover=0)


def search_smollm2(model: Model) -> Plan:
    """Search for the budgets of SmolLM2's plan, on library text that no test and no evaluation uses."""
    text = bytes(library_calibration().astype(np.uint8)).decode("utf-8", "replace")
    return calibrate(model, [text], **REAL_TARGET, crossover=0)


def judge_demo(model: Model) -> list[list[int]]:
    """Return token lists of held-out library text; as in `calibration_texts`, every second list hides a pass key."""
    return with_pass_keys(library_corpus().held_out, model.config.max_positions, 4, seed=7)


def judge_smollm2(model: Model) -> list[list[int]]:
    """Return one window of tokens, as long as the model's context, from each domain of the evaluation."""
    size = model.config.max_positions
    return [windows_of(np.asarray(model.tokenizer.encode(text())), 1, size)[0].tolist() for text in DOMAINS.values()]


def main(argv: Sequence[str]) -> int:
    """Search or re-measure one plan, write it to its shipped path and print its summary."""
    name, *again = argv
    if name == "smollm2":
        path, search, judge, model = REAL_PLAN, search_smollm2, judge_smollm2, load(fetch("smollm2"))
    else:
        path, search, judge, model = DEMO_MODEL / "plan.json", search_demo, judge_demo, load(DEMO_MODEL)
    plan = measure_again(model, Plan.load(path) if again else search(model), judge(model))
    plan.save(path)
    print(path.name, *summary(plan), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
