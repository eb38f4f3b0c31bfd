"""The loss of a step, as functions over columns of tokens; formulas: docs/algorithms.md."""
