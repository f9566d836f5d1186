"""Logits to token ids. Read ``sampler.py`` first."""
