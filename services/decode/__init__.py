"""Decode: reserve blocks, take in KV, generate."""
