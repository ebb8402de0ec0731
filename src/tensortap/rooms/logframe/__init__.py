"""LogFrame: the pandas frame of tensor statistics that other tools read and write, too."""
