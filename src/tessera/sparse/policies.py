"""The table of policies that users choose by name.

A new policy needs a class, an entry in POLICIES, and its name in `cli.main.Attention`, because `cli.main` must not
import jax. Policies that only calibration and studies use (recorders, ablations, rivals) stay out of the table.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, Final

from tessera.sparse.baselines import Dense, Oracle, Window
from tessera.sparse.contract import Policy
from tessera.sparse.kascade import Kascade
from tessera.sparse.plan import Plan


def _kascade(config: Any, plan: Plan | None, **options: Any) -> Policy:
    if plan is None:
        raise ValueError("attention='kascade' needs a plan: make one with `tessera calibrate` and pass plan=...")
    plan.check(config)
    return replace(Kascade.from_plan(plan), **_known(Kascade, options))


def _window(config: Any, plan: Plan | None, **options: Any) -> Policy:
    return Window(**{**_tiles(plan), **_known(Window, options)})


def _oracle(config: Any, plan: Plan | None, **options: Any) -> Policy:
    names = ("fraction", "minimum", "local", "sinks")
    budget = {} if plan is None else {name: getattr(plan, name) for name in names}
    pooled = {} if plan is None else {"pooled": plan.heads == "pooled"}
    return Oracle(**{**_tiles(plan), **budget, **pooled, **_known(Oracle, options)})


def _dense(config: Any, plan: Plan | None, **options: Any) -> Policy:
    return Dense(**_known(Dense, options))


POLICIES: Final[Mapping[str, Callable[..., Policy]]] = MappingProxyType(
    {"dense": _dense, "kascade": _kascade, "window": _window, "oracle": _oracle}
)


def policy_for(name: str, config: Any, plan: Plan | None = None, **options: Any) -> Policy:
    """Build the policy called `name` for a model of this config; `options` override its fields, e.g. fraction=0.05.

    Kascade requires a plan, which it checks against the config. Window takes its tile sizes, and oracle its tile sizes
    and budget, from a plan if there is one; the command line passes a plan only to kascade.
    """
    if name not in POLICIES:
        raise ValueError(f"attention={name!r} must be one of {tuple(POLICIES)}")
    return POLICIES[name](config, plan, **options)


def _tiles(plan: Plan | None) -> dict[str, int]:
    return {} if plan is None else {"tile": plan.tile, "query_tile": plan.query_tile}


def _known(policy: type[Policy], options: Mapping[str, Any]) -> Mapping[str, Any]:
    names = [f.name for f in fields(policy)]
    if unknown := sorted(options.keys() - names):
        raise ValueError(
            f"{unknown[0]}={options[unknown[0]]!r} is not an option of {policy.__name__}, which has {names}"
        )
    return options
