"""mpipipe: pipeline-parallel training of PyTorch models over MPI."""

__version__ = "0.1.0"
