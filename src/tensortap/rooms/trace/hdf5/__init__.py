"""HDF5 files of traced values."""
