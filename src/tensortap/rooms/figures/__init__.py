"""Figures: plotly figures, widgets of notebooks, and the report of a run."""
