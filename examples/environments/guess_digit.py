"""The guessing game on a CPU: a tiny model learns from nothing to find a digit by higher and lower.

    python -m examples.environments.guess_digit

Makes a randomly initialised model of 0.1 M parameters and its data under ``runs/``, and runs the
whole fleet of ``guess_digit.toml``. Options are handed on to ``paceline up``. Someone who ignores
the hints and never repeats a guess gets 0.5 on average; halving the range gets 1.1.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.environments.guess_number import HIGHER, LOWER, UNCLEAR

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
MADE = REPOSITORY / "runs" / "guess-digit-made"
PAD, END = "<pad>", "<end>"
ROWS = {"train": 2048, "held_out": 64}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character of the game."""
    letters = sorted({*"0123456789?\n ", *HIGHER, *LOWER, *UNCLEAR})
    vocabulary = {token: i for i, token in enumerate([PAD, END, *letters])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=PAD,
        eos_token=END,
        clean_up_tokenization_spaces=False,
    )


def make(where: Path) -> None:
    """Writes ``model/``, ``train.jsonl`` and ``held_out.jsonl``. The same bytes every time."""
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    model.save_pretrained(where / "model")
    tokenizer.save_pretrained(where / "model")
    row = json.dumps({"prompt": "?", "low": 0, "high": 9})
    for name, count in ROWS.items():
        (where / f"{name}.jsonl").write_text(f"{row}\n" * count, encoding="utf-8")


def main(config: str = "guess_digit.toml") -> int:
    make(MADE)
    paceline = Path(sysconfig.get_path("scripts")) / "paceline"
    command = [str(paceline), "up", str(HERE / config), "--fresh", *sys.argv[1:]]
    fleet = subprocess.Popen(command, cwd=REPOSITORY)
    # Ctrl-C goes to the whole foreground group: the fleet stops itself, and we wait for that.
    while True:
        try:
            return fleet.wait()
        except KeyboardInterrupt:
            continue


if __name__ == "__main__":
    sys.exit(main())
