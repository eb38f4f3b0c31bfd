"""The samples of environments, served to OpenAI-compatible clients."""
