"""Tessera: LLaMA-family models at long context in JAX; attention reads only the key tiles that matter.

    model = tessera.load("path/or/hub-id", attention="kascade", plan="plan.json")
    [answer] = model.generate(["..."], max_new_tokens=64)

Importing this package is fast: a heavy module, such as JAX, is imported when a name that needs it is first used.
"""

from importlib import import_module

_WHERE = {
    "load": "generate",
    "save": "generate",
    "Model": "generate",
    "Generation": "generate",
    "fetch": "models.files.fetch",
    "calibrate": "calibration.calibrate",
    "Plan": "sparse.plan",
    "attention": "attention.dispatch",
    "explain": "attention.dispatch",
    "AttentionSpec": "attention.contract",
    "AttentionOut": "attention.contract",
    "Selection": "attention.contract",
    "select_tiles": "attention.selection",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str):
    if name in ("LLM", "AutoModelForCausalLM", "AutoTokenizer", "pipeline"):
        raise AttributeError(f"module 'tessera' has no attribute {name!r}: use tessera.load and Model.generate")
    if name not in _WHERE:
        raise AttributeError(f"module 'tessera' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"tessera.{_WHERE[name]}"), name)


def __dir__():
    return __all__
