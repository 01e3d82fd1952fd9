"""The base class of errors that a user is told of in one line."""


class UserError(Exception):
    """Something that a user can mend; the text is one line that says what is wrong and, if there is one, the way out.

    A command that does not deal with it prints this line, without a traceback, and ends with status 1.
    """
