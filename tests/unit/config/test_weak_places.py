"""What is wrong in a configuration is named with its line, the setting, and what to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config.load import ConfigError, load_config

HEAD = '[model]\npath = "m"\n'
DATA = '[data]\npath = "x"\n'


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        (f"{HEAD}{DATA}chat = yes\n", 5, ["chat = yes", 'a text needs quotes ("yes")']),
        (f'{HEAD}{DATA}path = "y"\n', 5, ["path =", "stands twice: remove one"]),
        (f"{HEAD}{DATA}[data]\nchat = true\n", 5, ["[data]", "stands twice"]),
        (f'{HEAD}[data]\npath = "x\n', 4, ["with the quote that it began with"]),
        (f"{HEAD}{DATA}[redis]\npassword = hunter2\n", 6, ["password = "]),
        (f"train = 5\n{HEAD}{DATA}", 1, ["it is a section. Write [train]"]),
        (f"{HEAD}{DATA}[train]\noptimizer = 3\n", 6, ["Write [train.optimizer]"]),
        (f'{HEAD}{DATA}[train]\nalgorithm = "grop"\n', 6, ["train.algorithm", "mean grpo?"]),
        (f'{HEAD}{DATA}[rollout]\nengine = "vlm"\n', 6, ["rollout.engine = 'vlm'", "mean vllm?"]),
        (f'{HEAD}{DATA}[reward]\nfunctions = ["exact_mach"]\n', 6, ["mean exact_match?"]),
        (f'{HEAD}{DATA}[reward]\nfunctions = "exact_match"\n', 6, ['Write ["exact_match"]']),
        (
            f'{HEAD}{DATA}[reward]\nfunctions = {{ exact_match = "much" }}\n',
            6,
            ["reward.functions", "the weight of exact_match is 'much'"],
        ),
        (
            f'{HEAD}{DATA}[evaluation.sets.a]\npath = "x"\nreward = ["math_verfy"]\n',
            7,
            ["evaluation.sets.a.reward", "mean math_verify?"],
        ),
    ],
)
def test_a_mistake_is_named_with_line_setting_and_remedy(
    tmp_path: Path, text: str, line: int, said: list[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(path)
    message = str(refused.value)
    assert message.startswith(f"{path} line {line}: ") and "\n" not in message
    assert all(words.lower() in message.lower() for words in said), message
    assert "hunter2" not in message and "instance of" not in message
