"""Executes a kernel's PTX on a CPU, and checks what hardware does not.

All threads of several blocks run at once, each a lane of NumPy arrays; where they branch apart they run under masks.
``program`` reads the PTX, ``build`` turns instructions into functions over lanes, ``run`` follows the control flow.
"""
