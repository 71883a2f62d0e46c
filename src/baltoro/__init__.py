"""baltoro: the open K3 stack."""

__version__ = "0.1.0"
