"""Grafana dashboards and Prometheus rules as code, for whoever is on call.

    python -m monitoring [--check]

writes ``charts/sglang-dflash/dashboards/*.json`` and ``charts/sglang-dflash/rules/*.yaml``. One module a dashboard
(`overview`, `pools`, `speculation`), `panels` for what they share, `promql` for selectors and what queries name, and
`alerts` for the rules, whose sections in ``docs/runbook.md`` say what to do.
"""
