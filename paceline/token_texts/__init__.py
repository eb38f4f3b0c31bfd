"""Texts of tokens, for programs that must not import transformers."""
