"""A plan's promise and measurements in words, printed by `tessera calibrate` and `tessera doctor`."""

from tessera.sparse.plan import Plan


def promise_line(plan: Plan) -> str:
    """Describe in one sentence what a plan keeps."""
    if not plan.promise:
        return "the plan promises nothing: it was made without a target"
    found = plan.promise["measured"]
    asked = ", ".join(f"{name} {plan.promise[name]:g}" for name in ("keep", "max_kl") if name in plan.promise)
    planted = f"{found['found']} of {found['found_dense']} planted answers"
    if not found["found_dense"]:
        planted = f"none of {found['asked']} planted answers, as dense finds none"
    return (
        f"the plan was asked for {asked}; it reads {found['density']:.0%} of keys at {plan.promise['window_tokens']:,} "
        f"tokens and keeps {found['text_kept']:.1%} of dense's probability on new text (KL {found['text_kl']:.3f}) "
        f"and {planted}"
    )


def summary(plan: Plan) -> list[str]:
    """Describe for people, line by line, what a plan costs and keeps compared with dense."""
    lines = []
    if plan.promise:
        found = plan.promise["measured"]
        lines += [
            promise_line(plan),
            f"  keys read           dense 100 %, plan {found['density']:.1%}",
            f"  loss per token      dense {found['text_loss_dense']:.4f}, plan {found['text_loss']:.4f} "
            f"({found['text_kept']:.2%} of the probability kept, KL {found['text_kl']:.4f})",
            f"  planted answers     dense {found['found_dense']} of {found['asked']}, plan keeps {found['found']} of "
            f"those ({found['probes_kept']:.2%} of the probability, KL {found['probes_kl']:.4f})",
        ]
    elif "perplexity_kascade" in plan.metrics:
        dense, ours = (plan.metrics[f"perplexity_{name}"] for name in ("dense", "kascade"))
        lines.append(f"held-out perplexity: dense {dense:g}, plan {ours:g}; anchors {list(plan.anchors)}")
        if ours > 1.02 * dense:
            lines.append(
                "warning: the plan loses over 2 %: calibrate with --keep 0.99 instead, which searches for what holds"
            )
    timed = plan.metrics.get("crossover")
    for tokens, dense_ms, ours_ms in (
        zip(*(timed[name] for name in ("tokens", "dense_ms", "kascade_ms"))) if timed else ()
    ):
        runs = "plan" if tokens >= plan.crossover_tokens else "dense"
        lines.append(
            f"  prefill of {tokens:>7,}   dense {dense_ms:,.0f} ms, plan {ours_ms:,.0f} ms "
            f"({dense_ms / ours_ms:.2f}x): runs {runs}"
        )
    return lines
