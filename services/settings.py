"""Settings from flags and environment into one frozen, validated object a process.

A config class is a frozen pydantic model; each field is the flag `--its-name` and the environment variable
`KVBATON__ITS_NAME`. Flags win over the environment, the environment over the default. A bad value or an unknown
name stops the process with one line that names it.

The double underscore keeps Kubernetes out: for each Service in a namespace it injects `<NAME>_PORT`,
`<NAME>_SERVICE_HOST` and the like, and a Service name cannot end in a dash, so none can be called `KVBATON_`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

ENV_PREFIX = "KVBATON__"
SHARED_NAMES = frozenset({"cache_dir"})
"""Read where they are needed, outside any config class."""
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT(_.*)?)$|_PORT(_\d+_(TCP|UDP|SCTP)(_(PORT|PROTO|ADDR))?)?$")

ConfigT = TypeVar("ConfigT", bound=BaseModel)


def env_name(field_name: str) -> str:
    return ENV_PREFIX + field_name.upper()


def secret_field(field: FieldInfo) -> bool:
    """Secrets come from the environment or a file only: a command line is readable by every user."""
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("secret"))


def add_arguments(parser: argparse.ArgumentParser, config: type[BaseModel], skip: Iterable[str] = ()) -> None:
    """One flag a field; values stay text until pydantic has checked them all."""
    for name, field in config.model_fields.items():
        if name in skip or secret_field(field):
            continue
        flag = "--" + name.replace("_", "-")
        described = f"{field.description or ''} [{env_name(name)}]"
        if not field.is_required() and field.default is not None:
            described += f" (default: {_shown(field.default)})"
        described = described.replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=None, help=described)
        else:
            metavar = _metavar(field)
            parser.add_argument(flag, dest=name, default=None, metavar=metavar, help=described)


def load(
    config: type[ConfigT],
    namespace: argparse.Namespace,
    *,
    prog: str,
    environ: Mapping[str, str] | None = None,
    known: Iterable[str] = (),
    **fixed: Any,
) -> ConfigT:
    """Merge and validate. `known`: setting names of the other processes, which may share this environment.
    `fixed`: fields that the command itself decides. Ends the process with status 2 on a bad or unknown one."""
    environ = os.environ if environ is None else environ
    refuse_unknown(environ, {*config.model_fields, *known, *SHARED_NAMES}, prog=prog)
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for name, field in config.model_fields.items():
        if name in fixed:
            continue
        flag_value = getattr(namespace, name, None)
        if flag_value is not None:
            values[name], origin[name] = _split(field, flag_value), "--" + name.replace("_", "-")
        elif env_name(name) in environ:
            values[name], origin[name] = _split(field, environ[env_name(name)]), env_name(name)
    try:
        return config(**values, **fixed)
    except ValidationError as error:
        _stop(prog, [_explain(problem, origin, values) for problem in error.errors()])


def refuse_unknown(environ: Mapping[str, str], known: Iterable[str], *, prog: str) -> None:
    names = {env_name(name) for name in known}
    unknown = [
        key for key in environ if key.startswith(ENV_PREFIX) and key not in names and not _SERVICE_LINK.search(key)
    ]
    if unknown:
        _stop(prog, [f"unknown setting {name} in the environment" for name in sorted(unknown)])


def _split(field: FieldInfo, value: Any) -> Any:
    if get_origin(field.annotation) in (list, tuple) and isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _metavar(field: FieldInfo) -> str:
    choices = [str(choice) for choice in get_args(field.annotation) if isinstance(choice, str)]
    if choices:
        return "{" + ",".join(choices) + "}"
    text = str(field.annotation)
    for kind, shown in (("list", "A,B"), ("tuple", "A,B"), ("Path", "PATH"), ("int", "N"), ("float", "X")):
        if kind in text:
            return shown
    return "TEXT"


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(str(part) for part in value) or "none"
    return str(value)


def _explain(problem: Any, origin: Mapping[str, str], values: Mapping[str, Any]) -> str:
    name = str(problem["loc"][0]) if problem["loc"] else ""
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "missing":
        return f"--{name.replace('_', '-')} (or {env_name(name)}) is required"
    where = origin.get(name)
    return f"{where} {values[name]!r}: {message}" if where else message


def _stop(prog: str, lines: Sequence[str]) -> NoReturn:
    for line in lines:
        print(f"{prog}: error: {line}", file=sys.stderr)
    raise SystemExit(2)
