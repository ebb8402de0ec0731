"""Every figure, defined once, as a plotly figure dict: ``{"data": [...], "layout": {...}}``.

The dicts are ready for JSON: the page sends them, notebooks wrap them, reports embed them.
"""
