"""Answers that completions vote for: equal answers are equal texts."""

import pytest

from rollout_worker.rewards.builtin import LONGEST, answer_of_text, last_boxed


@pytest.mark.parametrize(
    ("vote", "text", "answer"),
    [
        ("text", " 12 \n", "12"),
        ("text", "  ", ""),
        ("boxed", r"so \boxed{1} or \boxed{ \frac{1}{2} }", r"\frac{1}{2}"),
        ("boxed", r"\boxed{007.50}", "7.5"),
        ("boxed", r"\boxed{3} and \boxed{4", "3"),
        ("boxed", "none: 12", ""),
        ("number", "first 3, then 1,000.00.", "1000"),
        ("number", "it is -0.0", "0"),
        ("number", "no digits", ""),
        ("math", r"\boxed{x+1} of 7", "x+1"),
        ("math", "the answer is 7.0", "7"),
        ("math", "1" * 5000, "1" * LONGEST),
    ],
)
def test_an_answer_is_read_from_the_text(vote: str, text: str, answer: str) -> None:
    assert answer_of_text(vote, text) == answer


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so $\boxed{\frac{\sqrt{3}}{2}}$.", r"\frac{\sqrt{3}}{2}"),
        (r"\boxed{1}, no: \boxed {2 \pi}", r"2 \pi"),
        (r"\fbox{\text{(C) } 5}", r"\text{(C) } 5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (
            r"\boxed{\begin{pmatrix} 1 \\ {2} \end{pmatrix}}",
            r"\begin{pmatrix} 1 \\ {2} \end{pmatrix}",
        ),
        (r"\boxed{\boxed{3}}", "3"),
        (r"{ \boxed{3} } and \boxed{4", "3"),
        (r"} \boxed{}", ""),
        (r"no box: \frac{1}{2}", None),
    ],
)
def test_the_last_box_ends_with_its_own_brace(text: str, content: str | None) -> None:
    assert last_boxed(text) == content
