"""Describe a plan's promise and measurements in words, for printing when a plan is made, loaded, used or examined."""

from tessera.sparse.plan import Plan

FEWEST_ANSWERS = 5
"""Minimum number of planted answers that dense attention must find. With fewer, the share that a plan keeps of them
means nothing."""


def promise_line(plan: Plan) -> str:
    if not plan.promise:
        return "the plan promises nothing: it was made without a target"
    found = plan.promise["measured"]
    verdict = "" if plan.promise["held"] else ", which misses the target"
    return (
        f"the plan was asked for {_asked(plan)}; on {_judged(plan)} it reads {found['density']:.0%} of keys and keeps "
        f"{found['text_kept']:.1%} of dense's probability (KL {found['text_kl']:.3f}; planted answers "
        f"{found['probes_kept']:.1%}, KL {found['probes_kl']:.3f}){verdict}; {_answers(plan)}"
    )


def promise_note(plan: Plan | None) -> str:
    """Describe in a few words what a plan promised and measured; "" without a plan or a promise."""
    if plan is None or not plan.promise:
        return ""
    found = plan.promise["measured"]
    measured = {
        "keep": min(found["text_kept"], found["probes_kept"]),
        "max_kl": max(found["text_kl"], found["probes_kl"]),
    }
    named = ", ".join(f"{name} {measured[name]:.4g}" for name in measured if name in plan.promise)
    return f"plan asked for {_asked(plan)}, measured {named}"


def promises_answers(plan: Plan) -> bool:
    return plan.promise["measured"]["found_dense"] >= FEWEST_ANSWERS


def summary(plan: Plan) -> list[str]:
    """Return lines that tell users how many keys a plan reads, how much quality it keeps and how fast it runs."""
    lines = [promise_line(plan)]
    if plan.promise:
        found = plan.promise["measured"]
        lines += [
            f"  keys read           dense 100 %, plan {found['density']:.1%}",
            f"  loss per token      dense {found['text_loss_dense']:.4f}, plan {found['text_loss']:.4f} "
            f"({found['text_kept']:.2%} of the probability kept, KL {found['text_kl']:.4f})",
            f"  planted answers     dense {found['found_dense']} of {found['asked']}, plan keeps {found['found']} of "
            f"those ({found['probes_kept']:.2%} of the probability, KL {found['probes_kl']:.4f})",
        ]
        if not promises_answers(plan):
            lines.append(
                f"warning: dense finds fewer than {FEWEST_ANSWERS} planted answers, so the plan promises nothing about "
                "answers: judge them with `tessera eval --suite real`"
            )
    elif "perplexity_kascade" in plan.metrics:
        dense, ours = (plan.metrics[f"perplexity_{name}"] for name in ("dense", "kascade"))
        lines.append(f"held-out perplexity: dense {dense:g}, plan {ours:g}; anchors {list(plan.anchors)}")
        if ours > 1.02 * dense:
            lines.append(
                "warning: the plan loses over 2 %: calibrate with --keep 0.99 instead, which searches for a better plan"
            )
    return [*lines, *_times(plan, "prefill of", "crossover", plan.crossover_tokens), *_decode_times(plan)]


def _decode_times(plan: Plan) -> list[str]:
    return [] if plan.decode_crossover is None else _times(plan, "decode at", "decode_crossover", plan.decode_crossover)


def _times(plan: Plan, what: str, name: str, crossover: int) -> list[str]:
    timed = plan.metrics.get(name)
    columns = zip(*(timed[column] for column in ("tokens", "dense_ms", "kascade_ms"))) if timed else ()
    return [
        f"  {what} {tokens:>7,}   dense {dense_ms:,.0f} ms, plan {ours_ms:,.0f} ms "
        f"({dense_ms / ours_ms:.2f}x): runs {'plan' if tokens >= crossover else 'dense'}"
        for tokens, dense_ms, ours_ms in columns
    ]


def _asked(plan: Plan) -> str:
    return ", ".join(f"{name} {plan.promise[name]:g}" for name in ("keep", "max_kl") if name in plan.promise)


def _judged(plan: Plan) -> str:
    text = "new text" if plan.promise["fresh"] else "the text that set its budget"
    sizes = plan.promise["judged_tokens"]
    if len(sizes) > 2 and len(set(sizes)) == 1:
        return f"{text} ({len(sizes)} windows of {sizes[0]:,} tokens)"
    return f"{text} ({' and '.join(f'{size:,}' for size in sizes)} tokens)"


def _answers(plan: Plan) -> str:
    found = plan.promise["measured"]
    if promises_answers(plan):
        return f"it keeps {found['found']} of {found['found_dense']} planted answers"
    dense = f"only {found['found_dense']}" if found["found_dense"] else "none"
    return f"it promises nothing about answers, because dense finds {dense} of {found['asked']} planted answers"
