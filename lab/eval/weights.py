"""Measure what fewer bits per weight cost on a real model, alone and under its plan.

    python -m lab eval --suite real-weights --resume

A *form* is a number format of the weights, named in `core.quant.NAMES`. The model runs the texts and questions of
`real` twice in each form that its weights can take: under dense attention and under the plan. KL is measured against
the same model with float weights under dense attention, so it includes what both the form and the plan lose. The
control is int8 with each matrix's scales shuffled among its channels; it must be far worse than plain int8.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from tessera.core import hardware, quant
from tessera.core.quant import is_quantised
from tessera.generate import Model, load
from tessera.measure.evidence import How, Record
from tessera.measure.judge import paired, real
from tessera.measure.judge.answers import run_trials
from tessera.measure.judge.closeness import BLOCK, closeness, run_text
from tessera.measure.judge.contenders import PLAN, Contender
from tessera.measure.judge.real import Ledger, Material, Sizes
from tessera.sparse.baselines import Dense
from tessera.sparse.plan import THROUGHOUT, Plan

FLOAT, CONTROL = "float", "control: int8, scales shuffled"
TEXT_OP, TASK_OP = "eval weights text", "eval weights task"
SIZES: Final = Sizes(lengths=(2048,), documents=(("single", 2048, 4),), windows=1, brief=())
"""One window of 2,048 tokens per domain, and four documents with questions of kind "single"."""
ORDER: Final = (FLOAT, "int8", CONTROL, "gguf", "w8a8", "fp8", "int4-g32", "int4", "int4-g64", "int4-g128")
"""Forms in the order they run. The most used forms come first, so that an interrupted run has measured them."""


@dataclass(kw_only=True)
class Bench:
    """Inputs and records that all forms share.

    Attributes:
        base: the model with float weights.
        plan: the model's plan; None runs the forms under dense attention only.
        material: texts and documents.
        ledger: records of the run.
        load: function that takes a form's name and returns the model in that form.
        held: form's name -> model. It holds only the form that runs now, to bound memory.
    """

    base: Model
    plan: Plan | None
    material: Material
    ledger: Ledger
    load: Callable[[str], Model]
    held: dict[str, Model] = field(default_factory=dict)

    def model(self, name: str) -> Model:
        """Return the model in the named form, from `held` if it is there."""
        if name not in self.held:
            self.held = {name: self.base if name == FLOAT else self.load(name)}
        return self.held[name]


def shuffled(model: Model, seed: int = 0) -> Model:
    """Return a copy of the model with the scales of each quantised matrix shuffled among its output channels."""
    rng = np.random.default_rng(seed)

    def shuffle(weight: Any) -> Any:
        if not is_quantised(weight):
            return weight
        order = rng.permutation(weight.scale.shape[-1])
        return replace(weight, scale=jax.device_put(np.asarray(weight.scale)[..., order]))

    return replace(model, params=jax.tree.map(shuffle, model.params, is_leaf=is_quantised))


def run(
    model: Model, plan: Plan | None, *, text: str | None = None, out: Path | None = None, resume: bool = False,
    command: str = "python -m lab eval --suite real-weights", sizes: Sizes = SIZES,
) -> int:  # fmt: skip
    """Run the suite and append each record as soon as it is made; Ctrl-C loses only the running job.

    Args:
        model: the model with float weights, loaded from a folder or file; needs a tokenizer.
        plan: the model's plan; None runs the forms under dense attention only.
        text, resume: as for `real.run`.
        out: file of records; evidence/weights-<device>.jsonl if None.
        command: command line that repeats the run.
        sizes: amount of work.

    Raises:
        ValueError: the model has no tokenizer, or its context is too short.
    """
    if model.tokenizer is None:
        raise ValueError(f"{model.source} has no tokenizer, but the questions are text: pass a model with a tokenizer")
    sizes = real.fitting(sizes, model.config.max_positions, 0)
    out = Path("evidence") / f"weights-{hardware.device_slug()}.jsonl" if out is None else Path(out)

    def load_form(name: str) -> Model:
        if name == CONTROL:
            return shuffled(load(model.source, weights="int8"))
        return load(model.source, weights=name)

    bench = Bench(
        base=model,
        plan=plan,
        material=Material.of(model, sizes, text),
        ledger=Ledger.open(out, command, model.precision, resume),
        load=load_form,
    )
    names = [name for name in ORDER if name in (FLOAT, CONTROL) or fits(model, name)]
    real.announce(in_order(bench, names, sizes))
    return 0


def fits(model: Model, name: str) -> bool:
    """Return whether the model's weights can take a form; print the reason if they cannot."""
    from tessera.models.files.forms import check_forms
    from tessera.models.files.source import open_source

    try:
        check_forms(open_source(model.source), name)
    except ValueError as error:
        print(f"{name} is left out: {error}")
        return False
    return True


