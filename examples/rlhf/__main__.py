"""RLHF on digit sort by one command: SFT, a reward model, PPO against it; or SFT and DPO on the
same preferences.

Each stage is a run of `paceline up` that begins with the exports of the stages before it. The same
command goes on after an interruption: a stage that is done is skipped, and one that was cut is
continued from its last state.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from examples.rlhf import stages
from examples.rlhf.runner import Interrupted, StageFailed, alone_in, run_all, state_of
from examples.rlhf.stages import PIPELINES, REPOSITORY, PipelineProblem, Place

EXAMPLES = """examples:
  python -m examples.rlhf                                    SFT, preferences, reward model, PPO
  python -m examples.rlhf dpo                                SFT, preferences, DPO
  python -m examples.rlhf all --dir /tmp/rlhf                both; they share SFT and preferences
  python -m examples.rlhf --dry-run                          what would run, and what is done
  python -m examples.rlhf --stages reward_model,ppo          these alone, from what is there
  python -m examples.rlhf --short --dir /tmp/short           a few steps of each: does it work here?
  python -m examples.rlhf --dir runs/hacked --set reward_model.train.steps=100 \\
      --set ppo.train.loss.kl_coef=0       a weak reward model is exploited: the run warns

exit status: 0 done, 1 a stage failed, 2 bad input, 130 interrupted"""
BASE = REPOSITORY / "examples/digit_sort/model-0.1M"
HELD_OUT = REPOSITORY / "examples/digit_sort/held_out.jsonl"
REWARD = "examples.digit_sort.reward:sorted_exactly"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m examples.rlhf",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("pipeline", nargs="?", choices=list(PIPELINES), default="ppo")
    made.add_argument(
        "--dir",
        type=Path,
        default=REPOSITORY / "runs/rlhf",
        help="directory of all stages; default: runs/rlhf",
    )
    made.add_argument("--stages", default="", metavar="A,B", help="only these stages")
    made.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="STAGE.SETTING=VALUE",
        help="setting of a stage, such as ppo.train.loss.kl_coef=0.1; may be repeated",
    )
    made.add_argument(
        "--short", action="store_true", help="a few steps of each stage, to see that they work"
    )
    made.add_argument("--dry-run", action="store_true", help="print the stages and run nothing")
    return made


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    try:
        return _main(args)
    except PipelineProblem as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except StageFailed as failure:
        print(f"\nerror: {failure}", file=sys.stderr)
        return 1
    except (Interrupted, KeyboardInterrupt):
        print(f"\ninterrupted; {_go_on(args)}", file=sys.stderr)
        return 130


def _main(args: argparse.Namespace) -> int:
    root = args.dir.expanduser().resolve()
    chosen = stages.chosen_stages(args.pipeline, [n for n in args.stages.split(",") if n])
    given = stages.overrides_by_stage(args.set, chosen)
    places = [stages.place(s, root, short=args.short, given=given[s.name]) for s in chosen]
    _check_needs(places)
    if args.dry_run:
        for place in places:
            print(f"{place.stage.name}: {_state(place)}\n    {shlex.join(place.command())}")
        return 0
    with alone_in(root):
        run_all(places, lambda text: print(text, file=sys.stderr, flush=True))
        print(_models(places) if args.short else _report(root, places))
    return 0


def _check_needs(places: list[Place]) -> None:
    """A stage that --stages leaves out must be done. Raises PipelineProblem."""
    running = {place.stage.name for place in places}
    for place in places:
        for name in place.stage.needs:
            needed = Place(stages.STAGES[name], place.root, {})
            if name not in running and not needed.done:
                raise PipelineProblem(
                    f"--stages: {place.stage.name} begins with the output of {name}, which is not "
                    f"in {needed.directory}. Add {name} to --stages"
                )


def _state(place: Place) -> str:
    if place.done:
        return "done"
    return f"begun, {state_of(place)[0]}" if place.directory.exists() else "to do"


def _go_on(args: argparse.Namespace) -> str:
    return f"the same command goes on; logs: {args.dir}/STAGE.log"


def _models(places: list[Place]) -> str:
    models = [f"  {p.stage.name:<12} {p.output}" for p in places if p.stage.is_run]
    return "\n".join(["exported models:", *models])


def _report(root: Path, places: list[Place]) -> str:
    """Greedy exact match on held-out prompts before and after each stage that makes a policy, by
    `paceline eval`."""
    lines = ["greedy exact match on 256 held-out prompts:"]
    models = {"base model": BASE}
    models |= {p.stage.name: p.output for p in places if p.stage.name in ("sft", "ppo", "dpo")}
    for name, model in models.items():
        lines.append(f"  {name:<12} {_exact_match(root, name, model):.3f}   {model}")
    return "\n".join(lines)


def _exact_match(root: Path, name: str, model: Path) -> float:
    out = root / f"eval-{name.replace(' ', '-')}.json"
    command = [*stages.paceline(), "eval", str(model), "--data", str(HELD_OUT)]
    command += ["--reward", REWARD, "--set", "rollout.max_tokens=24", "--json", str(out)]
    command += ["--set", "fleet.rollout_threads=1", "--set", "model.device=cpu"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PipelineProblem(
            f"{model} could not be evaluated: {done.stderr.strip() or done.stdout.strip()}. To try "
            f"again: {shlex.join(command)}"
        )
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return float(found["metrics"]["reward"])


if __name__ == "__main__":
    sys.exit(main())
