"""OpenAI-compatible endpoint for the samples of environments."""
