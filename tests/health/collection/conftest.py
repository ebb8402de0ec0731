"""Keep pytest from importing the programs, which would train them."""

collect_ignore_glob = ["bugs/*", "healthy/*"]
