"""Steer: switch the probes of a running job, on all ranks at one step."""
