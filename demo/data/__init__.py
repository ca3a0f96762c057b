"""What the embedded model is taught: one module for each kind of task, each with a held-out part by construction.

Every module has ``make(rng, held_out)``. Whether a problem is held out follows from a hash of what identifies it (the
operands, the schema, the question's wording with its country …): training never draws such a problem, evaluation draws
nothing else.
"""
