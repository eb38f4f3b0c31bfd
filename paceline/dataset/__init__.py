"""Data set rows from JSONL, Parquet or Hugging Face data sets, and their shuffled order."""
