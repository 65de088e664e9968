"""Token ids in, token ids out: scheduler, paged KV cache, model runner, sampler.

Knows no network, no text and no clock. Importing this package imports no torch: the pure parts (block
hash, block pool, scheduler, sampling parameters) are used by processes that have none.
"""
