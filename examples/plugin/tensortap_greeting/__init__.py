"""A room for tensortap in another package: a rule, a command and a tab of the page."""
