"""What can be said about a port and a model folder before the engine is imported."""

import errno
import json
import socket
from pathlib import Path

from server_ext.errors import UserError

_MODEL_FILES = ("config.json", "params.json")  # Hugging Face's and Mistral's format


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address, not listening yet. Raises `UserError` if nothing can listen there."""
    if not 0 < port < 65536:
        raise UserError(f"--port {port}: must be between 1 and 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except socket.gaierror as error:
        raise UserError(f"--host {host}: {error.strerror}") from error
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {port} on {host} is in use; stop what listens there or choose another one with --port "
                "(with make: PORT=...)"
            ) from error
        raise UserError(f"--host {host} --port {port}: {error.strerror}") from error
    return bound


def check_model(option: str, model: str) -> None:
    """Raise `UserError` if `model` is meant as a folder and cannot be one; repository ids are left to SGLang."""
    path = Path(model)
    if not path.exists():
        if model.startswith(("/", "./", "../", "~")):
            raise UserError(f"{option} {model}: no such folder; give a model folder or a Hugging Face repository id")
        return
    if not path.is_dir():  # a GGUF file, which SGLang takes too
        return
    try:
        found = [file for file in path.iterdir() if file.name in _MODEL_FILES]
        if not found:
            raise UserError(f"{option} {model}: there is no {' or '.join(_MODEL_FILES)}, so this is no model folder")
        json.loads(found[0].read_text())
    except OSError as error:
        raise UserError(f"{option} {model}: cannot read {error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{option} {model}: {found[0].name} is not valid JSON: {error}") from error
