"""The machine: how ranks talk, what was launched, what the node and its links give.

`mpi.connect()` opens the world; `local.run_local` is the same contract on threads. Imports
mpi4py (in `mpi.py` alone) and numpy, no torch.
"""
