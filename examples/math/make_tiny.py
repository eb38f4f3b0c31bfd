r"""A tiny Qwen3 and rows in the layout of MATH-lighteval, to try the tutorial on any machine within
minutes.

    python -m examples.math.make_tiny            # models/tiny-qwen3 and data/MATH-lighteval

The rows are small problems with worked solutions, of numbers, fractions and intervals, as Parquet
files for the splits train and test, which have no problem in common. The model has two layers and a
byte-level tokenizer with a chat template. A short supervised run teaches it to answer some of the
problems, and to put the answer into ``\boxed{...}``.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config
from transformers.utils import logging

from paceline.config.load import load_config
from paceline.prompt_tokenizer import PromptTokenizer

HERE = Path(__file__).resolve().parent
CONFIG = HERE / "tiny.toml"
END, START, TEXT_END = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif -%}
{%- endif -%}
"""
VOCABULARY = 512
IGNORED = -100
BATCH, MOST_STEPS, LOOKED_AT = 32, 500, 64
Row = dict[str, str]


def successor(draw: random.Random) -> Row:
    number = draw.randint(10, 99)
    return {
        "problem": f"Which integer comes after ${number}$?",
        "level": "Level 1",
        "type": "Number Theory",
        "solution": rf"We add one: $\boxed{{{number + 1}}}$.",
    }


def quotient(draw: random.Random) -> Row:
    a, b = draw.randint(10, 99), draw.randint(2, 9)
    return {
        "problem": rf"Write ${a} \div {b}$ as a fraction.",
        "level": "Level 2",
        "type": "Prealgebra",
        "solution": rf"The divisor goes below: $\boxed{{\frac{{{a}}}{{{b}}}}}$.",
    }


def interval(draw: random.Random) -> Row:
    limit, below = draw.randint(10, 99), draw.random() < 0.5
    sign, answer = ("<", rf"(-\infty,{limit})") if below else (r"\ge", rf"[{limit},\infty)")
    return {
        "problem": f"Write $x {sign} {limit}$ as an interval.",
        "level": "Level 3",
        "type": "Algebra",
        "solution": rf"On the number line: $\boxed{{{answer}}}$.",
    }


def distinct_rows(draw: random.Random) -> Iterator[Row]:
    """Rows of the three kinds, without end and without two that are equal, until too few are
    left."""
    seen = set[str]()
    for _ in range(100_000):
        row = draw.choice((successor, quotient, interval))(draw)
        if row["problem"] not in seen:
            seen.add(row["problem"])
            yield row


def write_rows(directory: Path, train: list[Row], test: list[Row]) -> None:
    """The files of the layout: one of Parquet for each split."""
    (directory / "data").mkdir(parents=True, exist_ok=True)
    for split, rows in (("train", train), ("test", test)):
        path = directory / "data" / f"{split}-00000-of-00001.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        print(f"{path}: {len(rows)} rows")


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE over ``texts`` in which, as in Qwen's own, every digit is a token of its
    own."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|[^\s\d]+|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[TEXT_END, START, END],
            initial_alphabet=sorted(alphabet),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=END,
        pad_token=TEXT_END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> torch.nn.Module:
    """Freshly initialised, float32. head_dim 32 is the smallest that vLLM's attention kernels
    take."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config)


def supervised(prompts: PromptTokenizer, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, int64 [rows, longest]: right-padded, loss on the solution and its end."""
    pairs = []
    for row in rows:
        prompt = prompts.prompt(row).tokens.tolist()
        pairs.append((prompt, [*prompts.encode(row["solution"]), *prompts.end_tokens]))
    longest = max(len(prompt) + len(solution) for prompt, solution in pairs)
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORED)
    for line, (prompt, solution) in enumerate(pairs):
        end = len(prompt) + len(solution)
        tokens[line, :end] = torch.tensor(prompt + solution)
        labels[line, len(prompt) : end] = torch.tensor(solution)
    return tokens, labels


@torch.no_grad()
def solved(model: torch.nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of rows whose greedy answer is the solution, word for word."""
    best = model(input_ids=tokens).logits[:, :-1].argmax(-1)
    wanted = labels[:, 1:]
    return float(((best == wanted) | (wanted == IGNORED)).all(1).float().mean())


def teach(
    model: torch.nn.Module, prompts: PromptTokenizer, rows: list[Row], *, target: float
) -> float:
    """Supervised steps until the share ``target`` of the rows is solved; returns the share."""
    tokens, labels = supervised(prompts, rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    draw = random.Random("batches")
    reached = 0.0
    for step in range(1, MOST_STEPS + 1):
        chosen = torch.tensor(draw.sample(range(len(rows)), BATCH))
        loss = model(input_ids=tokens[chosen], labels=labels[chosen]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            reached = solved(model, tokens[:LOOKED_AT], labels[:LOOKED_AT])
            if reached >= target:
                break
    return reached


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train", type=int, default=512, help="rows to train on")
    parser.add_argument("--test", type=int, default=64, help="rows to evaluate on")
    parser.add_argument("--target", type=float, default=0.3, help="share that the model solves")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=Path("data/MATH-lighteval"))
    parser.add_argument("--model", type=Path, default=Path("models/tiny-qwen3"))
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    drawn = distinct_rows(random.Random(args.seed))
    rows = [row for row, _ in zip(drawn, range(args.train + args.test), strict=False)]
    if len(rows) < args.train + args.test:
        print(
            f"error: there are only {len(rows)} different problems: ask for fewer", file=sys.stderr
        )
        return 2
    test, train = rows[: args.test], rows[args.test :]
    write_rows(args.data, train, test)
    settings = load_config(CONFIG, [f"model.path={args.model}"])
    texts = [f"{row['problem']}{settings.data.prompt_suffix}\n{row['solution']}" for row in train]
    tokenizer = build_tokenizer([*texts, CHAT_TEMPLATE])
    tokenizer.save_pretrained(args.model)
    model = build_model(tokenizer)
    reached = teach(model, PromptTokenizer(settings), train, target=args.target)
    if reached < args.target:
        print(f"error: the model solves {reached:.2f}: try another --seed", file=sys.stderr)
        return 1
    logging.disable_progress_bar()
    model.save_pretrained(args.model)
    count = sum(p.numel() for p in model.parameters())
    print(f"{args.model}: {count:,} parameters, solves {reached:.2f} of the rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
