"""The one exception for a user's mistake."""


class UserError(ValueError):
    """Bad input, found before any compute.

    The message says what came, what was expected and what to do. The command line prints it
    without a traceback and exits with 2; in a script it is an ordinary ``ValueError``.
    """
