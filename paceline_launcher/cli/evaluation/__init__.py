"""``paceline eval``: a model judged on a data set, without a run."""
