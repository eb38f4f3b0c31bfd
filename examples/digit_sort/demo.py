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

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent


def main() -> int:
    options = sys.argv[1:]
    run_dir = REPOSITORY / "runs" / "digit-sort"
    if "--run-dir" in options[:-1]:
        at = options.index("--run-dir")
        run_dir = Path(options[at + 1]).resolve()
        del options[at : at + 2]
    started = time.monotonic()
    paceline = Path(sysconfig.get_path("scripts")) / "paceline"
    command = [paceline, "up", HERE / "digit_sort.toml", "--fresh", "--run-dir", run_dir, *options]
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
    summary = json.loads((run_dir / "summary.json").read_text())
    print()
    print(
        f"held-out exact match {summary['eval_first']:.2f} -> {summary['eval_last']:.2f}"
        f" in {summary['steps']} steps, {time.monotonic() - started:.0f} s;"
        f" samples lost {summary['samples_lost']}, duplicated {summary['samples_duplicated']},"
        f" staleness up to {summary['max_staleness']:.0f}"
    )
    if not summary.get("export"):
        print("error: the run exported no model", file=sys.stderr)
        return 1
    print(f"exported model: {summary['export']}")
    print(ask(Path(summary["export"])))
    return 0


def ask(model_dir: Path) -> str:
    """Reloads the exported model through transformers and samples one held-out answer."""
    from paceline.cuda_extensions import hide_cuda_extensions

    hide_cuda_extensions()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    rows = (HERE / "held_out.jsonl").read_text().splitlines()
    row = json.loads(random.choice(rows))
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    prompt = tokenizer(row["prompt"], return_tensors="pt")
    output = model.generate(**prompt, do_sample=True, temperature=1.0, max_new_tokens=24)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    verdict = "right" if answer == row["answer"] else f"wrong, it is {row['answer']}"
    return f"sampled from it: {row['prompt']} {answer}   ({verdict})"


if __name__ == "__main__":
    sys.exit(main())
