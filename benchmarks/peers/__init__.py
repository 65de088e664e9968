"""Comparisons with other servers on the same cores: `make bench-peers`. See __main__.py."""
