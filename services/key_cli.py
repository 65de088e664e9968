"""`kvbaton key new`: a new API key, and the entry that makes it known to the gateway."""

from __future__ import annotations

import argparse
import sys

from services.gateway.tenants.keys import hash_key, new_key


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="what the key is called in logs and metrics")
    parser.add_argument("--tenant", help="default: the name")


def run(args: argparse.Namespace) -> int:
    """The key goes to standard error, to be seen once; the entry to standard output, to be added to the file."""
    key = new_key()
    print(f"the key, shown only this once: {key}", file=sys.stderr)
    print(f'[[key]]\nname = "{args.name}"\nhash = "{hash_key(key)}"')
    if args.tenant:
        print(f'tenant = "{args.tenant}"')
    return 0
