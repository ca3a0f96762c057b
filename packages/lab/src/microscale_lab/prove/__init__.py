"""``microscale prove``: every kernel that a model may launch is compiled for every architecture, and executed as there.

``inventory`` lists what the models start, ``run`` compiles and checks it with ``ptxproof``, ``report`` shows the
result. ``selection`` says which cases of ``microscale_lab.cases`` a card has, ``execute`` runs them, and
``executed_report`` shows the outcome. ``mutation`` breaks kernels on purpose and counts
which faults the cases notice. ``bridge`` turns Microscale's launches into those of ``ptxproof``.
"""
