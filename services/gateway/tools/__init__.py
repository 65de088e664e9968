"""Reasoning and tool calls: what a request may define, and how they are read out of a model's text. Pure."""
