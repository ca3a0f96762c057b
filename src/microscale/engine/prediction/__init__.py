"""How fast a model will be, from the plan of its kernels: for ``explain``, ``bench`` and ``/plan``."""
