"""Serves the metrics of an engine whose hooks are not in place: ``python unhooked.py PORT FOLDER``."""

import os
import sys
import threading

port, folder = sys.argv[1:]
os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder

from prometheus_client import CollectorRegistry, multiprocess, start_http_server  # noqa: E402

from server_ext.metrics import report_down  # noqa: E402

registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
report_down()
start_http_server(int(port), addr="127.0.0.1", registry=registry)
threading.Event().wait()
