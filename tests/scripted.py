"""A model that writes given answers: each token determines the next one.

Its embedding is one-hot, its layers add nothing, and its head maps each token of a script to the script's next token.
So a real checkpoint, run by the real engine, writes what a test needs: a tool call in a family's form, for example.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from tiny import CONFIG, random_params
from tokenizers import AddedToken

from tessera.models.files.checkpoint import save_folder
from tessera.models.text.tokenizer import byte_tokenizer

END = "<|eos|>"
TEMPLATE = """
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
    {{- '<|user|>' if message.role != 'assistant' else '<|assistant|>' }}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' ~ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
        {{- '</tool_call>' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|reserved0|>' if messages[-1].role == 'tool' else '<|assistant|>' }}
{%- endif %}"""
"""Template with tools in which an answer to a result begins after another token, so that it can be another answer."""


def save_scripted(
    folder: Path,
    scripts: Mapping[str, Sequence[str]],
    *,
    special: Sequence[str] = (),
    template: str = TEMPLATE,
    context: int = 1024,
) -> Path:
    """Write the model.

    Args:
        folder: where to write it.
        scripts: the pieces of each answer, by the token after which the answer begins. No piece may occur twice, in one
            script or in several. END is added to each.
        special: pieces that are special tokens of the tokenizer.
        template: the chat template.
        context: maximum tokens of prompt and answer.
    """
    tokenizer = replace(byte_tokenizer(), chat_template=template)
    pieces = [piece for script in scripts.values() for piece in script]
    assert len(set(pieces)) == len(pieces), "a piece occurs twice"
    for piece in pieces:
        tokenizer.backend.add_tokens([AddedToken(piece, normalized=False, special=piece in special)])
    vocab_size = -(-tokenizer.vocab_size // 8) * 8
    config = replace(
        CONFIG,
        vocab_size=vocab_size,
        hidden_size=vocab_size,
        num_layers=1,
        max_positions=context,
        tie_embeddings=False,
    )
    params = random_params(config)
    [layer] = params.layers if isinstance(params.layers, tuple) else [params.layers]
    layer = replace(layer, o=np.zeros_like(layer.o), down=np.zeros_like(layer.down))
    head = np.zeros((vocab_size, vocab_size), np.float32)
    id_of = tokenizer.backend.token_to_id
    for first, script in scripts.items():
        chain = [first, *script, END]
        for token, following in zip(chain, chain[1:]):
            head[id_of(following), id_of(token)] = 10.0
    layers = (layer,) if isinstance(params.layers, tuple) else layer
    params = replace(params, embed=np.eye(vocab_size, dtype=np.float32), layers=layers, head=head)
    save_folder(folder, params, config, tokenizer)
    return folder
