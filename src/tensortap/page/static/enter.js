// The token was exchanged: keep the key, and continue without the token in the address.
localStorage.setItem("tensortap-key", document.currentScript.dataset.key);
location.replace("/" + location.hash);
