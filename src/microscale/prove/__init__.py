"""Proof for hardware that is not here: every kernel that may be launched is compiled for every architecture, and
executed as it is there.

``inventory`` lists what the models start, ``run`` gathers it, ``compiler`` compiles one kernel in a process that
``pool`` forks, ``cache`` keeps what it found, ``gate`` judges, ``report`` shows. ``cases`` holds the case tables of all
ops, ``selection`` says which a card has, ``execute`` runs them, ``executed_report`` shows what came out. The
limits and instructions of the cards are in ``hardware``, not here.
"""
