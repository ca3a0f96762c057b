"""Every error that Microscale raises on purpose.

One class per person who can mend it. A message is one sentence that names the thing at fault and says what to do;
the command line prints it without a traceback and the server maps the class to a status.
"""

from __future__ import annotations


class MicroscaleError(Exception):
    """The root: catching it catches everything raised on purpose, and no bug."""


class Unsupported(MicroscaleError):
    """This combination of model, format, option and GPU cannot run; the message says why and what can."""


class BadCheckpoint(MicroscaleError):
    """The files of a model are missing, damaged, or not what their config says."""


class BadConfig(BadCheckpoint):
    """A model's config.json lacks a key, or a key has the wrong type or value."""


class BadSetting(MicroscaleError):
    """A command-line option or an environment variable has a value that cannot be used."""


class BadRequest(MicroscaleError):
    """A request asks for something that cannot be done: an empty prompt, a token that is not in the vocabulary …"""


class QueueFull(MicroscaleError):
    """More requests wait than the queue may hold; the client should come back later."""


class OutOfPages(MicroscaleError):
    """The KV cache has no free page left for what was asked."""


class BadLogits(MicroscaleError):
    """The model produced NaN or infinity."""


class EngineDied(MicroscaleError):
    """The engine process is gone, or was given up; what it was working on is lost."""


class Draining(MicroscaleError):
    """The engine finishes what it has and takes nothing new; another one should be asked."""


class BadMessage(MicroscaleError):
    """A message between our processes is damaged, too large, or of another version."""


class RankFailed(EngineDied):
    """One of the processes that share a model died, hangs, or does not do what the others do."""
