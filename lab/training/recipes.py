"""The recipe of the demo model, and a tiny one that checks in seconds that everything runs."""

from dataclasses import replace

from lab.training.data import LIBRARY
from lab.training.look_back import LOOKING_BACK
from tessera.train.recipes import SMALL_CONFIG, Recipe, Stage

DEMO_CONFIG = SMALL_CONFIG

COPYING = (("copy", 1.0),)
FIRST_NOTES = (("copy", 0.1), ("recall", 0.3), ("notes", 0.6))
MORE_NOTES = (("recall", 0.2), ("notes", 0.75), ("text", 0.05))
MOSTLY_NOTES = (("recall", 0.1), ("notes", 0.85), ("text", 0.05))

DEMO = Recipe(
    name="demo",
    config=DEMO_CONFIG,
    data=LOOKING_BACK,
    stages=(
        Stage(length=24, batch=64, steps=486, mixture=COPYING),
        Stage(length=64, batch=48, steps=44, mixture=(("copy", 0.6), ("recall", 0.4))),
        Stage(length=128, batch=32, steps=170, mixture=FIRST_NOTES),
        Stage(length=256, batch=16, steps=200, mixture=MORE_NOTES),
        Stage(length=512, batch=10, steps=120, mixture=MOSTLY_NOTES),
        Stage(length=1024, batch=6, steps=150, mixture=MOSTLY_NOTES),
        Stage(length=2048, batch=3, steps=74, mixture=MOSTLY_NOTES, rate=1.5e-3),
        Stage(length=2048, batch=4, steps=36, mixture=MOSTLY_NOTES, rate=1.5e-3),
        Stage(length=4096, batch=2, steps=11, mixture=MOSTLY_NOTES, rate=1.5e-3, last_rate=1.4414e-3),
        Stage(length=4096, batch=2, steps=69, mixture=MOSTLY_NOTES, rate=1.44e-3, last_rate=0.001163),
        Stage(length=4096, batch=2, steps=46, mixture=MOSTLY_NOTES, rate=0.001163, last_rate=0.00087516),
        Stage(length=4096, batch=2, steps=94, mixture=MOSTLY_NOTES, rate=0.00087516, last_rate=5e-5),
    ),
)
"""Recipe of the demo model. It starts with copying on 24 tokens; the length then grows to the whole context."""

TINY = Recipe(
    name="tiny",
    data=LIBRARY,
    config=replace(
        DEMO_CONFIG,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        max_positions=128,
    ),
    stages=(
        Stage(length=24, batch=8, steps=12, mixture=COPYING),
        Stage(length=48, batch=4, steps=8, mixture=(("recall", 0.5), ("notes", 0.5)), accumulate=2, last_rate=1e-3),
    ),
    warmup=5,
)
"""Recipe for a run of a few seconds, with two stages, accumulation and a falling learning rate."""

RECIPES = {recipe.name: recipe for recipe in (DEMO, TINY)}
