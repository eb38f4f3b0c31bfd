"""The loss of a step, as small functions over columns of tokens. docs/algorithms.md has the
formulas."""
