"""Redaction: whatever looks like a credential is stored as ``***``.

The rules, in the order in which they apply to an environment variable or an argument:

* ``TENSORTAP_SECRETS``, a regular expression of the user (case is ignored): if it matches the
  name, the whole value is hidden, else the part of the value that it matches.
* A name with PASSWORD, SECRET, TOKEN, CREDENTIAL, COOKIE, WEBHOOK, JWT, DSN, AUTHORIZATION or the
  word KEY, or that ends in PWD, PASS, PAT, AUTH or CREDS: the whole value is hidden, unless
  - the last word of the name describes the credential (FILE, PATH, TYPE, SIZE, URL, ...),
  - the value is a number or a boolean (``MAX_TOKEN=512``; not for PASSWORD and SECRET),
  - the value is a path (for CREDENTIALS, NETRC and AUTH).
* Anywhere: ``user:password@`` and ``?token=`` in URLs, and the known formats of tokens and keys
  (``ghp_...``, ``sk-...``, ``hf_...``, ``AKIA...``, JWTs, private keys, Slack webhooks, ...).
* Anywhere: a repetition of the value of a variable that was hidden because of its name.

In arguments (``--api-key X``, ``--token=X``, ``wandb.api_key=X``) the word KEY is also used for
other things (``--text-key content``): there it hides a value only after API, ACCESS, SECRET,
PRIVATE and the like, or if the value is long and random.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Mapping, Sequence

log = logging.getLogger("tensortap")

HIDDEN = "***"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# the first hide any value, the second let numbers and booleans pass
_ALWAYS = re.compile(r"\w*PASS(WORD|WD|PHRASE)S?|\w*SECRETS?")
_UNLESS_PLAIN = re.compile(
    r"\w*TOKEN|(API|ACCESS|AUTH|REFRESH|BOT|BEARER|SESSION)TOKENS?|\w*CREDENTIALS?|COOKIES?"
    r"|WEBHOOKS?|JWT|DSN|AUTHORIZATION|(API|ACCESS|PRIVATE|ENCRYPTION|SIGNING|AUTH|LICENSE)KEYS?"
)
_LAST = ("PWD", "PASS", "PAT", "AUTH", "CREDS", "CRED", "CONNSTR")
_OF_TOKENS = frozenset("API ACCESS AUTH REFRESH BOT BEARER SESSION SERVICE USER".split())
_OF_KEYS = _OF_TOKENS | frozenset(
    """SECRET PRIVATE ENCRYPTION DECRYPTION SIGNING ACCOUNT MASTER SUBSCRIPTION LICENSE DEPLOY SSH
    GPG PGP HMAC AES RSA SHARED SAS STORAGE ADMIN APP CLIENT HOST WANDB COMET NEPTUNE OPENAI
    ANTHROPIC TENSORTAP""".split()
)
# <pad> and similar tokens of language models are no credentials
_OF_LANGUAGE = frozenset(
    """PAD EOS BOS UNK MASK SEP CLS SPECIAL IMAGE AUDIO VIDEO STOP START END PREFIX SUFFIX MIDDLE
    MAX MIN NUM EXTRA NEW LAST FIRST NEXT PER DECODER""".split()
)
_DESCRIBES = frozenset(
    """FILE FILES FILENAME PATH PATHS DIR DIRECTORY FOLDER SOCK SOCKET TYPE NAME NAMES LENGTH LEN
    SIZE COUNT LIMIT LIMITS RATE DROPOUT DIM EXPIRY EXPIRES TTL ALGORITHM URL URI ENDPOINT HOST PORT
    STORE HELPER PROVIDER PROVIDERS PARALLELISM MODE ENABLED REQUIRED POLICY VERSION COLUMN COL
    LENGTHS TIMEOUT RETRIES""".split()
)
_MAY_BE_A_PATH = re.compile(r"\w*CREDENTIALS?|CREDS?|NETRC|AUTH")
_PATH = re.compile(
    r"(~|\.{0,2}/|[A-Za-z]:\\)[^\s:@]*|[\w.-]+(/[\w.-]+)+|[\w-]+\.(json|ya?ml|toml|ini|cfg|txt)"
)
_PLAIN = re.compile(r"[-+]?\d{0,9}(\.\d*)?|true|false|yes|no|on|off|none|null|auto", re.IGNORECASE)
_OPAQUE = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w+/=.~-]{20,}")
_NOT_A_VALUE = re.compile(r"(use|no|with|without|require|need|has)[-_]", re.IGNORECASE)

# how a credential may begin: a quick search for long texts
_STARTS = re.compile(
    r"gh[pousr]_|github_pat_|glpat-|sk-|[sr]k_(?:live|test)_|hf_|AKIA|ASIA|AROA|xox|xapp-|AIza"
    r"|ya29\.|npm_|pypi-|eyJ|SG\.|dop_v1_|gsk_|r8_|nvapi-|dapi|-----BEGIN|hooks\.slack\.com/"
    r"|/api/webhooks/|AccountKey=|SharedAccess|Bearer |Basic "
)
_SHAPES = re.compile(
    r"""
      \bgh[pousr]_[A-Za-z0-9]{16,} | \bgithub_pat_\w{20,} | \bglpat-[\w-]{16,}
    | \bsk-(?=[\w-]*\d)[\w-]{16,} | \b[sr]k_(?:live|test)_\w{10,} | \bhf_[A-Za-z0-9]{16,}
    | \b(?:AKIA|ASIA|AROA)[A-Z0-9]{16}\b | \bxox[a-z]-[\w-]{10,} | \bxapp-[\w-]{10,}
    | \bAIza[\w-]{30,} | \bya29\.[\w-]{20,} | \bnpm_[A-Za-z0-9]{30,} | \bpypi-[\w-]{40,}
    | \beyJ[\w-]{8,}\.eyJ[\w-]{4,}\.[\w-]* | \bSG\.[\w-]{16,}\.[\w-]{16,} | \bdop_v1_[0-9a-f]{20,}
    | \bgsk_[A-Za-z0-9]{20,} | \br8_[A-Za-z0-9]{20,} | \bnvapi-[\w-]{20,} | \bdapi[0-9a-f]{32}\b
    | -----BEGIN[ A-Z]*PRIVATE\ KEY-----.*?(?:-----END[ A-Z]*PRIVATE\ KEY-----|\Z)
    | (?P<kept>hooks\.slack\.com/|/api/webhooks/)[\w/-]+
    | (?P<field>AccountKey=|SharedAccessKey=|SharedAccessSignature=)[^;\s]+
    | (?P<scheme>Bearer\ |Basic\ )[\w.~+/=-]{8,}
    """,
    re.VERBOSE | re.DOTALL,
)
_USERINFO = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*)://([^\s/?#@]*(?:@[^\s/?#@]*)*)@(?=[^\s/?#])")
_QUERY = re.compile(
    r"(?i)(?<=[?&;])((?:[\w.-]*(?:token|password|passwd|pwd|secret|signature|sig|credential|api_?key"
    r"|access_?key|auth|key)))=([^&\s#;'\"]+)"
)


def is_secret_name(name: str, value: str | None = None, *, argument: bool = False) -> bool:
    """Return whether a name says that its value is a credential.

    >>> is_secret_name("HF_TOKEN"), is_secret_name("TOKENIZERS_PARALLELISM")
    (True, False)
    """
    words = [word.upper() for word in _WORDS.findall(name)]
    if not words or words in (["PWD"], ["OLDPWD"]):
        return False
    if value is not None and not value:
        return False
    for at, word in enumerate(words):
        before = words[at - 1] if at else ""
        if _ALWAYS.fullmatch(word):
            return words[-1] not in _DESCRIBES
        if not _suspicious(word, before, words[at:], argument, value):
            continue
        if words[-1] in _DESCRIBES and not word.startswith("WEBHOOK"):
            return False  # only for webhooks the URL itself is the credential
        if value is not None:
            if _PLAIN.fullmatch(value):
                return False
            if _MAY_BE_A_PATH.fullmatch(word) and _PATH.fullmatch(value):
                return False
        return True
    return False


def _suspicious(word: str, before: str, rest: list[str], argument: bool, value: str | None) -> bool:
    """Return whether a word can mean a credential at its position in a name."""
    if word == "NETRC" or rest[:2] == ["CONNECTION", "STRING"]:
        return True
    if len(rest) == 1 and (word in _LAST or (word.endswith("PWD") and word != "PWD")):
        return not argument or word not in {"PAT", "AUTH"} or bool(before)
    if word == "TOKENS":
        return before in _OF_TOKENS
    if word in {"KEY", "KEYS"}:
        if not argument or before in _OF_KEYS:
            return True
        return value is not None and bool(_OPAQUE.fullmatch(value))
    if word == "TOKEN" and before in _OF_LANGUAGE:
        return False
    return _UNLESS_PLAIN.fullmatch(word) is not None


class Redactor:
    """The rules above for one environment.

    >>> Redactor().variables({"HF_TOKEN": "hf_123", "LANG": "C"})
    {'HF_TOKEN': '***', 'LANG': 'C'}
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        rule = environ.get("TENSORTAP_SECRETS", "")
        self._rule = _compile(rule) if rule else None
        hidden = {v for k, v in environ.items() if len(v) >= 8 and self._hides(k, v)}
        self._repeated = sorted(hidden, key=len, reverse=True)  # a value may contain another

    def _hides(self, name: str, value: str, *, argument: bool = False) -> bool:
        if self._rule is not None and self._rule.search(name):
            return True
        return is_secret_name(name, value, argument=argument)

    def variables(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return environment variables for storage, sorted by name."""
        return {
            name: HIDDEN if self._hides(name, value) else self.text(value)
            for name, value in sorted(variables.items())
        }

    def arguments(self, arguments: Sequence[str]) -> list[str]:
        """Return a command line for storage.

        >>> Redactor().arguments(["train.py", "--api-key", "abc", "--token=xyz", "--lr=0.1"])
        ['train.py', '--api-key', '***', '--token=***', '--lr=0.1']
        """
        stored: list[str] = []
        flag = ""  # the option whose value may be the next argument
        for argument in arguments:
            if flag and not argument.startswith("-") and self._hides_argument(flag, argument):
                stored.append(HIDDEN)
                flag = ""
                continue
            flag = ""
            name, equals, value = argument.partition("=")
            if equals and re.fullmatch(r"[-+~]{0,2}[\w.@/-]+", name):
                hidden = self._hides_argument(name, value)
                stored.append(f"{name}={HIDDEN}" if hidden else f"{name}={self.text(value)}")
                continue
            if not equals and re.fullmatch(r"--?[\w.-]+", argument):
                flag = argument
            stored.append(self.text(argument))
        return stored

    def _hides_argument(self, name: str, value: str) -> bool:
        bare = name.lstrip("-+~")
        return not _NOT_A_VALUE.match(bare) and self._hides(bare, value, argument=True)

    def text(self, text: str) -> str:
        """Return a text with everything hidden in it that looks like a credential.

        >>> Redactor(environ={}).text("https://me:pass@example.org/repo.git")
        'https://***@example.org/repo.git'
        """
        for value in self._repeated:
            if value in text:
                text = text.replace(value, HIDDEN)
        if self._rule is not None:
            text = self._rule.sub(HIDDEN, text)
        if "://" in text:
            text = _USERINFO.sub(_without_userinfo, text)
            text = _QUERY.sub(rf"\1={HIDDEN}", text)
        return _without_shapes(text)


def _without_shapes(text: str) -> str:
    pieces: list[str] = []
    done = 0
    for start in _STARTS.finditer(text):
        found = _SHAPES.match(text, start.start()) if start.start() >= done else None
        if found is not None:
            kept = found["kept"] or found["field"] or found["scheme"] or ""
            pieces += (text[done : found.start()], kept, HIDDEN)
            done = found.end()
    return "".join([*pieces, text[done:]]) if pieces else text


def _without_userinfo(match: re.Match[str]) -> str:
    scheme, user = match.groups()
    # a user name is no secret, except in HTTP, where tokens take its place
    if ":" not in user and not scheme.lower().startswith("http"):
        return match.group()
    return f"{scheme}://{HIDDEN}@"


@functools.lru_cache(maxsize=8)
def _compile(rule: str) -> re.Pattern[str]:
    try:
        return re.compile(rule, re.IGNORECASE)
    except re.error as error:
        log.warning("TENSORTAP_SECRETS is not a regular expression: %r (%s)", rule, error)
        return re.compile(re.escape(rule), re.IGNORECASE)  # never less careful than asked


def looks_secret(data: bytes) -> bool:
    """Return whether bytes contain the format of a known credential."""
    text = data.decode("utf-8", "replace")
    return any(_SHAPES.match(text, start.start()) for start in _STARTS.finditer(text))


_CREDENTIAL_FILES = re.compile(
    r"(?i)\.env(\..*)?|.*\.(pem|p12|pfx|key|keystore|jks|kdbx|ovpn|tfstate)|id_(rsa|dsa|ecdsa|ed25519)"
    r"|\.netrc|_netrc|\.pypirc|\.npmrc|\.pgpass|\.htpasswd|\.git-credentials|kubeconfig"
    r"|credentials?(\.json|\.ya?ml|\.toml|\.ini)?|.*service[-_]account.*\.json"
    r"|secrets?\.(json|ya?ml|toml|ini|txt|env)"
)


def is_credential_file(name: str) -> bool:
    """Return whether people keep credentials in a file of this name.

    >>> is_credential_file(".env"), is_credential_file("train.py")
    (True, False)
    """
    return _CREDENTIAL_FILES.fullmatch(name) is not None and not re.search(
        r"(?i)\.(example|sample|template|dist)$", name
    )
