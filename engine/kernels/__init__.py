"""Native CPU kernels: C++ in native/, built on first use (build.py), behind the same seam as plain torch (network.py).

linear       products with packed weights: float32, bfloat16, int8 with activations quantised in groups
attention    over the paged cache, one query a sequence (decode) or many (prefill)
elementwise  RMS norm, rotary embedding, gated activation
decoder      the whole step: one call from Python for all layers
"""
