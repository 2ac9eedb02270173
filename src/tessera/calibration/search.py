"""Find the per-head budgets of a plan that meets a target: ablate every KV head, then trade loss against keys.

1. *Damage* D[l,k] of KV head k in layer l: the model's loss when this head reads only the always-read keys and all
   other heads are dense. The loss is KL on text plus PROBE_WEIGHT times the log-probability that planted answers lose
   per token. Similarity of layers, the paper's measure, misses the heads that retrieve facts: a real model has only a
   handful of them, and neighbouring heads do not attend to the same keys.
2. *Missed mass* m[l,k,f]: the attention probability outside the best tiles that budget f (a share of the keys) allows
   the head to read, measured in one dense pass.
3. A head's loss at budget f is modelled as D (m[f] / m[0])^2, because KL is quadratic in a small change. Every head
   takes the budget that minimises loss + price * f, at one price for all; a higher price lowers the mean budget.
4. The search tries several mean budgets: it runs a policy that selects tiles by cheap scores, as the plan will, on text
   and probes. It chooses the smallest mean budget that meets the target.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from tessera.attention.contract import AttentionSpec, Positions
from tessera.calibration.report import Report
from tessera.calibration.retrieval import Probe, plant
from tessera.core.files import Notebook
from tessera.core.shapes import ceil_div
from tessera.core.units import rounded
from tessera.runtime.corpus import MAX_WINDOW, Corpus
from tessera.runtime.score import Compared, PolicyOf, compare_rows, make_policy, run_whole
from tessera.sparse.ablation import GRID, Budgeted, LocalHeads, MassRecorder, Tiling, missed_mass
from tessera.sparse.baselines import Dense
from tessera.sparse.contract import Policy
from tessera.sparse.kascade import Kascade

STRIDE = 4
"""Step in tokens between the text positions that are compared; adjacent positions are nearly redundant."""
PROBE_WEIGHT = 1.0
"""Weight of the planted answers in the damage: one lost nat per answer token counts as much as this many nats of KL per
text token."""
SHORT, LONG = 512, 4096
"""Tokens per window: SHORT for ablation, which takes one pass per head, LONG for trying mean budgets."""
NO_NOTEBOOK = Notebook()
STEPS = 5
"""Number of mean budgets that bisection tries, 0.25 first. They resolve the result to 1/64 below 0.25, and to 3/64
above."""
HELD_OUT_STEP = 0.03
"""Increment of the mean budget while the first held-out window misses the target."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Target of a plan, on text and on probes.

    Attributes:
        keep: minimum share of the probability that dense gives the right next token, as a geometric mean over tokens:
            exp(loss of dense - loss of the plan), with mean losses.
        max_kl: maximum KL(dense || plan), nats per token.
    """

    keep: float | None = None
    max_kl: float | None = None

    def __post_init__(self):
        if self.keep is not None and not 0 < self.keep < 1:
            raise ValueError(f"keep={self.keep} must be above 0 and below 1, such as 0.99")
        if self.max_kl is not None and not 0 < self.max_kl < math.inf:
            raise ValueError(f"max_kl={self.max_kl} must be above 0 and finite, such as 0.02")

    def holds(self, kept: "Kept") -> bool:
        by_loss = self.keep is None or all(share >= self.keep for share in (kept.text_kept, kept.probes_kept))
        return by_loss and (self.max_kl is None or all(kl <= self.max_kl for kl in (kept.text_kl, kept.probes_kl)))


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Measured losses of a policy against dense, over some windows.

    Attributes:
        text_kl, probes_kl: mean KL(dense || policy) per token, of text and of the probes' answers.
        text_loss, text_loss_dense: mean -ln p of the text.
        text_kept, probes_kept: exp(loss of dense - loss of the policy), with mean losses per token.
        asked, found_dense, found: numbers of probe answers, of those all of whose tokens dense predicts correctly, and
            of these those that the policy predicts correctly, too.
        density: keys read / keys visible, over all layers and heads.
        tokens: number of token positions of the text at which the policy is compared with dense.
    """

    text_kl: float
    text_loss: float
    text_loss_dense: float
    text_kept: float
    probes_kl: float
    probes_kept: float
    asked: int
    found_dense: int
    found: int
    density: float
    tokens: int

    def metrics(self) -> dict[str, float | int]:
        return {name: value if isinstance(value, int) else rounded(value) for name, value in asdict(self).items()}


