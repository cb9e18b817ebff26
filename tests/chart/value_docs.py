"""Carries the descriptions of values.yaml to where else they are read: README.md's table and values.schema.json.

    python -m value_docs [--check]

With ``--check`` nothing is written; the exit status is 1 and the stale files are named if there are any.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "charts" / "sglang-dflash"
MARKER = "# -- "
TABLE_BEGIN, TABLE_END = "<!-- values: made by `make chart-docs` -->\n", "<!-- values: end -->\n"


@dataclass(frozen=True)
class Value:
    """One documented value: dotted `path`, `default` and `description`."""

    path: tuple[str, ...]
    default: Any
    description: str


def _mapping(node: yaml.Node) -> list[tuple[yaml.ScalarNode, yaml.Node]]:
    return node.value if isinstance(node, yaml.MappingNode) else []


def _comment_above(lines: list[str], line: int) -> str | None:
    """Return the description that ends on the line before `line` (counted from 0), or None."""
    words: list[str] = []
    for text in reversed(lines[:line]):
        text = text.strip()
        if text.startswith(MARKER):
            return " ".join([text.removeprefix(MARKER), *words])
        if not text.startswith("# "):
            return None
        words.insert(0, text.removeprefix("# "))
    return None


def documented(text: str) -> list[Value]:
    """Return the values of a values file that have a description, in its order."""
    lines = text.splitlines()
    found: list[Value] = []

    def visit(node: yaml.Node, path: tuple[str, ...]) -> None:
        for key, child in _mapping(node):
            here = (*path, key.value)
            description = _comment_above(lines, key.start_mark.line)
            if description is None:
                visit(child, here)
            else:
                found.append(Value(here, yaml.safe_load(yaml.serialize(child)), description))

    visit(yaml.compose(text), ())
    return found


def undocumented(text: str) -> list[str]:
    """Return the dotted paths of values that neither have a description nor are inside one that has."""
    described = {value.path for value in documented(text)}

    def visit(value: Any, path: tuple[str, ...]) -> list[str]:
        if path in described:
            return []
        if isinstance(value, dict) and value:
            return [name for key, child in value.items() for name in visit(child, (*path, key))]
        return [".".join(path)]

    return visit(yaml.safe_load(text), ())


def table(values: list[Value]) -> str:
    """Return the Markdown table of `values`."""
    rows = [
        f"| `{'.'.join(value.path)}` | `{json.dumps(value.default, ensure_ascii=False)}` | {value.description} |\n"
        for value in values
    ]
    return "| value | default | meaning |\n| --- | --- | --- |\n" + "".join(rows).replace("`null`", "null")


def described_schema(schema: dict[str, Any], values: list[Value]) -> dict[str, Any]:
    """Return a copy of a JSON schema with the descriptions of `values`. Raises KeyError for one it does not have."""
    described = json.loads(json.dumps(schema))
    for value in values:
        node = described
        for key in value.path:
            node = node["properties"][key]
        node["description"] = value.description
    return described


def documents(folder: Path) -> dict[Path, str]:
    """Return what the files of a chart that hold descriptions should be."""
    values = documented((folder / "values.yaml").read_text())
    readme, schema = folder / "README.md", folder / "values.schema.json"
    before, _, rest = readme.read_text().partition(TABLE_BEGIN)
    _, _, after = rest.partition(TABLE_END)
    text = json.dumps(described_schema(json.loads(schema.read_text()), values), indent=2, ensure_ascii=False)
    return {readme: before + TABLE_BEGIN + table(values) + TABLE_END + after, schema: text + "\n"}


def main() -> int:
    """Write the files, or check them; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = {path: text for path, text in documents(CHART).items() if path.read_text() != text}
    for path, text in stale.items():
        if check:
            print(f"{path} is stale: run `make chart-docs`", file=sys.stderr)
        else:
            path.write_text(text)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
