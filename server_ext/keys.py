"""The server's API keys: read from a file or the environment, known to the serving process alone.

SGLang prints its resolved options at start-up, returns them from ``/server_info``, pickles them to its workers and
shows its command line to everyone who can run ``ps``. A key is therefore never one of its options here. It is laid
over the published configuration of the one process that answers HTTP (`in_effect`), where SGLang's own checks and its
start-up requests read it.
"""

import contextlib
import shlex
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from server_ext.errors import UserError


@dataclass(frozen=True)
class Key:
    """One key: SGLang's option, which is refused, and the two places that are read instead."""

    option: str
    variable: str

    @property
    def file_option(self) -> str:
        """The option that takes the path of the file with the key."""
        return f"{self.option}-file"

    @property
    def field(self) -> str:
        """The name of the value in SGLang's ``serving`` configuration."""
        return self.option[2:].replace("-", "_")


API_KEY = Key("--api-key", "SGLANG_API_KEY")
KEYS = (API_KEY, Key("--admin-api-key", "SGLANG_ADMIN_API_KEY"))


def refuse_in_options(names: Sequence[str], known: frozenset[str], where: str) -> None:
    """Raise `UserError` if one of the option `names`, or what it abbreviates among `known`, carries a key."""
    for name in names:
        meant = [name] if name in known else [option for option in known if option.startswith(name)]
        for key in KEYS:
            if key.option in meant and all(option.startswith(key.option) for option in meant):
                raise UserError(
                    f"{key.option} does not belong {where}, where others can read it; put the key into a file and give "
                    f"{key.file_option} FILE, or set the environment variable {key.variable}"
                )


def _checked(value: str, source: str) -> str:
    value = value.strip()
    if not value:
        raise UserError(f"{source} is empty; put the key there, or leave it out to serve without one")
    if not value.isascii() or not value.isprintable() or " " in value:
        raise UserError(f"{source} must be one line of printable ASCII without spaces to fit an Authorization header")
    return value


def load(files: Mapping[str, str | None], environment: MutableMapping[str, str]) -> dict[str, str]:
    """Return the keys that are set, by field name; a file wins over the environment.

    `files` holds each path by field name. The variables are removed from `environment`, so that no worker inherits
    them.
    """
    keys = {}
    for key in KEYS:
        from_environment = environment.pop(key.variable, None)
        path = files.get(key.field)
        if path is not None:
            try:
                keys[key.field] = _checked(Path(path).read_text(), f"{key.file_option} {path}")
            except OSError as error:
                raise UserError(f"{key.file_option} {path}: {error.strerror}") from error
            except UnicodeDecodeError as error:
                raise UserError(f"{key.file_option} {path} is not a text file") from error
        elif from_environment is not None:
            keys[key.field] = _checked(from_environment, f"the environment variable {key.variable}")
    return keys


def refuse_header_log(environment: Mapping[str, str]) -> None:
    """Raise `UserError` if SGLang is told to log the header in which clients send the key."""
    variable = "SGLANG_LOG_REQUEST_HEADERS"
    headers = [name.strip().lower() for name in environment.get(variable, "").split(",")]
    if "authorization" in headers:
        raise UserError(f"{variable} names authorization, which would log the keys of all requests; leave it out")


@contextlib.contextmanager
def in_effect(keys: Mapping[str, str]) -> Iterator[None]:
    """Let this process check requests against `keys`; needs SGLang's configuration to be published."""
    from sglang.srt.runtime_context import get_serving

    with get_serving().override(**keys):
        yield


def shell_expression(key: Key, file: str | None) -> str:
    """Return what a shell makes of the key: the content of its file, or its variable."""
    return f"$(cat {shlex.quote(file)})" if file else f"${key.variable}"
