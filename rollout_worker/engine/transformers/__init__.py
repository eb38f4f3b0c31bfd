"""The transformers engine: continuous batching with in-flight weight updates."""
