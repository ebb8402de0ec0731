"""The spine: plain data and small functions that everything uses."""