def contenders(bench: Bench, name: str) -> Iterator[Contender]:
    """Yield a form under dense attention and under the plan. The control runs under dense attention only."""
    yield Contender(name=name, title=f"{name}, dense", policy=Dense())
    if bench.plan is not None and name != CONTROL:
        sparse = bench.base.with_attention("kascade", bench.plan, **THROUGHOUT)
        yield Contender(name=name, title=f"{name}, {PLAN}", policy=sparse.policy)


def in_order(bench: Bench, names: Sequence[str], sizes: Sizes) -> list[Callable[[], Sequence[Record]]]:
    """Return the jobs that have no record yet. All forms answer one question before any form gets the next, so that an
    interrupted run holds complete comparisons."""
    length, asked = sizes.lengths[-1], []
    every = [contender for name in names for contender in contenders(bench, name)]
    for domain in bench.material.windows:
        for contender in every:
            if not bench.ledger.get(TEXT_OP, contender, f"{domain}, {length:,} tokens"):
                asked.append(lambda c=contender, d=domain: [judge_text(bench, c, d, length)])
    for kind, size, count in sizes.documents:
        for contender in every:
            if not bench.ledger.get(TASK_OP, contender, f"{kind} at {size}"):
                asked.append(lambda c=contender, k=kind, n=size, m=count: [judge_task(bench, c, k, n, m)])
    return asked


def facts_of(bench: Bench, contender: Contender) -> Mapping[str, Any]:
    """Return the facts that describe a contender: its form, its policy and the bytes of its weights."""
    model = bench.model(contender.name)
    weight_bytes = sum(quant.num_bytes(leaf) for leaf in jax.tree.leaves(model.params))
    policy = "dense" if isinstance(contender.policy, Dense) else PLAN
    return {"weights": contender.name, "policy": policy, "weight_bytes": weight_bytes}


def judge_text(bench: Bench, contender: Contender, domain: str, length: int) -> Record:
    """Record a contender's KL against float weights under dense attention, on one domain's windows."""
    model, blocks, counts = bench.model(contender.name), [], []
    for window, dense in zip(bench.material.windows[domain], bench.material.dense(bench.base, domain)):
        same = contender.name == FLOAT and isinstance(contender.policy, Dense)
        ours = dense if same else run_text(model, contender.policy, window)
        counts.append(ours.counts.sum(1))
        blocks.append(closeness(bench.base, dense.hidden, ours.hidden, window, other=model))
    own, (read, visible) = np.concatenate(blocks), np.sum(counts, 0)
    middle = paired.mean(own[:, 0])
    facts = dict(zip(("loss_dense", "loss", "agreement"), own[:, 1:].mean(0).round(6).tolist()))
    facts |= {"mean": middle.value, "low": middle.low, "high": middle.high, "domain": domain, "windows": len(blocks)}
    bench.ledger.dtype = model.precision
    how = How(iterations=len(own), check=f"KL(float, dense || form, policy), mean of every {BLOCK} tokens")
    facts |= facts_of(bench, contender)
    return bench.ledger.add(
        TEXT_OP,
        contender,
        f"{domain}, {length:,} tokens",
        own[:, 0].round(7).tolist(),
        unit="nats",
        density=tuple((read / visible).round(5).tolist()),
        facts=facts,
        how=how,
    )


def judge_task(bench: Bench, contender: Contender, kind: str, length: int, count: int) -> Record:
    """Record which questions a contender answers right.

    Of the questions that float weights answer right under dense attention, the facts hold the share that this contender
    also answers right.
    """
    model, documents = bench.model(contender.name), bench.material.documents(kind, length, count)
    answers = run_trials(model, contender.policy, documents, num_keys=length)
    found = [[int(o.found) for o in a.outcomes] for a in answers]
    share = paired.ratio([sum(own) for own in found], [len(own) for own in found])
    facts = {"kind": kind, "length": length, "found": found, "low": share.low, "high": share.high}
    question = f"{kind} at {length}"
    base = bench.ledger.done.get((TASK_OP, FLOAT, f"{question}: {FLOAT}, dense"))
    if base is not None:
        dense = base.facts["found"]
        kept = paired.kept(dense, found)
        facts |= {"of_dense": sum(map(sum, dense)), "kept_low": kept.low, "kept_high": kept.high}
        facts |= {"kept": None if np.isnan(kept.value) else kept.value}
    bench.ledger.dtype = model.precision
    how = How(iterations=sum(map(len, found)), check="every token of the answer is the best guess")
    facts |= facts_of(bench, contender)
    density = tuple(np.mean([a.density for a in answers], axis=0).round(5).tolist())
    rest = {"unit": "fraction", "density": density, "facts": facts, "how": how}
    return bench.ledger.add(TASK_OP, contender, question, [share.value], **rest)
