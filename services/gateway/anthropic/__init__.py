"""The Anthropic Messages API, since agents speak it."""
