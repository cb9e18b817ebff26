"""The one exception that ends a command with one line instead of a stack trace."""


class UserError(Exception):
    """Bad input. The message names the thing, its value and the way out, on one line."""
