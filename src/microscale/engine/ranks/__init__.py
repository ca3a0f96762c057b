"""Several processes that run one model together (``--tensor-parallel-size``).

    rank 0: the engine as ever, and        ranks 1 …: a process each (``follower``)
      ``team``     starts the others, asks, waits
      ``watch``    hears them: alive, done, at fault, gone
      ``leading``  says each step's plan, then runs it ──► ``mirror`` puts it together again; the runner runs it
               sums and gathers between all of them: ``parallel/group``

Rank 0 alone schedules and samples. What it tells the others of a step is a small typed message (``messages``).
"""