def search_policy(
    model: Any, corpus: Corpus, target: Target, tiling: Tiling, report: Report, notebook: Notebook
) -> tuple[Kascade, dict[str, Any]]:
    """Find the policy that reads least and meets the target; return it with the plan's promise, metrics and tokens run.

    While the policy misses the target on the first held-out window, the mean budget grows by HELD_OUT_STEP. The promise
    states the losses that the policy has on a second held-out window. If there is no second one, the promise states
    those on the first and is not `fresh`, because that window set the budget.
    """
    windows = corpus.windows[:: ceil_div(len(corpus.windows), 2)]
    ablated, chosen_on = probes_of(model, windows, SHORT, 0), probes_of(model, windows[:1], LONG, 1)
    held_out = probes_of(model, corpus.held_out[:2], MAX_WINDOW, 2)  # before the long passes: raises on a short window
    damage = measure_damage(model, ablated, tiling, report.each, notebook)
    missed = notebook.keep("missed mass", lambda: measure_missed(model, chosen_on, tiling, report.each).tolist())
    missed = np.asarray(missed)
    tried = search(damage, missed, Judge(model, chosen_on), tiling, target, report.each, notebook)
    mean, judge = tried[-1].mean, Judge(model, held_out[:1])
    for _ in report.each("held-out text", range(round((1 - mean) / HELD_OUT_STEP) + 1)):
        policy = policy_of(choose_budgets(damage, missed, mean), tiling)
        kept = judge.noted(notebook, f"held-out text, mean budget {mean}", policy)
        if target.holds(kept) or mean >= 1:
            break
        mean = min(mean + HELD_OUT_STEP, 1.0)
    fresh = held_out[1:]
    if fresh:
        kept = Judge(model, fresh).noted(notebook, "new text", policy)
    promise = promise_of(target, fresh or held_out, kept, fresh=bool(fresh))
    metrics = {
        "damage": rounded(damage),
        "tried": [{"mean_budget": rounded(one.mean), **one.kept.metrics()} for one in tried],
    }
    run = [*chosen_on, *ablated[1:], *held_out]  # without the first ablated window, which is the start of chosen_on's
    return policy, {"promise": promise, "metrics": metrics, "tokens": sum(len(probe.tokens) for probe in run)}


def promise_of(target: Target, judged: Sequence[Probe], kept: Kept, *, fresh: bool) -> dict[str, Any]:
    return {
        **{name: value for name, value in asdict(target).items() if value is not None},
        "judged_tokens": [len(probe.tokens) for probe in judged],
        "fresh": fresh,
        "held": target.holds(kept),
        "measured": kept.metrics(),
    }


@dataclass(frozen=True)
class Localised:
    """Function that makes a policy from a mask, [L,K]: whether each head reads only the always-read keys."""

    tiling: Tiling

    def __call__(self, array: Any) -> Policy:
        return LocalHeads(tiling=self.tiling, local_LK=array)


@dataclass(frozen=True)
class WithBudgets:
    """Function that makes a policy from the heads' budgets, [L,K]."""

    tiling: Tiling

    def __call__(self, array: Any) -> Policy:
        return Budgeted(tiling=self.tiling, budgets_LK=array)


class Judge:
    """Compares policies with dense on the probes' windows; the constructor runs dense, once."""

    def __init__(self, model: Any, probes: Sequence[Probe], each: Callable = lambda stage, items: items):
        self.model, self.probes, self.each = model, probes, each
        self.dense = [run_whole(model, probe.tokens, Dense())[0] for probe in each("dense", probes)]
        if not all(np.isfinite(hidden).all() for hidden in self.dense):
            raise ValueError("the model's activations are not finite on this text: check its weights for NaN or inf")

    def noted(self, notebook: Notebook, name: str, policy: PolicyOf, array: Any = None) -> Kept:
        """Return the notebook's result under this name; if there is none, call the judge and store what it returns."""
        return Kept(**notebook.keep(name, lambda: asdict(self(policy, array))))

    def __call__(self, policy: PolicyOf, array: Any = None) -> Kept:
        """Compare a policy with dense on all windows; if `policy` is a function, the policy is policy(array)."""
        text, answers, found, found_dense = [], [], 0, 0
        read, visible, count_reads = 0.0, 0.0, make_policy(policy, array).reads
        for probe, dense in zip(self.each("plan", self.probes), self.dense):
            hidden, notes = run_whole(self.model, probe.tokens, policy, array)
            for reads in map(count_reads, notes):
                read, visible = read + float(reads.read.sum()), visible + float(reads.visible.sum())
            compare = partial(compare_rows, self.model, dense, hidden, probe.tokens)
            text.append(compare(np.arange(STRIDE - 1, probe.text_end - 1, STRIDE)))
            answers.append(compare(np.concatenate([np.arange(a - 1, b - 1) for a, b in probe.answers])))
            sizes = np.cumsum([b - a for a, b in probe.answers])[:-1]
            for ours, theirs in zip(*(np.split(x, sizes) for x in (answers[-1].right, answers[-1].right_dense))):
                found_dense += bool(theirs.all())
                found += bool(theirs.all() and ours.all())
        text, answers = (Compared(*map(np.concatenate, zip(*parts))) for parts in (text, answers))
        return Kept(
            text_kl=float(text.kl.mean()),
            text_loss=float(text.loss.mean()),
            text_loss_dense=float(text.loss_dense.mean()),
            text_kept=math.exp(float((text.loss_dense - text.loss).mean())),
            probes_kl=float(answers.kl.mean()),
            probes_kept=math.exp(float((answers.loss_dense - answers.loss).mean())),
            asked=sum(len(probe.answers) for probe in self.probes),
            found_dense=found_dense,
            found=found,
            density=read / visible,
            tokens=len(text.kl),
        )


