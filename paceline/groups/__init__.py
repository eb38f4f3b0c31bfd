"""Groups of completions as workers exchange them: their checks, payloads, digests and facts."""
