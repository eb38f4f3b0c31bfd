"""Data set rows from JSONL, Parquet and Hugging Face data sets, and the row sampler."""
