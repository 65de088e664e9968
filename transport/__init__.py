"""Moves KV bytes between processes: wire layout, messages, transfer state machine, UCX and in-process planes.

Knows no model, no torch and no HTTP.
"""
