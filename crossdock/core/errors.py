"""Errors by who can mend them; the command line turns them into exit codes."""


class CrossdockError(Exception):
    """Something failed that the user did not cause. Exit code 1."""

    exit_code = 1


class UserError(CrossdockError):
    """The user asked for something impossible; the message says what to change. Exit code 2."""

    exit_code = 2


class ConfigError(UserError):
    """A setting is wrong: which one, what was given, what is expected."""


class CheckpointError(UserError):
    """A checkpoint cannot be loaded: names the file and the tensor."""


class CapacityError(UserError):
    """Something does not fit; gives both numbers and the setting to change."""


class RequestError(UserError):
    """One request is invalid. `param` names its field as the API calls it."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class Busy(UserError):
    """Something of which there can be one at a time is under way; ask again when it has ended."""


class RankLost(CrossdockError):
    """A rank died or missed a deadline. `rank` is the one that did not come (-1: not known)."""

    def __init__(self, message: str, rank: int = -1):
        super().__init__(message)
        self.rank = rank
