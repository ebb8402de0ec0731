"""The endpoints below ``/api``, one module per part of the page."""
