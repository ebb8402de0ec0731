"""Messages, handshake, keys and addresses of the live connection."""
