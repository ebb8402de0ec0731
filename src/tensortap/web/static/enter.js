// Opened from another site: now that the cookie is set, continue without the token in the address.
location.replace("/" + location.hash);
