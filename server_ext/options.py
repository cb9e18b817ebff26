"""Finds typing mistakes in engine options and in the ``--config`` file within milliseconds.

SGLang's own parser gives the final word, but it takes an import of many seconds to build and answers a mistake with
the usage text of five hundred options. The names are therefore read from SGLang's source text here, without importing
it.
"""

import ast
import difflib
import functools
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from server_ext.errors import UserError


def _source_folder() -> Path:
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("SGLang is not installed in this Python environment; `make install` installs it")
    return Path(spec.submodule_search_locations[0]) / "srt"


def _strings(node: ast.expr | None) -> list[str]:
    items = node.elts if isinstance(node, ast.List | ast.Tuple) else [node]
    return [item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)]


def _field_names(source: str) -> Iterator[str]:
    """Yield the option names of each ``name: A[type, ...]`` field; see ``arg_groups/arg_utils.py`` in SGLang."""
    for field in ast.walk(ast.parse(source)):
        if not (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(field.annotation, ast.Subscript)
            and isinstance(field.annotation.value, ast.Name)
            and field.annotation.value.id == "A"
        ):
            continue
        keywords: dict[str | None, ast.expr] = {
            keyword.arg: keyword.value
            for call in ast.walk(field.annotation)
            if isinstance(call, ast.Call)
            for keyword in call.keywords
        }
        if "no_cli" in keywords:
            continue
        names = _strings(keywords.get("cli_name")) or ["--" + field.target.id.replace("_", "-")]
        names += _strings(keywords.get("aliases"))
        yield from names
        if ast.unparse(keywords.get("action", field.target)).endswith("BooleanOptionalAction"):
            yield from ("--no-" + name[2:] for name in names)


def _added_names(source: str) -> Iterator[str]:
    """Yield the names given to ``add_argument`` by hand."""
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            yield from (name for argument in call.args for name in _strings(argument) if name.startswith("--"))


@functools.cache
def engine_option_names() -> frozenset[str]:
    """Return every long option of the installed SGLang, such as ``--model-path``."""
    folder = _source_folder()
    names = set(_added_names((folder / "server_args.py").read_text()))
    for fields in (folder / "arg_groups" / "fields").glob("*.py"):
        names.update(_field_names(fields.read_text()))
    return frozenset(names) | {"--help"}


def _suggestion(name: str, known: frozenset[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def check_arguments(arguments: Sequence[str], known: frozenset[str]) -> None:
    """Raise `UserError` for the first ``--word`` that is neither a known option nor an abbreviation of one."""
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("--") and not any(option.startswith(name) for option in known):
            raise UserError(f"unknown option {name}{_suggestion(name, known)}")


def read_config(path: str, known: frozenset[str]) -> dict[str, Any]:
    """Return the options in a ``--config`` file by dashed name without the leading dashes.

    Raises `UserError` when the file cannot be read, is no YAML mapping, or holds a key that is not in `known`.
    """
    if Path(path).suffix.lower() not in {".yaml", ".yml"}:
        raise UserError(f"--config {path}: the name must end in .yaml or .yml")
    try:
        content = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(f"--config {path}: not valid YAML{where}: {problem}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"--config {path}: expected `option: value` lines, found a {type(content).__name__}")
    options = {}
    for key, value in content.items():
        name = "--" + str(key).replace("_", "-")
        if name not in known or name == "--config":
            close = _suggestion(name, known).replace("--", "")
            raise UserError(f"--config {path}: unknown option {key}{close}")
        options[name[2:]] = value
    return options
