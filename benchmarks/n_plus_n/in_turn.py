"""The one-process side of ``benchmarks.n_plus_n``: PPO's parts one after the other, in plain torch.

    generate ─► score ─► reference ─► policy and critic ─► GAE ─► two losses ─► one optimizer step

Prints one JSON object. Run in a process of its own, so that the thread count holds from the first
import on. Made to be fast: one batch of all samples in each part, attention of torch's SDPA, the
log-probabilities before the update are those of the update's own pass (a step makes one update, so
they are the same numbers and a pass is saved), no logging, no checkpoints.
"""

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

GROUPS, GROUP_SIZE, MAX_TOKENS = 16, 8, 24
KL_COEF, CRITIC_LR_SCALE, GAE_LAMBDA = 0.3, 10.0, 0.95
DEMO = Path(__file__).resolve().parents[2] / "examples" / "digit_sort"
PARTS = ("generate", "score", "reference", "train")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("model", "reward-model", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("threads", "steps", "warm-up", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    args = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(args.threads)
    import torch

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rows = [json.loads(line) for line in (DEMO / "train.jsonl").read_text().splitlines()]
    random.Random(args.seed).shuffle(rows)
    system = InTurn(args.model, args.reward_model, args.lr)
    rewards: list[float] = []
    for step in range(args.steps):
        first = step * GROUPS % (len(rows) - GROUPS)
        rewards.append(system.step([row["prompt"] for row in rows[first : first + GROUPS]]))
        if step + 1 == args.warm_up:
            system.seconds = dict.fromkeys(PARTS, 0.0)
            started, cpu = time.perf_counter(), time.process_time()
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    system.save(args.out)
    counted = args.steps - args.warm_up
    result = {
        "samples_per_s": counted * GROUPS * GROUP_SIZE / seconds,
        "cpu_s_per_step": cpu_s / counted,
        "wall_s_per_step_by_part": {name: s / counted for name, s in system.seconds.items()},
        "kl_last": system.kl,
        "rewards": rewards,
    }
    json.dump(result, sys.stdout)
    print()


class InTurn:
    """Four models in one process, which take turns."""

    def __init__(self, model: Path, reward_model: Path, lr: float) -> None:
        import torch
        from transformers import (
            AutoModelForCausalLM,
            AutoModelForSequenceClassification,
            AutoTokenizer,
        )

        self.tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        self.policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        classifier = AutoModelForSequenceClassification.from_pretrained
        self.scorer = classifier(reward_model, num_labels=1, dtype=torch.float32)
        self.critic = classifier(model, num_labels=1, dtype=torch.float32)
        torch.nn.init.zeros_(self.critic.score.weight)
        for frozen in (self.reference, self.scorer):
            frozen.eval().requires_grad_(False)
        groups = [
            {"params": list(self.policy.parameters()), "lr": lr},
            {"params": list(self.critic.parameters()), "lr": lr * CRITIC_LR_SCALE},
        ]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.kl = 0.0

    def save(self, out: Path) -> None:
        self.policy.save_pretrained(out)
        self.tokenizer.save_pretrained(out)

    def step(self, prompts: list[str]) -> float:
        """One PPO step on a group of completions of each prompt. Returns the mean score."""
        import torch

        clock = time.perf_counter()

        def took(part: str) -> None:
            nonlocal clock
            now = time.perf_counter()
            self.seconds[part] += now - clock
            clock = now

        with torch.no_grad():
            tokens, mask, made = self.generate(prompts)
            took("generate")
            places = (mask.cumsum(1) - 1).clamp(min=0)
            inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": places}
            scores = self.score(inputs)
            took("score")
            reference = logprobs(self.reference(**inputs).logits, tokens)
            took("reference")
        trained = made[:, 1:].float()
        policy = logprobs(self.policy(**inputs).logits, tokens)
        # V(s_t): the state in which token t is chosen ends with the token before it.
        hidden = self.critic.model(**inputs).last_hidden_state
        values = self.critic.score(hidden)[:, :-1, 0]
        kl = (policy.detach() - reference) * trained
        rewards = -KL_COEF * kl
        last = trained.shape[1] - 1 - trained.flip(1).argmax(1)
        rewards[torch.arange(len(last)), last] += scores
        advantages, returns = gae(rewards, values.detach() * trained, trained)
        count = trained.sum()
        mean = (advantages * trained).sum() / count
        spread = (((advantages - mean) * trained).square().sum() / count).sqrt()
        whitened = (advantages - mean) / (spread + 1e-4)
        ratio = (policy - policy.detach()).exp()
        # One update a sample: the ratio is 1, and clipping never binds.
        loss = -(ratio * whitened * trained).sum() / count
        loss = loss + 0.5 * ((values - returns).square() * trained).sum() / count
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for group in self.optimizer.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
        self.optimizer.step()
        self.kl = float(kl.sum() / count)
        took("train")
        return float(scores.mean())

    def generate(self, prompts: list[str]) -> tuple[Any, Any, Any]:
        """Tokens, which of them are not padding, and which the policy made, [B, T] each."""
        import torch

        end = self.tokenizer.eos_token_id
        batch = self.tokenizer(prompts, return_tensors="pt", padding=True)
        batch = {
            name: batch[name].repeat_interleave(GROUP_SIZE, 0)
            for name in ("input_ids", "attention_mask")
        }
        self.policy.eval()
        tokens = self.policy.generate(
            **batch,
            max_new_tokens=MAX_TOKENS,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=self.tokenizer.pad_token_id or end,
        )
        self.policy.train()
        start = batch["input_ids"].shape[1]
        ends = (tokens[:, start:] == end).cumsum(1)
        # Up to and with the first end of the sequence.
        made = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], 1) == 0
        mask = torch.cat([batch["attention_mask"], made.long()], 1)
        return tokens, mask, torch.cat([torch.zeros_like(batch["attention_mask"]), made.long()], 1)

    def score(self, inputs: dict[str, Any]) -> Any:
        """[B]: the reward model's score at the last token of each sequence."""
        import torch

        hidden = self.scorer.model(**inputs).last_hidden_state
        mask = inputs["attention_mask"]
        last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
        return self.scorer.score(hidden[torch.arange(len(last)), last])[:, 0]


def logprobs(logits: Any, tokens: Any) -> Any:
    """[B, T - 1]: of each token but the first, after those before it."""
    import torch

    picked = logits[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    return picked - torch.logsumexp(logits[:, :-1], -1)


def gae(rewards: Any, values: Any, trained: Any) -> tuple[Any, Any]:
    """Advantages and returns, [B, T] each, without a discount; 0 where nothing is trained. The
    trained tokens of a sequence lie side by side."""
    import torch

    advantages = torch.zeros_like(rewards)
    carried, following = torch.zeros(len(rewards)), torch.zeros(len(rewards))
    for t in range(rewards.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + following - values[:, t]
        carried = (delta + GAE_LAMBDA * carried) * trained[:, t]
        advantages[:, t], following = carried, values[:, t] * trained[:, t]
    return advantages, (advantages + values) * trained


if __name__ == "__main__":
    main()
