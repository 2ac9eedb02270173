"""Count the pass keys that the shipped model finds under dense attention, Kascade and a control.

The control is Kascade's plan without the choice of keys: its sparse heads read only the tiles that Kascade always
reads. Those are the query tile's own tiles, the local tiles before them and the sinks (the sequence's first tiles).
"""

from collections.abc import Iterator

from lab.bench.stand import Stand
from lab.passkeys import passkey_accuracy, passkey_tasks
from tessera import generate
from tessera.core.files import DEMO_MODEL
from tessera.measure.evidence import How, Record, What
from tessera.measure.judge.contenders import without_choice
from tessera.measure.judge.paired import wilson
from tessera.sparse.plan import THROUGHOUT


def pass_keys(stand: Stand) -> Iterator[Record]:
    """Record how many five-digit pass keys each policy finds by greedy decoding; a key counts if all digits are right.

    The keys are hidden at evenly spaced depths of held-out text. Kascade runs even at lengths below its plan's
    cross-over, at which `generate` would run dense attention.
    """
    kascade = generate.load(DEMO_MODEL, attention="kascade")
    plan = kascade.plan
    config = {"model": plan.model, "anchors": list(plan.anchors), "own": list(plan.own), "heads": plan.heads}
    names = ("tile", "query_tile", "local", "sinks", "fraction", "minimum")
    config |= {name: getattr(plan, name) for name in names} | {"budgets": list(plan.budgets)}
    models = {
        "dense": kascade.with_attention("dense"),
        "kascade": kascade.with_attention("kascade", **THROUGHOUT),
        "control": kascade.with_attention("kascade", without_choice(plan), **THROUGHOUT),
    }
    for length in stand.sizes.passkey_tokens:
        tasks = passkey_tasks(stand.sizes.passkeys, length)
        for name, model in models.items():
            found = passkey_accuracy(model, tasks, batch=1)
            low, high = wilson(found.num_right, found.num_tasks)
            what = What(
                op="quality",
                kernel=name,
                workload=f"pass_keys_{length}",
                dtype="float32",
                config=config if name == "kascade" else {"model": plan.model},
                title=f"pass key in {length:,} tokens, shipped model",
            )
            yield stand.record(
                what,
                [found.share],
                How(iterations=found.num_tasks, check="all digits equal, greedy"),
                unit="fraction",
                density=found.layer_density,
                facts={"trials": found.num_tasks, "right": found.num_right, "low": low, "high": high},
            )
