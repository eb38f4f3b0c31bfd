"""Builds the demo's model: a small Qwen3 with a character tokenizer, taught the task halfway.

A short supervised run stops as soon as greedy answers to fresh prompts are right six times in ten;
what reinforcement learning does from there is the demo. Runs on one thread in about a minute, and
writes a directory that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load. The 0.1M result is
checked in; ``--size 0.8M`` writes the larger one that the benchmarks use.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.digit_sort.make_data import HERE, LONGEST, draw

PAD, END = "<pad>", "<end>"
VOCABULARY = {token: i for i, token in enumerate([PAD, END, "s", "=", *"0123456789"])}
# head_dim 32 is the smallest that vLLM's attention kernels take.
SIZES = {
    "0.1M": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "0.8M": {
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
}
LEARNING_RATES = {"0.1M": 5e-3, "0.8M": 2e-3}
IGNORED = -100


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; ``<end>`` ends an answer."""
    characters = Tokenizer(models.WordLevel(VOCABULARY, unk_token=PAD))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        model_max_length=128,
        clean_up_tokenization_spaces=False,
    )


def build_model(size: str) -> Qwen3ForCausalLM:
    """Freshly initialised, float32."""
    config = Qwen3Config(
        vocab_size=len(VOCABULARY) + 2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=VOCABULARY[PAD],
        eos_token_id=VOCABULARY[END],
        bos_token_id=None,
        initializer_range=0.05,
        **SIZES[size],
    )
    return Qwen3ForCausalLM(config)


def supervised_batch(rng: random.Random, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, int64 [size, 2 * LONGEST + 3]: right-padded, loss on the answer only."""
    tokens = torch.full((size, 2 * LONGEST + 3), VOCABULARY[PAD])
    labels = torch.full_like(tokens, IGNORED)
    for line in range(size):
        row = draw(rng)
        prompt = [VOCABULARY[c] for c in row["prompt"]]
        answer = [*(VOCABULARY[c] for c in row["answer"]), VOCABULARY[END]]
        end = len(prompt) + len(answer)
        tokens[line, :end] = torch.tensor(prompt + answer)
        labels[line, len(prompt) : end] = torch.tensor(answer)
    return tokens, labels


@torch.no_grad()
def exact_match(model: Qwen3ForCausalLM, rng: random.Random, count: int) -> float:
    """Share of fresh prompts whose greedy answer is right.

    Greedy decoding is right exactly when every token of the reference is the most likely one after
    those before it, so one forward pass tells.
    """
    tokens, labels = supervised_batch(rng, count)
    best = model(input_ids=tokens).logits[:, :-1].argmax(-1)
    wanted = labels[:, 1:]
    return float(((best == wanted) | (wanted == IGNORED)).all(1).float().mean())


def train(
    size: str, *, seed: int, target: float, batch: int, lr: float, most: int
) -> tuple[Qwen3ForCausalLM, float]:
    """Supervised training until ``target``; returns the model and the exact match it stopped at."""
    torch.manual_seed(seed)
    rng = random.Random(f"warm start {seed}")
    model = build_model(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 100))
    reached, started = 0.0, time.perf_counter()
    for step in range(1, most + 1):
        tokens, labels = supervised_batch(rng, batch)
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 5 == 0:
            # A stream of its own, so that looking does not change what is trained on.
            reached = exact_match(model, random.Random(f"look {seed} {step}"), 1024)
            seconds = time.perf_counter() - started
            print(f"step {step:5d}  loss {loss.item():.3f}  exact {reached:.3f}  {seconds:.0f} s")
            if reached >= target:
                break
    return model, reached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="0.1M")
    parser.add_argument("--target", type=float, default=0.54, help="exact match to stop at")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, help="default: by size")
    parser.add_argument("--most", type=int, default=6000, help="steps to give up after")
    parser.add_argument(
        "--out", type=Path, help="directory; default: model-<size> beside this file"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, reached = train(
        args.size,
        seed=args.seed,
        target=args.target,
        batch=args.batch,
        lr=args.lr or LEARNING_RATES[args.size],
        most=args.most,
    )
    if reached < args.target:
        raise SystemExit(f"exact match {reached:.3f} after {args.most} steps: try another --seed")
    out = args.out or HERE / f"model-{args.size}"
    model.generation_config.do_sample = False
    model.save_pretrained(out)
    build_tokenizer().save_pretrained(out)
    print(f"{out}: {sum(p.numel() for p in model.parameters()):,} parameters, exact {reached:.3f}")


if __name__ == "__main__":
    main()
