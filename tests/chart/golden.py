"""What the chart renders for each example, kept in `golden/` so that a change of the chart shows its effect.

python golden.py [--check]
"""

import argparse
import re
import sys
from pathlib import Path

from rendering import EXAMPLES, texts

FOLDER = Path(__file__).parent / "golden"


def document(example: str) -> str:
    """Return all templates of an example in one YAML text, notes last as a comment; dashboards without their JSON."""
    rendered = texts(EXAMPLES[example])
    parts = {path: re.sub(r'(?m)^(  [a-z]+\.json): ".*"$', r'\1: "{}"', text) for path, text in rendered.items()}
    notes = "".join(parts.pop(path) for path in list(parts) if path.endswith("NOTES.txt"))
    body = "".join(f"---\n# {path}\n{text.strip()}\n" for path, text in parts.items())
    return body + "".join(f"# {line}".rstrip() + "\n" for line in notes.strip().splitlines())


def main() -> int:
    """Write the files, or check them; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    made = {FOLDER / f"{example}.yaml": document(example) for example in EXAMPLES}
    old = {path: path.read_text() for path in FOLDER.glob("*.yaml")}
    for path in sorted(path for path in made.keys() | old.keys() if made.get(path) != old.get(path)):
        if check:
            print(f"{path} is stale: run `make chart-golden`", file=sys.stderr)
        elif path in made:
            path.parent.mkdir(exist_ok=True)
            path.write_text(made[path])
        else:
            path.unlink()
    return int(check and made != old)


if __name__ == "__main__":
    sys.exit(main())
