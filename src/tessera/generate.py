"""A loaded model and its operations: score tokens, generate text, warm up, save."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float

from tessera.core.files import SHIPPED
from tessera.core.hardware import compiles_without_chip
from tessera.core.memory import require
from tessera.core.mesh import build, check, local_devices, mesh_of, num_head_parts, num_stripes, parse
from tessera.core.quant import check_name
from tessera.models.config import ModelConfig
from tessera.models.files.checkpoint import fingerprint, load_params, save_folder
from tessera.models.files.ends import describe
from tessera.models.files.fetch import SOURCES
from tessera.models.files.forms import require_weights
from tessera.models.files.generation_config import GenerationConfig
from tessera.models.files.source import Source, open_source, resolve
from tessera.models.layers import Params
from tessera.models.text.tokenizer import Tokenizer
from tessera.models.weights import split_sizes
from tessera.runtime.answers import Generation
from tessera.runtime.compilation import capacity_bucket, capacity_buckets, enable_cache
from tessera.runtime.engine import Engine
from tessera.runtime.requests import Request, check_tokens, explain_not_finite
from tessera.runtime.row_pool import RowPool
from tessera.runtime.sampling import Sampling, check_seeds
from tessera.sparse.contract import Policy
from tessera.sparse.plan import Plan
from tessera.sparse.policies import POLICIES, policy_for
from tessera.sparse.promise import promise_line

logger = logging.getLogger(__name__)

PLAN_FILE = "plan.json"
"""Default file name of a plan in a model's folder. The plan of x.gguf is x.plan.json next to it."""

NEW_TOKENS = 128
"""Maximum number of new tokens, if neither the caller nor generation_config.json sets one."""

Prompt = str | Sequence[int]


class Interrupted(KeyboardInterrupt):
    """Raised on Ctrl-C during generation. `generations` holds the partial results, one per prompt; it is empty if a
    server generated the text (`tessera chat --url`)."""

    def __init__(self, generations: list[Generation]):
        super().__init__()
        self.generations = generations


