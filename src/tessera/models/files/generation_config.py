"""Read generation_config.json, which holds the sampling defaults of a checkpoint's authors.

As in transformers, each setting is the default of the argument (or flag) of the same name, except that a sampling
filter that the file does not set is off (transformers would keep the 50 best tokens), and settings that Tessera does
not support are ignored and listed in `GenerationConfig.ignored`. `families.parse_config` reads `eos_token_id`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tessera.core.escapes import escaped
from tessera.core.fields import TRUTH, check_fields, integer, maybe, number, positive
from tessera.models.config import MAX_SIZE

FILE = "generation_config.json"
FIELDS = MappingProxyType(
    {
        "do_sample": maybe(TRUTH),
        "temperature": maybe(number(0, 100)),
        "top_k": maybe(integer(-1, MAX_SIZE)),
        "top_p": maybe(positive(1)),
        "min_p": maybe(number(0, 1)),
        "repetition_penalty": maybe(positive(100)),
        "max_new_tokens": maybe(integer(1, MAX_SIZE)),
    }
)
"""Rule for the value of each key of generation_config.json that this module reads."""
OFF = MappingProxyType({"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1})
"""Values at which the sampling arguments have no effect."""
UNSUPPORTED = MappingProxyType(
    {
        **dict.fromkeys(
            "min_new_tokens no_repeat_ngram_size encoder_no_repeat_ngram_size epsilon_cutoff eta_cutoff top_h "
            "penalty_alpha prompt_lookup_num_tokens".split(),
            0,
        ),
        **dict.fromkeys("num_beams num_beam_groups num_return_sequences".split(), 1),
        **dict.fromkeys("typical_p encoder_repetition_penalty guidance_scale".split(), 1.0),
        **dict.fromkeys(
            "stop_strings max_time bad_words_ids force_words_ids constraints suppress_tokens sequence_bias "
            "begin_suppress_tokens forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty "
            "watermarking_config dola_layers".split(),
            None,
        ),
        "min_length": 0,
        "max_length": 20,
        "remove_invalid_values": False,
        "renormalize_logits": False,
    }
)
"""Unsupported setting -> value at which it has no effect. `GenerationConfig.ignored` lists a setting if a file gives it
another value."""


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Defaults of arguments of `Model.generate`; None means that generation_config.json does not set the value.

    With `do_sample`, sample at `temperature`, or at 1 if that is None. Without it, decoding is greedy unless the caller
    gives a temperature.
    """

    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    ignored: Mapping[str, Any] = MappingProxyType({})  # unsupported settings that would change the answer

    def sampling(self) -> dict[str, float | int]:
        """Return the default temperature (0 if `do_sample` is False) and the other sampling arguments that are set."""
        drawn = 1.0 if self.temperature is None else self.temperature
        found = {"temperature": drawn if self.do_sample else 0.0}
        names = ("top_k", "top_p", "min_p", "repetition_penalty")
        return found | {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def note(self, given: Mapping[str, Any]) -> str:
        """Return a line that lists the settings that take effect because `given` does not set them; "" if none does."""
        values, given = self.sampling(), {name: value for name, value in given.items() if value is not None}
        left = {name: value for name, value in values.items() if name not in given and value != OFF[name]}
        if not {**values, **given}["temperature"]:  # greedy: only the penalty counts
            left = {name: value for name, value in left.items() if name == "repetition_penalty"}
        if not left:
            return ""
        return f"{FILE} sets {', '.join(f'{name} {value:g}' for name, value in left.items())}: flags override the file"

    def warning(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in self.ignored.items())
        return f"{FILE}: ignoring {escaped(values, 200)} (not supported)" if values else ""

    def render(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in FIELDS}
        return {name: value for name, value in values.items() if value is not None and value is not False}


def parse_generation_config(raw: Mapping[str, Any]) -> GenerationConfig:
    check_fields(raw, FIELDS, FILE)
    if raw.get("top_k") == -1:  # vLLM's value for "off", which transformers does not read
        raw = {**raw, "top_k": 0}
    ignored = {key: raw[key] for key, neutral in UNSUPPORTED.items() if raw.get(key) not in (None, neutral, [], {})}
    return GenerationConfig(**{key: raw[key] for key in FIELDS if raw.get(key) is not None}, ignored=ignored)
