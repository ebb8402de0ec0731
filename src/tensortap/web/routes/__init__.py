"""What the page asks the server for, a module a part of the page."""
