"""Checkpoints and their export as Hugging Face directories."""
