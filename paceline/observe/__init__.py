"""The read model of a run: its files and events as tails, folds, words and summaries."""
