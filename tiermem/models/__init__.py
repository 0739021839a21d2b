"""A GPT, its data and a plain in-memory trainer, for `tiermem train`, benchmarks and tests."""
