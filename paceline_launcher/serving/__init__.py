"""vLLM's OpenAI server on a model that a run has exported."""
