"""Measurements of the real engine and of its kernels, for ``hyradix bench``."""
