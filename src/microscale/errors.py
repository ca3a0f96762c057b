"""Every error that Microscale raises on purpose.

There is one class for each kind of person who can fix it. A message is one sentence that names what is wrong and says
what to do. The command line prints it without a traceback; the server maps the class to a status.
"""

from __future__ import annotations


class MicroscaleError(Exception):
    """The root of all errors that are raised on purpose; a bug raises something else."""


class Unsupported(MicroscaleError):
    """This combination of model, format, option and GPU cannot run; the message says why and what can."""


class BadCheckpoint(MicroscaleError):
    """The files of a model are missing, damaged, or not what their config says."""


class BadConfig(BadCheckpoint):
    """A model's config.json lacks a key, or a key has the wrong type or value."""


class BadSetting(MicroscaleError):
    """A command-line option or an environment variable has an unusable value."""


class BadRequest(MicroscaleError):
    """A request asks for something that cannot be done: an empty prompt, a token that is not in the vocabulary …"""


class QueueFull(MicroscaleError):
    """The queue has its maximum length; the client should try again later."""


class OutOfPages(MicroscaleError):
    """The KV cache has too few free pages."""


class BadLogits(MicroscaleError):
    """The model produced NaN or infinity."""


class EngineDied(MicroscaleError):
    """The engine process ended or does not answer; its work is lost."""


class Draining(MicroscaleError):
    """The engine finishes its open requests and accepts no new ones."""


class BadMessage(MicroscaleError):
    """A message between our processes is damaged, too large, or of another version."""


class RankFailed(EngineDied):
    """One of the processes that share a model died, hangs, or disagrees with the others."""
