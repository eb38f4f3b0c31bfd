"""``make demo``: trains digit sort with a whole local fleet, then asks the exported model.

Options are handed on to ``paceline up``, for example ``--set train.steps=100``.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import paceline

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
PROMPTS = 5
LEARNS_STEPS = 100
"""After so many steps the demo fails if it has not learned."""


def main() -> int:
    options = sys.argv[1:]
    run_dir = REPOSITORY / "runs" / "digit-sort"
    if "--run-dir" in options[:-1]:
        at = options.index("--run-dir")
        run_dir = Path(options[at + 1]).resolve()
        del options[at : at + 2]
    started = time.monotonic()
    up = [Path(sysconfig.get_path("scripts")) / "paceline", "up", HERE / "digit_sort.toml"]
    command = [*up, "--fresh", "--run-dir", run_dir, *options]
    # The config's paths are relative to the repository.
    fleet = subprocess.Popen([str(part) for part in command], cwd=REPOSITORY)
    # Ctrl-C goes to the whole foreground group: the fleet stops itself, and we wait for that.
    while True:
        try:
            status = fleet.wait()
            break
        except KeyboardInterrupt:
            continue
    if status != 0:
        return status
    summary = paceline.attach(run_dir).summary()
    before, after = summary["eval_first"], summary["eval_last"]
    print()
    print(
        f"The model sorted {before:.0%} of the held-out digits before, and {after:.0%} after "
        f"{summary['steps']} steps ({time.monotonic() - started:.0f} s). "
        f"Samples lost {summary['samples_lost']}, trained twice {summary['samples_duplicated']}."
    )
    if not summary["export"]:
        print("error: the run exported no model:", summary["reason"], file=sys.stderr)
        return 1
    print("The exported model, on prompts that it was not trained on:")
    right = ask(Path(summary["export"]))
    if summary["steps"] >= LEARNS_STEPS and (after <= before or not right):
        print("error: the model has not learned: paceline why --run-dir", run_dir, file=sys.stderr)
        return 1
    return 0


def ask(model_dir: Path) -> int:
    """Reloads the exported model through transformers, prints its most likely answers to a few
    held-out prompts, and returns how many of them are right."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    rows = (HERE / "held_out.jsonl").read_text().splitlines()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    right = 0
    for row in map(json.loads, random.sample(rows, PROMPTS)):
        prompt = tokenizer(row["prompt"], return_tensors="pt")
        output = model.generate(**prompt, do_sample=False, max_new_tokens=24)
        start = prompt["input_ids"].shape[1]
        answer = tokenizer.decode(output[0, start:], skip_special_tokens=True)
        right += answer == row["answer"]
        verdict = "right" if answer == row["answer"] else f"wrong, it is {row['answer']}"
        print(f"  {row['prompt']} {answer}   {verdict}")
    return right


if __name__ == "__main__":
    sys.exit(main())
