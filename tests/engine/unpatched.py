"""Takes one patch of the series out of the running process: the control of the patch's test.

SGLang stays as installed. Each function that the patch changes gets the code it had before, in place, so whoever
imported it has that code too.
"""

import contextlib
import importlib
import inspect
import operator
from collections.abc import Iterator
from types import CodeType, FunctionType

from server_ext.image.installation import Installation, read_file
from server_ext.image.series import Series


@contextlib.contextmanager
def without(patch_name: str) -> Iterator[None]:
    """While the context lasts, run the functions that the patch changes as they are without it."""
    patched = {}
    try:
        for function, code in _code_before(patch_name):
            patched[function] = function.__code__
            function.__code__ = code
        assert patched, f"{patch_name} changes no function"
        yield
    finally:
        for function, code in patched.items():
            function.__code__ = code


def _code_before(patch_name: str) -> Iterator[tuple[FunctionType, CodeType]]:
    installation = Installation.find()
    series, state = Series.load(installation.version), installation.state()
    at = [patch.name for patch in series.patches].index(patch_name)
    before, after = (
        Series(series.version, series.patches[:end]).result(lambda path: read_file(installation.original(path, state)))
        for end in (at, at + 1)
    )
    for path in {change.path for change in series.patches[at].changes}:
        old = _functions(before[path].after if path in before else after[path].before)
        new = _functions(after[path].after)
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        for name in sorted(old.keys() & new.keys()):
            if "<" not in name and _without_lines(old[name]) != _without_lines(new[name]):
                found = inspect.unwrap(operator.attrgetter(name)(module))  # a plugin may have hooked it
                if isinstance(found, FunctionType):
                    yield found, old[name]


def _functions(source: bytes | None) -> dict[str, CodeType]:
    """The code of each function and method by its qualified name."""

    def walk(code: CodeType) -> Iterator[CodeType]:
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield constant
                yield from walk(constant)

    return {code.co_qualname: code for code in walk(compile(source or b"", "<before>", "exec"))}


def _without_lines(code: CodeType) -> CodeType:
    """The same code as if all of it stood on line 1, to compare what it does."""
    constants = (_without_lines(item) if isinstance(item, CodeType) else item for item in code.co_consts)
    return code.replace(co_firstlineno=1, co_linetable=b"", co_consts=tuple(constants))
