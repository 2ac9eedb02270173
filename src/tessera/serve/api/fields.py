"""Fields of other servers' APIs that this server does not act on: ignored ones, and what to send instead of others.

A field that changes no answer is ignored at any value. A field that would change it is ignored at the values that have
no effect, and refused by name at others.
"""

import json
from collections.abc import Mapping
from typing import Any

IGNORED: Mapping[str, str] = {
    name: why
    for why, names in {
        "for the provider's records and bills": "store metadata safety_identifier user request_id rid session_id trace "
        "litellm_metadata tags",
        "for the cache, which changes only the time of an answer": "prompt_cache_key prompt_cache_retention "
        "cache_prompt n_cache_reuse keep_alive cache_control",
        "for the choice of a provider, machine or slot": "service_tier id_slot slot_id data_parallel_rank "
        "guided_decoding_backend provider models route",
        "for the order or the speed of the work": "prediction backend_sampling speculative.n_max speculative.n_min "
        "speculative.p_min priority stream_reasoning",
        "for figures besides the answer, which `usage` and /metrics have": "timings_per_token return_progress usage "
        "return_cached_tokens_details",
        "a parameter of an option that is off": "t_max_prompt_ms repeat_last_n penalize_nl mirostat_tau mirostat_eta "
        "dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_threshold dynatemp_exponent "
        "adaptive_decay min_keep",
        "for the client or another tokenizer; changes nothing here": "spaces_between_special_tokens",
    }.items()
    for name in names.split()
}
"""Field of OpenAI, llama.cpp, vLLM, SGLang, OpenRouter, LiteLLM, Ollama or Anthropic -> why it changes no answer."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        "use_beam_search early_stopping include_stop_str_in_output return_tokens_as_token_ids return_token_ids "
        "return_hidden_states return_meta_info return_routed_experts no_stop_trim post_sampling_probs return_tokens "
        "grammar_lazy safe_prompt".split(),
        (False,),
    ),
    **dict.fromkeys(("detokenize", "separate_reasoning", "include_reasoning"), (True,)),
    **dict.fromkeys(
        "n_discard n_indent n_probs mirostat mirostat_mode top_a smoothing_factor epsilon_cutoff eta_cutoff "
        "penalty_alpha no_repeat_ngram_size dry_multiplier xtc_probability dynatemp_range".split(),
        (0,),
    ),
    **dict.fromkeys(("best_of", "length_penalty", "typical_p", "tfs_z", "repeat_penalty"), (1,)),
    **dict.fromkeys(("truncate_prompt_tokens", "adaptive_target"), (-1,)),
    **dict.fromkeys(("n_keep", "t_max_predict_ms"), (0, -1)),
    "top_n_sigma": (-1, 0),
    **dict.fromkeys(("suffix", "grammar", "regex", "ebnf"), ("",)),
    **dict.fromkeys(("vllm_xargs", "mm_processor_kwargs", "debug_config", "extra_body"), ({},)),
    **dict.fromkeys(
        "functions bad_words logits_processors documents lora image_data samplers logprob_token_ids grammar_triggers "
        "preserved_tokens transforms plugins".split(),
        ([],),
    ),
    "stop_regex": ([], ""),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "function_call": ("none",),
    "reasoning_format": ("auto", "deepseek"),
}
"""Field -> the values that have no effect."""

_VARIABLE = "set chat_template_kwargs, such as enable_thinking"
_COMPACT = "JSON has no optional white space here; use guided_grammar"
_CONTINUE = "send continue_final_message=true and add_generation_prompt=false in the body"

INSTEAD: Mapping[str, str] = {
    "functions": "send them as tools",
    "function_call": "send tool_choice",
    "audio": "answers are text; leave it out",
    "modalities": 'answers are text; send ["text"]',
    "web_search_options": "offer a search function in tools",
    "verbosity": "say how long the answer should be in the system message",
    "reasoning_effort": "the chat template does not read it; set chat_template_kwargs, or leave it out",
    **dict.fromkeys(("reasoning", "thinking", "think"), _VARIABLE),
    **dict.fromkeys(("enable_thinking", "documents"), "set it in chat_template_kwargs"),
    "thinking_token_budget": "lower max_tokens, or set chat_template_kwargs",
    "thinking_budget": "set it in chat_template_kwargs, if the template reads it",
    "chat_template": "start the server with the template in the model's folder",
    "suffix": "write the model's fill-in-the-middle marks into prompt",
    "best_of": "ask for n answers, with logprobs, and choose one",
    "use_beam_search": "this server samples; leave it out",
    "length_penalty": "this server has no beam search; leave it out",
    "repeat_penalty": "send repetition_penalty, which counts the whole prompt and answer",
    **dict.fromkeys(("typical_p", "tfs_z"), "use top_p or min_p"),
    "mirostat": "use temperature and top_p or min_p",
    "samplers": "temperature comes first here, then top_k, top_p and min_p; leave it out",
    "random_seed": "send seed",
    "options": "send temperature, seed, max_tokens and so on as fields of the body",
    "format": "send response_format",
    "extra_body": "its fields belong into the body itself",
    "n_probs": "send logprobs",
    **dict.fromkeys(("num_predict", "max_length", "max_new_tokens", "max_output_tokens"), "send max_tokens"),
    "sampling_params": "send its fields in the body itself",
    "input": "send messages to /v1/chat/completions, or prompt to /v1/completions",
    **dict.fromkeys(("text", "inputs", "prompt_embeds"), "send prompt"),
    "structural_tag": "use tools with tool_choice, or a grammar",
    "stop_regex": "send stop",
    **dict.fromkeys(("bad_words", "logits_processors"), "send logit_bias"),
    "truncate_prompt_tokens": "shorten the prompt; /tokenize counts its tokens",
    "transforms": "shorten the messages; /tokenize counts their tokens",
    "cache_salt": "give each user an API key: keys share no cache",
    **dict.fromkeys(("lora", "lora_request", "lora_path"), "serve the merged model"),
    **dict.fromkeys(("guided_whitespace_pattern", "whitespace_pattern"), _COMPACT),
    **dict.fromkeys(("prefix", "partial"), _CONTINUE),
}
"""Field that is refused -> what to do instead."""


def refusal_of(field: str) -> str:
    """Say that the server does not support a field, and what to do instead."""
    place, _, name = field.rpartition(".")
    if name == "function_call" and place.startswith("messages"):
        return f"{field} is not supported: send tool_calls, and the result in a message of role tool"
    if name in INSTEAD:
        return f"{field} is not supported: {INSTEAD[name]}"
    if name in NEUTRAL:
        return f"{field} is not supported: leave it out, or send {json.dumps(NEUTRAL[name][0])}, which has no effect"
    return f"unknown field {field}: this server does not support it; leave it out"
