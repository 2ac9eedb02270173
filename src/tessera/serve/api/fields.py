"""Fields of other servers' APIs that this server does not act on: ignored ones, and what to send instead of others.

A field that changes no answer is ignored at any value. A field that would change it is ignored at the values that have
no effect, and refused by name at others.
"""

import json
from collections.abc import Mapping
from typing import Any

ACCOUNTING = "for the provider's records and bills"
CACHING = "for the cache, which changes only the time of an answer"
ROUTING = "for the choice of a provider, machine or slot"
TIMING = "for the order or the speed of the work"
REPORTING = "for figures besides the answer, which `usage` and /metrics have"
UNUSED = "a parameter of an option that is off"
COMPACT = "JSON has no optional white space here; use guided_grammar"
CONTINUE = "send continue_final_message=true and add_generation_prompt=false in the body"
CLIENT = "for the client or another tokenizer; changes nothing here"

IGNORED: Mapping[str, str] = {
    # OpenAI
    "store": ACCOUNTING,
    "metadata": ACCOUNTING,
    "service_tier": ROUTING,
    "safety_identifier": ACCOUNTING,
    "user": ACCOUNTING,
    "prompt_cache_key": CACHING,
    "prompt_cache_retention": CACHING,
    "prediction": TIMING,
    # llama.cpp
    "cache_prompt": CACHING,
    "n_cache_reuse": CACHING,
    "id_slot": ROUTING,
    "slot_id": ROUTING,
    "timings_per_token": REPORTING,
    "return_progress": REPORTING,
    "t_max_prompt_ms": UNUSED,
    "backend_sampling": TIMING,
    "speculative.n_max": TIMING,
    "speculative.n_min": TIMING,
    "speculative.p_min": TIMING,
    "repeat_last_n": UNUSED,
    "penalize_nl": UNUSED,
    "mirostat_tau": UNUSED,
    "mirostat_eta": UNUSED,
    "dry_base": UNUSED,
    "dry_allowed_length": UNUSED,
    "dry_penalty_last_n": UNUSED,
    "dry_sequence_breakers": UNUSED,
    "xtc_threshold": UNUSED,
    "dynatemp_exponent": UNUSED,
    "adaptive_decay": UNUSED,
    "min_keep": UNUSED,
    # vLLM and SGLang
    "request_id": ACCOUNTING,
    "rid": ACCOUNTING,
    "priority": TIMING,
    "data_parallel_rank": ROUTING,
    "spaces_between_special_tokens": CLIENT,
    "guided_decoding_backend": ROUTING,
    "stream_reasoning": TIMING,
    "return_cached_tokens_details": REPORTING,
    # OpenRouter, LiteLLM, Ollama, Anthropic
    "provider": ROUTING,
    "models": ROUTING,
    "route": ROUTING,
    "session_id": ACCOUNTING,
    "trace": ACCOUNTING,
    "usage": REPORTING,
    "litellm_metadata": ACCOUNTING,
    "tags": ACCOUNTING,
    "keep_alive": CACHING,
    "cache_control": CACHING,
}
"""Field -> why it changes no answer."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "function_call": ("none",),
    "functions": ([],),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "detokenize": (True,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "return_hidden_states": (False,),
    "return_meta_info": (False,),
    "return_routed_experts": (False,),
    "no_stop_trim": (False,),
    "separate_reasoning": (True,),
    "include_reasoning": (True,),
    "reasoning_format": ("auto", "deepseek"),
    "bad_words": ([],),
    "logits_processors": ([],),
    "stop_regex": ([], ""),
    "vllm_xargs": ({},),
    "mm_processor_kwargs": ({},),
    "documents": ([],),
    "lora": ([],),
    "image_data": ([],),
    "samplers": ([],),
    "logprob_token_ids": ([],),
    "truncate_prompt_tokens": (-1,),
    "n_keep": (0, -1),
    "n_discard": (0,),
    "n_indent": (0,),
    "n_probs": (0,),
    "t_max_predict_ms": (0, -1),
    "post_sampling_probs": (False,),
    "return_tokens": (False,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "smoothing_factor": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "penalty_alpha": (0,),
    "no_repeat_ngram_size": (0,),
    "repeat_penalty": (1,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
    "adaptive_target": (-1,),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "preserved_tokens": ([],),
    "safe_prompt": (False,),
    "transforms": ([],),
    "plugins": ([],),
    "debug_config": ({},),
    "extra_body": ({},),
    "grammar": ("",),
    "regex": ("",),
    "ebnf": ("",),
}
"""Field -> the values that have no effect."""

INSTEAD: Mapping[str, str] = {
    "functions": "send them as tools",
    "function_call": "send tool_choice",
    "audio": "answers are text; leave it out",
    "modalities": 'answers are text; send ["text"]',
    "web_search_options": "offer a search function in tools",
    "verbosity": "say how long the answer should be in the system message",
    "reasoning_effort": "the chat template does not read it; set chat_template_kwargs, or leave it out",
    "reasoning": "set chat_template_kwargs, such as enable_thinking",
    "thinking": "set chat_template_kwargs, such as enable_thinking",
    "think": "set chat_template_kwargs, such as enable_thinking",
    "enable_thinking": "set it in chat_template_kwargs",
    "thinking_token_budget": "lower max_tokens, or set chat_template_kwargs",
    "thinking_budget": "set it in chat_template_kwargs, if the template reads it",
    "documents": "set it in chat_template_kwargs",
    "chat_template": "start the server with the template in the model's folder",
    "suffix": "write the model's fill-in-the-middle marks into prompt",
    "best_of": "ask for n answers, with logprobs, and choose one",
    "use_beam_search": "this server samples; leave it out",
    "length_penalty": "this server has no beam search; leave it out",
    "repeat_penalty": "send repetition_penalty, which counts the whole prompt and answer",
    "typical_p": "use top_p or min_p",
    "mirostat": "use temperature and top_p or min_p",
    "tfs_z": "use top_p or min_p",
    "samplers": "temperature comes first here, then top_k, top_p and min_p; leave it out",
    "random_seed": "send seed",
    "options": "send temperature, seed, max_tokens and so on as fields of the body",
    "format": "send response_format",
    "extra_body": "its fields belong into the body itself",
    "n_probs": "send logprobs",
    "num_predict": "send max_tokens",
    "max_length": "send max_tokens",
    "max_new_tokens": "send max_tokens",
    "max_output_tokens": "send max_tokens",
    "sampling_params": "send its fields in the body itself",
    "input": "send messages to /v1/chat/completions, or prompt to /v1/completions",
    "text": "send prompt",
    "inputs": "send prompt",
    "structural_tag": "use tools with tool_choice, or a grammar",
    "stop_regex": "send stop",
    "bad_words": "send logit_bias",
    "logits_processors": "send logit_bias",
    "truncate_prompt_tokens": "shorten the prompt; /tokenize counts its tokens",
    "transforms": "shorten the messages; /tokenize counts their tokens",
    "cache_salt": "give each user an API key: keys share no cache",
    "lora": "serve the merged model",
    "lora_request": "serve the merged model",
    "lora_path": "serve the merged model",
    "prompt_embeds": "send prompt",
    "guided_whitespace_pattern": COMPACT,
    "whitespace_pattern": COMPACT,
    "prefix": CONTINUE,
    "partial": CONTINUE,
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
