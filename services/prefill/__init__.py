"""Prefill: compute the KV of a prompt, sample its first token, ship the KV."""
