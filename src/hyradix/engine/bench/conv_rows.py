"""A decode step's short convolution alone, as the compiled mixers run it inside.

Owns: the loop over rows. Does not know: heads; all channels are one segment.
Read next: ``kernels/causal_conv/compiled.py``.
"""
# mypy: ignore-errors
# (kernels are typed by numba, not by annotations)

from __future__ import annotations

from hyradix.kernels.causal_conv.compiled import convolve, window_in, window_out
from hyradix.kernels.numba_support import compiled


@compiled()
def conv_rows(projected, slots, weight, conv_state, window, mixed, segments):
    """One token of each row: ``projected`` ``[N, C]``, ``mixed`` ``[N, C]``, windows in place.

    weight: ``[K, C]``. window: ``[K C]`` scratch. conv_state: ``[slots, K-1, C]``.
    """
    width, channels = weight.shape
    for n in range(slots.shape[0]):
        base = slots[n] * (width - 1) * channels
        window_in(window, width, channels, conv_state, base, channels, segments)
        convolve(
            projected, n * channels, window, width - 1, width, channels, weight, 0, mixed[n],
            segments,
        )  # fmt: skip
        window_out(window, width - 1, width, channels, conv_state, base, channels, segments)
