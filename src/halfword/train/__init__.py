"""The trainer: a Llama-shaped decoder, its text, and one run from settings to result files."""
