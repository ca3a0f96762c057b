"""Several processes that run one model together (``--tensor-parallel-size``).

    rank 0: the engine                      ranks 1 …: a process each (``__main__``, ``follower``)
      ``leader``     starts the others and sends each step before running it
      ``watch``      notices a rank that fails, ends or falls silent
      ``steps``      a schedule as a message ──────────────► and back; logits of all ranks
      ``messages``   the messages and the connection they travel over
      ``processes``  starting and ending rank processes, here and on other machines

Only rank 0 schedules and samples. Sums and gathers go through ``parallel/group``.
"""
