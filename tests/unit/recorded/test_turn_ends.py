"""Tokens at the edges of turns: spaces that tokenizers add, and what ends a turn."""

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paceline.dataset.recorded_encoding import RowEncoder
from paceline.prompt_tokenizer import BadPrompt, PromptTokenizer
from paceline.v1 import rollout_pb2
from tests.fixtures.chat_model import encoder_of, trained_ids

INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}"
    "{{ eos_token }}{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
"""Llama 2 and Mistral."""
ROLES = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""GLM: no turn ends, and the name of the next role stops the model."""
LINES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Plain text."""
IM_END = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "so long"},
]
ROLE_TOKENS = ["<|user|>", "<|assistant|>", "<|im_end|>"]


def save(path: Path, template: str | None, *, spaces: str = "", **generation: Any) -> Path:
    """A tokenizer of characters. ``spaces``: where it puts a space, if it does: first (before a
    text) or always (also after a special token)."""
    special = ["<unk>", "<s>", "</s>", *ROLE_TOKENS]
    words = [("\u2581" + c, -1.0) for c in string.ascii_letters] if spaces else []
    pieces = [(name, 0.0) for name in special]
    pieces += [(c, -2.0) for c in ("\u2581" if spaces else " ") + "\n" + string.printable[:94]]
    tokenizer = Tokenizer(models.Unigram([*pieces, *words], unk_id=0, byte_fallback=False))
    if spaces:
        replace = normalizers.Replace(" ", "\u2581")
        if spaces == "always":
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), replace])
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    else:
        tokenizer.decoder = decoders.Fuse()
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    whole.add_special_tokens({"additional_special_tokens": ROLE_TOKENS})
    whole.chat_template = template
    whole.save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    if generation:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def tokenizer_of(path: Path, **data: Any) -> tuple[RowEncoder, PromptTokenizer]:
    rows = encoder_of(path, **(data or {"messages_field": "messages"}))
    return rows, rows.tokenizer


def ids(tokens: bytes) -> list[int]:
    found: list[int] = np.frombuffer(tokens, "<i4").tolist()
    return found


def trained(tokenizer: PromptTokenizer, completion: rollout_pb2.Completion) -> list[str]:
    return list(tokenizer._tokenizer.convert_ids_to_tokens(trained_ids(completion)))


@pytest.mark.parametrize("spaces", ["", "first", "always"])
def test_a_chat_has_the_tokens_of_its_whole_text(tmp_path: Path, spaces: str) -> None:
    rows, tokenizer = tokenizer_of(save(tmp_path, INST, spaces=spaces))
    row = rows.encode({"messages": CHAT})
    whole = tokenizer.encode(tokenizer.conversation(CHAT))
    assert ids(row.prompt_tokens + row.completions[0].tokens) == whole


@pytest.mark.parametrize("spaces", ["", "first", "always"])
@pytest.mark.parametrize("text", ["x=4", "x= 4"])
def test_a_completion_has_the_tokens_of_its_whole_text(
    tmp_path: Path, spaces: str, text: str
) -> None:
    fields = {"prompt_field": "p", "completion_field": "c"}
    rows, tokenizer = tokenizer_of(save(tmp_path, None, spaces=spaces), **fields)
    row = rows.encode({"p": text[:2], "c": text[2:]})
    whole = tokenizer.opening(text).tokens.tolist()
    assert ids(row.prompt_tokens + row.completions[0].tokens) == [*whole, 2]


@pytest.mark.parametrize("spaces", ["", "first", "always"])
def test_the_next_prompt_has_the_tokens_of_the_whole_text(tmp_path: Path, spaces: str) -> None:
    _, tokenizer = tokenizer_of(save(tmp_path, INST, spaces=spaces))
    before = tokenizer.encode(tokenizer.conversation(CHAT[:2]))
    following = tokenizer.following(CHAT[2:3], before[-1])
    assert before + following == tokenizer.opening(CHAT[:3]).tokens.tolist()


def test_text_that_joins_what_is_before_it_is_refused(tmp_path: Path) -> None:
    fields = {"prompt_field": "p", "completion_field": "c"}
    rows, _ = tokenizer_of(save(tmp_path, None, spaces="first"), **fields)
    with pytest.raises(BadPrompt, match="joins 'hello'"):
        rows.encode({"p": "say ", "c": "hello"})


def test_a_text_that_begins_with_the_first_token_has_it_once(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    path = save(tmp_path, None)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(path / "tokenizer.json"))
    fields = {"prompt_field": "p", "completion_field": "c"}
    _, opened = tokenizer_of(path, **fields)
    assert opened.opening("<s>hi").tokens.tolist() == opened.opening("hi").tokens.tolist()


def test_a_turns_end_that_the_generation_config_names_is_one(tmp_path: Path) -> None:
    """Or that the template alone writes."""
    assert tokenizer_of(save(tmp_path / "silent", IM_END))[1].end_tokens == (2, 5)
    path = save(tmp_path / "named", IM_END, eos_token_id=[2, 5])
    rows, tokenizer = tokenizer_of(path)
    assert tokenizer.end_tokens == (2, 5)
    completion = rows.encode({"messages": CHAT[:2]}).completions[0]
    assert "".join(trained(tokenizer, completion)) == "hello<|im_end|>"
    text = tokenizer.decode_all(tokenizer.following(CHAT[2:3], 5))
    assert text.startswith("\n<|user|>bye"), "the end of the turn comes once"


def test_an_unknown_character_cuts_nothing(tmp_path: Path) -> None:
    rows, tokenizer = tokenizer_of(save(tmp_path, LINES))
    chat = [CHAT[0], {"role": "assistant", "content": "go \u2603 on"}]
    pieces = trained(tokenizer, rows.encode({"messages": chat}).completions[0])
    assert pieces == [*"go ", "<unk>", *" on", "</s>"]


@pytest.mark.parametrize(
    ("template", "generation", "text"),
    [
        (ROLES, {"eos_token_id": [2, 3]}, "hello<|user|>so long</s>"),
        (LINES, {}, "hello</s>so long</s>"),
    ],
)
def test_a_template_that_ends_no_turn_still_teaches_to_stop(
    tmp_path: Path, template: str, generation: dict[str, Any], text: str
) -> None:
    rows, tokenizer = tokenizer_of(save(tmp_path, template, **generation))
    completion = rows.encode({"messages": CHAT}).completions[0]
    assert "".join(trained(tokenizer, completion)) == text


def test_results_of_tools_follow_a_turn_that_has_its_calls(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'tool' %}"
        "{{ messages[loop.index0 - 1].tool_calls[0].function.name }}={% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    _, tokenizer = tokenizer_of(save(tmp_path, template))
    calls = [{"type": "function", "function": {"name": "add", "arguments": {}}}]
    result = [{"role": "tool", "content": "4"}]
    with pytest.raises(BadPrompt, match="chat template"):
        tokenizer.following(result, 5)
    text = tokenizer.decode_all(tokenizer.following(result, 5, calls=calls))
    assert text == "\n<|tool|>add=4<|im_end|>\n<|assistant|>"