@dataclass(frozen=True, kw_only=True)
class Model:
    """Weights with their config, tokenizer and attention policy.

    Attributes:
        config: the decoder's sizes and options.
        params: the weights.
        policy: the attention policy of every layer.
        tokenizer: None if the checkpoint has none; prompts must then be token lists.
        plan: the Kascade plan, if any.
        source: folder or GGUF file that the model was loaded from.
        generation_config: defaults of `generate` from generation_config.json; empty for a GGUF file.
        kv_dtype: dtype of cached keys and values: "int8", or None for the weights' dtype.
        weights: number format of the weight matrices, as in `load`; None for floats.
    """

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer | None
    policy: Policy
    plan: Plan | None = None
    source: str = "memory"
    generation_config: GenerationConfig = GenerationConfig()
    kv_dtype: str | None = None
    weights: str | None = None

    def logits(self, tokens_BT: Any) -> Float[Array, "B T V"]:
        """Compute the next-token logits at every position, in float32. All sequences must have the same length.

        Each position runs under the policy that a prefill of `generate` gives it.

        Raises:
            ValueError: tokens have the wrong shape, lie outside the vocabulary or exceed the context, or the weights
                hold NaN or infinity.
            MemoryError: the logits do not fit in memory.
        """
        tokens = np.asarray(tokens_BT)
        if tokens.ndim != 2 or not tokens.size or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(
                f"tokens_BT has shape {tokens.shape} and dtype {tokens.dtype}: pass a non-empty array [B,T] of integers"
            )
        for index, row in enumerate(tokens):
            check_tokens(row, self.config, f"tokens_BT[{index}]")
        batch, length = tokens.shape
        size = capacity_bucket(length)
        num_bytes = 4 * batch * size * self.config.vocab_size // num_head_parts(mesh_of(self.params))
        require(
            num_bytes, local_devices(self.params), f"logits of {batch} x {size} tokens", "score fewer tokens per call"
        )
        pool, found = self.pool(self.policy, num_keys=length), []
        for row in tokens:
            out, finite = pool.logits(row)
            if not finite:
                raise ValueError(explain_not_finite(self.params))
            found.append(out)
        return jnp.concatenate(found)

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        frequency_penalty: float | None = None,
        presence_penalty: float | None = None,
        stop: str | Sequence[str] = (),
        seed: int | Sequence[int] = 0,
        stream: Callable[[int, str], Any] | None = None,
        progress: Callable[[int, int], Any] | None = None,
    ) -> list[Generation]:
        """Continue each prompt. A prompt's answer does not depend on the other prompts in the batch.

        An argument that is None takes its value from the model's generation_config.json, as in transformers. Without a
        value there, generation takes the best token and stops after 128 tokens. To take the best token whatever that
        file says, pass `**tessera.runtime.sampling.GREEDY`. An error in one prompt discards all answers, whereas the
        engine that `Model.engine` returns reports errors per request.

        Args:
            prompts: texts or token lists; lengths may differ.
            max_new_tokens: maximum number of tokens to generate per prompt; fewer if the model's context ends first.
            temperature: 0 takes the best token; a larger value divides the logits before sampling.
            top_k: keep the k best tokens; 0 or -1 keeps all.
            top_p: of these, keep the fewest best tokens whose probabilities sum to top_p or more; 1 keeps all.
            min_p: of these, keep tokens with at least min_p times the best token's probability; 0 keeps all.
            repetition_penalty: changes the logits of tokens that are already in the prompt or the answer: positive ones
                are divided by this value, negative ones multiplied by it. The penalties below, then temperature, top_k,
                top_p and min_p, apply afterwards; 1 changes nothing.
            frequency_penalty: subtracted from a token's logit once for each time that the token is already in the
                answer, from -2 to 2, as in OpenAI's API; 0 changes nothing.
            presence_penalty: subtracted from the logits of tokens that are already in the answer, from -2 to 2, as in
                OpenAI's API; 0 changes nothing.
            stop: texts that end generation; the answer is cut before the first that appears.
            seed: one for all prompts, or one per prompt, from -2**63 to 2**64 - 1. A draw depends only on seed and
                step, not on the batch.
            stream: called with (prompt index, text piece) as soon as the piece is final; whole characters only.
            progress: called with (prompt tokens read, prompt tokens to read) while prompts are being read.

        Returns:
            one Generation per prompt, in the order of the prompts.

        Raises:
            ValueError: a prompt or sampling value is invalid, or the weights hold NaN or infinity.
            MemoryError: the cache does not fit in memory.
            Interrupted: Ctrl-C was pressed; the exception holds the partial results.
        """
        started_s = time.perf_counter()
        sampling = self.sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
        )
        max_new_tokens = self.max_new_tokens(max_new_tokens)
        tokens = self.encode_prompts(prompts)
        seeds = check_seeds(seed, len(tokens))
        self._need_tokenizer(stream is not None, "stream")
        self._need_tokenizer(bool(stop), "stop")
        requests = [
            Request(
                prompt=prompt,
                max_new_tokens=max_new_tokens,
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
                sampling=sampling,
                seed=own,
            )
            for prompt, own in zip(tokens, seeds)
        ]
        engine = self.engine()
        ids = [engine.submit(request, started_s=started_s) for request in requests]
        found: dict[int, Generation] = {}
        try:
            for end in engine.drain(stream and (lambda id, piece: stream(ids.index(id), piece)), progress):
                found[end.id] = end.generation
        except KeyboardInterrupt:
            raise Interrupted([found.get(id) or engine.cancel(id) for id in ids]) from None
        return [found[id] for id in ids]

    def warmup(
        self, *, max_tokens: int | None = None, batch: int = 1, progress: Callable[[str], Any] | None = None, **sampling
    ) -> int:
        """Compile (or load from the cache folder) the programs for requests of up to `max_tokens`, prompt plus answer
        (None: the model's context).

        Each batch size compiles separately. Of `sampling` (temperature, top_k, ... of later requests), only whether
        each value is enabled matters. `progress` is called with a line of text for each cache size and policy. Return
        the number of programs.
        """
        longest = min(max_tokens or self.config.max_positions, self.config.max_positions)
        values = self.sampling(**sampling)
        count = 0
        for size in capacity_buckets(longest):
            if progress:
                progress(f"{self.policy.name} attention, {size} keys, batch {batch}")
            count += self.engine(slots=batch, num_keys=min(size, longest)).warm([values])
        return count

    def with_attention(self, attention: str, plan: Plan | str | os.PathLike | None = None, **options: Any) -> "Model":
        """Return this model with another attention policy; `options` set fields of the policy, e.g. fraction=0.05.

        If `plan` is None, the new model keeps this model's plan; if this model has none, kascade loads the plan that
        `locate_plan` finds.
        """
        check_attention(attention)
        found = find_plan(attention, self.plan if plan is None else plan, self.source)
        if found is not None and found is not self.plan:
            found.check(self.config, fingerprint(self.params, self.config))
            if not options:  # the promise was measured without options
                logger.info("%s", promise_line(found))
        return replace(self, policy=policy_for(attention, self.config, found, **options), plan=found)

    def sampling(self, **given: Any) -> Sampling:
        """Build the sampling parameters: values in `given`, unless None, override those in generation_config.json."""
        return Sampling(
            **self.generation_config.sampling() | {name: value for name, value in given.items() if value is not None}
        )

    def max_new_tokens(self, given: int | None, otherwise: int = NEW_TOKENS) -> int:
        found = self.generation_config.max_new_tokens if given is None else given
        return otherwise if found is None else found

    @property
    def precision(self) -> str:
        """Dtype of the weights in words, for records: "float32", or "float32, int8 weights"."""
        return str(self.params.embed.dtype) + (f", {self.weights} weights" if self.weights else "")

    def encode_prompts(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Encode the prompts as token lists; refuse empty ones, unknown tokens and those longer than the context."""
        single = isinstance(prompts, str)
        prompts = list(prompts)
        if single or (prompts and isinstance(prompts[0], int | np.integer)):
            raise ValueError("prompts must be a list of texts or token lists: wrap a single prompt in a list, [prompt]")
        if not prompts:
            raise ValueError("prompts is an empty list: pass at least one prompt")
        return [self.encode_prompt(prompt, f"prompt {index}") for index, prompt in enumerate(prompts)]

    def engine(self, **options: Any) -> Engine:
        """Return an engine for this model and its policy; `options` are keyword arguments of `Engine`."""
        return Engine(
            self.params, self.config, self.policy, tokenizer=self.tokenizer, kv_dtype=self.kv_dtype, **options
        )

    def pool(self, policy: Policy, *, num_keys: int) -> RowPool:
        """Return an empty pool for one sequence of up to `num_keys` keys."""
        return RowPool(self.params, self.config, policy, rows=1, num_keys=num_keys, kv_dtype=self.kv_dtype)

    def encode_prompt(self, prompt: Prompt, name: str = "the prompt") -> list[int]:
        """Encode one prompt, which error messages call `name`."""
        if isinstance(prompt, str):
            self._need_tokenizer(True, "a text prompt")
            if not prompt:
                raise ValueError(f"{name} is empty: pass some text")
            tokens = self.tokenizer.encode(prompt)
        else:
            if not all(isinstance(token, int | np.integer) for token in prompt):
                raise ValueError(f"{name} must be a text or a list of integers, got {prompt!r:.80}")
            tokens = [int(token) for token in prompt]
        check_tokens(tokens, self.config, name)
        return tokens

    def _need_tokenizer(self, wanted: bool, what: str) -> None:
        if wanted and self.tokenizer is None:
            raise ValueError(
                f"{what} needs a tokenizer and {self.source} has none: add its tokenizer.json, or pass token lists, "
                f"without stream and stop"
            )


def load(
    path_or_hub_id: str | os.PathLike | Source,
    *,
    dtype: str | None = None,
    weights: str | None = None,
    attention: str = "dense",
    plan: Plan | str | os.PathLike | None = None,
    mesh: str | int | None = None,
    kv_dtype: str | None = None,
) -> Model:
    """Load a model from a Hugging Face folder, a GGUF file or a hub id.

    Args:
        path_or_hub_id: a folder with config.json and safetensors, a GGUF file, the name of a fetched model ("smollm2"),
            "owner/name", or a `Source`. The weights of a GGUF file are dequantised unless `weights` is "gguf".
        dtype: "float32" or "bfloat16"; None or "auto" keeps the checkpoint's dtype.
        weights: number format to which the matrices are rounded as they are read: "int8", "int4" or "fp8" (one scale
            per output channel), "int4-g32", "int4-g64" or "int4-g128" (one scale per 32, 64 or 128 inputs), or "w8a8"
            (int8, and prefill rounds the activations to int8, too). "gguf" keeps a GGUF file's Q4_0, Q4_1 and Q8_0
            tensors as stored. None keeps floats.
        attention: "dense", "kascade", "window" or "oracle" (`sparse.policies.POLICIES`).
        plan: a Plan or its path; if None, kascade loads the plan that `locate_plan` finds.
        mesh: devices that share the model: a number, such as "8", or heads x context, such as "4x2". "heads" splits
            weights, cache and logits by KV head, feed-forward column and vocabulary entry, so it must divide the number
            of each. "context" splits each sequence's keys and a prompt's rows. A number n of devices means
            heads = gcd(KV heads, n) and context = n / heads. None runs on one device; if JAX runs in several processes,
            it runs on all their devices.
        kv_dtype: "int8" stores each cached key and value as int8 with one scale per position and KV head, in about half
            the bytes of bfloat16; None or "auto" keeps the weights' dtype.

    Raises:
        FileNotFoundError, ValueError: something is missing or invalid; the message says what to do.
        MemoryError: the weights do not fit in memory.
    """
    check_attention(attention)
    check_name(weights)
    dtype = None if dtype == "auto" else dtype
    if dtype not in (None, "float32", "bfloat16"):
        raise ValueError(f"{dtype=} must be 'float32', 'bfloat16', or None for the checkpoint's own dtype")
    kv_dtype = None if kv_dtype == "auto" else kv_dtype
    if kv_dtype not in (None, "int8"):
        raise ValueError(f"{kv_dtype=} must be 'int8', or None for the weights' dtype")
    source = resolve(path_or_hub_id)
    config = source.config
    source.log_ignored()
    if dtype is not None:
        config = replace(config, dtype=dtype)
    plan = find_plan(attention, plan, str(source))
    policy = policy_for(attention, config, plan)
    if compiles_without_chip() and not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    if mesh is None and jax.process_count() > 1:
        mesh = jax.device_count()
    on = None if mesh is None else mesh_for(config, mesh)
    if kv_dtype == "int8" and num_stripes(on) > 1:
        raise ValueError(f"{kv_dtype=} cannot be used with a mesh that splits the context ({mesh=}): leave one out")
    require_weights(source, config, weights, on)
    config = replace(config, eos_ids=tuple(end.id for end in source.ends))
    logger.log(logging.DEBUG if source.ends else logging.WARNING, "%s", describe(source.ends))
    if warning := source.generation.warning():
        logger.info("%s", warning)
    enable_cache()
    params = load_params(source, dtype=jnp.dtype(config.dtype), mesh=on, weight_format=weights)
    if plan is not None:
        plan.check(config, fingerprint(params, config))
        logger.info("%s", promise_line(plan))
    return Model(
        config=config,
        params=params,
        tokenizer=source.tokenizer,
        policy=policy,
        plan=plan,
        source=str(source),
        generation_config=source.generation,
        kv_dtype=kv_dtype,
        weights=weights,
    )


def mesh_for(config: ModelConfig, mesh: str | int) -> Mesh:
    """Build the mesh over which `load` splits a model of this config; raise ValueError if that is not possible."""
    shape = parse(mesh, config.num_kv_heads)
    check(shape, split_sizes(config), jax.device_count(), jax.process_count(), config.window)
    return build(shape)


def save(model: Model, folder: str | os.PathLike) -> None:
    """Write a folder that transformers can load: config.json, safetensors, tokenizer files, and the plan, if any."""
    plan = model.plan
    extra = None if plan is None else lambda new: plan.save(new / PLAN_FILE)
    generation = model.generation_config.render()
    save_folder(folder, model.params, model.config, model.tokenizer, generation=generation, extra=extra)


def check_attention(attention: str) -> None:
    if attention not in POLICIES:
        raise ValueError(f"{attention=} must be one of {tuple(POLICIES)}")


def find_plan(attention: str, plan: Plan | str | os.PathLike | None, source: str) -> Plan | None:
    """Return `plan`, loaded if it is a path; if it is None, that of `locate_plan` for kascade, else None.

    Raises:
        ValueError: kascade has no plan.
    """
    if plan is not None:
        return plan if isinstance(plan, Plan) else Plan.load(plan)
    if attention != "kascade":
        return None
    found, path = locate_plan(source), plan_path(source)
    if found is None:
        raise ValueError(
            f"attention='kascade' needs a plan, and {path} does not exist: make one with "
            f"`tessera calibrate --model {source} --text TEXT --out {path}`, or pass plan=..."
        )
    return Plan.load(found)


def locate_plan(source: str | os.PathLike) -> Path | None:
    """Find a model's plan file: next to its weights, else shipped with the package; None if there is neither."""
    places = (plan_path(source), shipped_plan(source))
    return next((place for place in places if place is not None and place.is_file()), None)


def plan_path(source: str | os.PathLike) -> Path:
    """Return the default path of a model's plan: plan.json in its folder, x.plan.json next to x.gguf."""
    return open_source(source).companion(PLAN_FILE)


def shipped_plan(source: str | os.PathLike) -> Path | None:
    """Return the path of the plan shipped for a fetched model, chosen by file name alone; None if there is none."""
    names = {Path(model.member).name: name for name, model in SOURCES.items()}
    name = names.get(Path(source).name)
    return None if name is None else SHIPPED / f"{name}.{PLAN_FILE}"