def measure_damage(
    model: Any, probes: Sequence[Probe], tiling: Tiling, each: Callable, notebook: Notebook = NO_NOTEBOOK
) -> np.ndarray:
    """Measure the damage D[L,K] of every head: the loss while this head alone reads only the always-read keys."""
    judge, shape = Judge(model, probes), (model.config.num_layers, model.config.num_kv_heads)
    damage, local = np.zeros(shape), Localised(tiling)
    for layer, head in each("ablation", list(np.ndindex(*shape))):
        mask = np.zeros(shape, bool)
        mask[layer, head] = True
        kept = judge.noted(notebook, f"without layer {layer} head {head}", local, mask)
        damage[layer, head] = max(kept.text_kl, 0.0) + PROBE_WEIGHT * max(-math.log(kept.probes_kept), 0.0)
    return damage


def measure_missed(model: Any, probes: Sequence[Probe], tiling: Tiling, each: Callable) -> np.ndarray:
    """Measure the missed mass m[L,K,F]: dense's probability outside the best tiles, per head and budget of GRID."""
    missing = total = 0.0
    for probe in each("missed mass", probes):
        start = 0
        for mass in run_whole(model, probe.tokens, MassRecorder(tiling=tiling))[1]:
            rows = min(mass.shape[3] * tiling.query_tile, len(probe.tokens) - start)
            where = Positions(*(jnp.asarray([x], jnp.int32) for x in (start, start + rows, rows)))
            missing = missing + missed_mass(mass, AttentionSpec(window=model.config.window), where, tiling)
            total, start = total + mass.sum((1, 3, 4), dtype=np.float64), start + rows
    return missing / total[..., None]


def choose_budgets(damage_LK: np.ndarray, missed_LKF: np.ndarray, mean: float) -> np.ndarray:
    """Choose a budget from GRID for every head, [L,K], so that their mean is at most `mean` and the loss is minimal.

    The modelled losses D (m[f] / m[0])^2 of the heads add up, so each head minimises its loss + price * f, where f is
    its budget. Bisection finds the price.
    """
    grid = np.asarray(GRID)
    share = missed_LKF / np.maximum(missed_LKF[..., :1], 1e-12)
    loss = damage_LK[..., None] * share**2

    def at(price: float) -> np.ndarray:
        return grid[np.argmin(loss + price * grid, axis=-1)]

    low, high = -30.0, 30.0  # ln of the price; a higher price gives smaller budgets
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if at(math.exp(middle)).mean() > mean else (low, middle)
    return at(math.exp(high))


@dataclass(frozen=True, kw_only=True)
class Tried:
    """One attempt of the search: the requested mean budget, the budgets, and their measured losses."""

    mean: float
    budgets: np.ndarray
    kept: Kept


def search(
    damage: np.ndarray,
    missed: np.ndarray,
    judge: Judge,
    tiling: Tiling,
    target: Target,
    each: Callable,
    notebook: Notebook = NO_NOTEBOOK,
) -> list[Tried]:
    """Bisect for the smallest mean budget that meets the target, else all keys; the chosen attempt comes last."""
    tried, low, high = [], 0.0, 1.0

    def attempt(mean: float) -> Tried:
        budgets = choose_budgets(damage, missed, mean)
        kept = judge.noted(notebook, f"mean budget {mean}", WithBudgets(tiling), budgets.astype(np.float32))
        tried.append(Tried(mean=mean, budgets=budgets, kept=kept))
        return tried[-1]

    best = None
    for step in each("budgets", range(STEPS)):
        middle = 0.25 if step == 0 else (low + high) / 2
        found = attempt(middle)
        if target.holds(found.kept):
            best, high = found, middle
        else:
            low = middle
    return [*tried, best if best is not None else attempt(1.0)]


def probes_of(model: Any, windows: Sequence[np.ndarray], length: int, seed: int) -> list[Probe]:
    """Cut the windows to `length` tokens and plant facts: four in a window of up to SHORT tokens, eight in others."""
    cut = [window[:length] for window in windows]
    return [plant(model, row, (seed, index), 4 if len(row) <= SHORT else 8) for index, row in enumerate(cut)]


def policy_of(budgets_LK: np.ndarray, tiling: Tiling) -> Kascade:
    """Build the policy for these budgets: layers that read all keys are anchors, the others choose their own tiles."""
    num_layers, num_kv_heads = budgets_LK.shape
    anchors = tuple(layer for layer in range(num_layers) if (budgets_LK[layer] >= 1).all())
    return Kascade(
        anchors=anchors,
        own=tuple(layer for layer in range(num_layers) if layer not in anchors),
        head_map=(tuple(range(num_kv_heads)),) * num_layers,
        heads="identity",
        budgets=tuple(tuple(float(value) for value in row) for row in budgets_LK),
        fraction=float(budgets_LK.mean()),
        **asdict(tiling),
    )
