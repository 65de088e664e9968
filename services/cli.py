"""The `kvbaton` command: one subcommand a process, each importing only what its process needs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

from pydantic import BaseModel

from services import settings
from services.check import CheckConfig
from services.gateway.config import GatewayConfig
from services.serve.config import ServeConfig
from services.worker.config import WorkerConfig

CONFIGS = (WorkerConfig, GatewayConfig, ServeConfig, CheckConfig)
ALL_NAMES = frozenset(name for config in CONFIGS for name in config.model_fields)
"""Setting names of every process: an environment may be shared by several of them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script. Returns the exit status."""
    args = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    return run(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvbaton", description="Disaggregated LLM serving", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"kvbaton {version('kvbaton')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = _command(commands, "serve", "gateway, prefill and decode processes on this machine", ServeConfig)
    serve.set_defaults(run=_serve)
    gateway = _command(commands, "gateway", "the OpenAI API in front of the workers", GatewayConfig)
    gateway.set_defaults(run=_gateway)
    for role, text in (
        ("prefill", "a worker that computes prompts and ships their KV"),
        ("decode", "a worker that takes in KV and generates"),
        ("both", "a worker that serves whole requests by itself"),
    ):
        worker = _command(commands, role, text, WorkerConfig, skip=("role",))
        worker.set_defaults(run=_worker)
    check = _command(commands, "check", "one chat request, which must have moved KV between workers", CheckConfig)
    check.set_defaults(run=_check)
    _add_model(commands)
    _add_key(commands)
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    text: str,
    config: type[BaseModel],
    skip: Sequence[str] = (),
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    settings.add_arguments(parser, config, skip)
    return parser


def _add_model(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from services import model_cli

    model = commands.add_parser("model", help="model directories", description="Model directories")
    verbs = model.add_subparsers(dest="verb", required=True, metavar="VERB")
    text = "turn a GGUF file into a Hugging Face directory; without one, fetch and import the default model"
    importing = verbs.add_parser("import", help=text, description=text, allow_abbrev=False)
    model_cli.add_arguments(importing)
    importing.set_defaults(run=model_cli.run)


def _add_key(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from services import key_cli

    key = commands.add_parser("key", help="API keys of the gateway", description="API keys of the gateway")
    verbs = key.add_subparsers(dest="verb", required=True, metavar="VERB")
    text = "print a new key and its entry for the file that --api-keys-file names"
    new = verbs.add_parser("new", help=text, description=text, allow_abbrev=False)
    key_cli.add_arguments(new)
    new.set_defaults(run=key_cli.run)


def _serve(args: argparse.Namespace) -> int:
    from services.serve.main import run

    return run(settings.load(ServeConfig, args, prog="kvbaton serve", known=ALL_NAMES))


def _gateway(args: argparse.Namespace) -> int:
    from services.gateway.main import run

    return run(settings.load(GatewayConfig, args, prog="kvbaton gateway", known=ALL_NAMES))


def _worker(args: argparse.Namespace) -> int:
    from services.worker.main import run

    prog = f"kvbaton {args.command}"
    return run(settings.load(WorkerConfig, args, prog=prog, known=ALL_NAMES, role=args.command))


def _check(args: argparse.Namespace) -> int:
    from services.check import run

    return run(settings.load(CheckConfig, args, prog="kvbaton check", known=ALL_NAMES))


if __name__ == "__main__":
    sys.exit(main())
