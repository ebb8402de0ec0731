// Opened from another site: now that the cookie is here, go on without the token in the address.
location.replace("/" + location.hash);
