"""The one exception for what a user did wrong."""


class UserError(Exception):
    """Bad input, said so that its reader can mend it.

    The message names the file, line, flag or field, the value found, what was expected and what to do.
    `train.py` and `decode.py` print it without a traceback and exit with status 2.
    """
