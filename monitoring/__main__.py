"""Writes the chart's dashboards and rules, or with ``--check`` says which of the files are stale (exit status 1)."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from monitoring import alerts, overview, pools, speculation

CHART = Path(__file__).parents[1] / "charts" / "sglang-dflash"
DASHBOARDS = {"overview": overview.build, "pools": pools.build, "speculation": speculation.build}


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def alert_settings() -> dict[str, dict[str, Any]]:
    """Return what the chart's values say of each alert by default."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    settings: dict[str, dict[str, Any]] = values["monitoring"]["rules"]["alerts"]
    return settings


def rules_text(groups: dict[str, Any]) -> str:
    """Return a rule file."""
    return yaml.dump(groups, Dumper=_Dumper, sort_keys=False, width=1000)


def dashboard_json(name: str) -> str:
    """Return a dashboard as Grafana reads it."""
    return json.dumps(DASHBOARDS[name]().build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def documents() -> dict[Path, str]:
    """Return what the files should be."""
    made = {CHART / "dashboards" / f"{name}.json": dashboard_json(name) for name in DASHBOARDS}
    header = "# Made by `make dashboards` from monitoring/alerts.py and the defaults in values.yaml.\n"
    made[CHART / "rules" / "alerts.yaml"] = header + rules_text(alerts.rule_groups(alert_settings()))
    return made


def main() -> int:
    """Write the files, or check them; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m monitoring", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is stale")
    check = parser.parse_args().check
    made = documents()
    present = {path: path.read_text() for kind in ("dashboards/*.json", "rules/*.yaml") for path in CHART.glob(kind)}
    for path in sorted(path for path in made.keys() | present.keys() if made.get(path) != present.get(path)):
        if check:
            print(f"{path} is stale: run `make dashboards`", file=sys.stderr)
        elif path in made:
            path.write_text(made[path])
        else:
            path.unlink()
    return int(check and made != present)


if __name__ == "__main__":
    sys.exit(main())
