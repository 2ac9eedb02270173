"""Building blocks of the commands' flags: types of optional flags, aliases from other tools, and sampling flags."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeVar, get_args

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

T = TypeVar("T")

Omittable = Annotated[T | None, tyro.conf.arg(help_behavior_hint="")]
"""Type of a flag whose default is None; the flag's help text says what happens without it."""

Several = Annotated[tuple[T, ...], tyro.conf.arg(help_behavior_hint="")]
"""Type of a flag that takes any number of values; the default is no value."""

Dtype = Literal["auto", "float32", "bfloat16"]

Weights = Literal["int8", "int4", "int4-g32", "int4-g64", "int4-g128", "fp8", "w8a8", "gguf"]
"""The names in `core.quant.NAMES`, repeated here because importing that module would import JAX."""

SYSTEM = tyro.conf.arg(aliases=("-sys", "--system-prompt"))
MODEL = tyro.conf.arg(aliases=("-m",))
SEED = tyro.conf.arg(aliases=("-s",))
TOKENS = tyro.conf.arg(aliases=("-n", "--max-tokens", "--n-predict"))
WORDS = tyro.conf.arg(metavar="[PROMPT ...]", help_behavior_hint="")
PROMPT = tyro.conf.arg(name="prompt", aliases=("-p",))
FILE = tyro.conf.arg(aliases=("-f",))

REGISTRY = ConstructorRegistry()


@REGISTRY.primitive_rule
def value_or_none(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Parse `T | None` as T. Without this rule, tyro shows {None}|INT in help and parses the text "None" as None."""
    options = [option for option in get_args(info.type) if option is not type(None)]
    if type(None) not in get_args(info.type) or len(options) != 1:
        return None
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(options[0], info.markers))
    return replace(spec, str_from_instance=lambda value: [] if value is None else spec.str_from_instance(value))


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command, whose fields are its flags."""

    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Flags that control sampling."""

    temperature: Annotated[Omittable[float], tyro.conf.arg(aliases=("--temp",))] = None
    """0 takes the best token; a larger value divides the logits. If not given, the value in generation_config.json."""
    top_k: Omittable[int] = None
    """Draw from the k best tokens only; 0 or -1 is off. If not given, the value in generation_config.json."""
    top_p: Omittable[float] = None
    """Draw only from the fewest best tokens whose probabilities sum to this value or more; 1 is off. If not given, the
    value in generation_config.json."""
    min_p: Omittable[float] = None
    """Draw only from tokens with at least this share of the best token's probability; 0 is off. If not given, the value
    in generation_config.json."""
    repetition_penalty: Annotated[Omittable[float], tyro.conf.arg(aliases=("--repeat-penalty",))] = None
    """A value above 1 makes tokens already in the prompt or the answer less likely; 1 is off. If not given, the value
    in generation_config.json."""
    frequency_penalty: Omittable[float] = None
    """A value above 0, up to 2, makes a token less likely each time that the answer has it; below 0, more likely."""
    presence_penalty: Omittable[float] = None
    """A value above 0, up to 2, makes tokens already in the answer less likely; below 0, more likely."""
    seed: Annotated[int, SEED] = 0
    """Seed of the random draws: the same seed gives the same answer."""

    def values(self) -> dict[str, float | int]:
        """Check the sampling flags that were given, and return them as keyword arguments for Model.generate."""
        from tessera.runtime.sampling import KINDS, Sampling, check_seed

        found = {name: getattr(self, name) for name in KINDS if getattr(self, name) is not None}
        Sampling(**found)
        check_seed(self.seed)
        return found
