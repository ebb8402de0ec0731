"""The page: a web server over runs and live sessions."""
