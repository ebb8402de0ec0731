"""Redaction: whatever looks like a credential is stored as ``***``.

One table of patterns is applied to environment variables, to the command and to patches. A name
such as ``HF_TOKEN``, ``--api-key`` or ``db.password`` hides the value that follows it, also inside
of other text; well-known formats of tokens, private keys and passwords in URLs are hidden under any
name. The value of a hidden variable is hidden wherever else it stands. ``TENSORTAP_SECRETS``, a
regular expression (case is ignored), hides the values of names that it matches, and what it matches
in other text. Not recognized: credentials of an unknown format under an ordinary name, and whatever
is in binary files.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Mapping, Sequence

log = logging.getLogger("tensortap")

HIDDEN = "***"

_CAMEL_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SECRET_NAME = re.compile(
    r"""(?:^|.*[_.-])(?:
      \w*(?:PASSWORD|PASSWD|PASSPHRASE|PASSCODE|SECRET|TOKEN|CREDENTIAL|COOKIE|SSHPASS)S?
    | \w*(?:API|AUTH|ACCESS|PRIVATE|SECRET|SESSION|ENCRYPTION|PASS)KEYS?
    | (?:KEY|SESSION)(?:_ID)? | WEBHOOK(?:_URL)? | KEYS | AUTH | AUTHORIZATION | CREDS? | PASS | PW
    | BEARER | PIN | SEED | (?:SEED|RECOVERY)_?PHRASE | MNEMONIC
    | (?<=[_.-])PWD | PAT | JWT | DSN | CONNECTION_STRING | SESSIONID
    | (?:T?OTP|SALT|LICEN[SC]E|FERNET|SIGNING)S?(?:KEY)?(?:[_.-]\w+)*
    )(?:[_-](?:BASE|HEADERS?|CONFIG|STRING|VALUE|DATA|JSON|BASE64|B64|HEX|PEM|[0-9]+
      |PROD|DEV|STAGING|TEST|READ|WRITE|DB))*""",
    re.VERBOSE | re.IGNORECASE,
)
_HIDES_NUMBERS = re.compile(r"(?i)PASS|SECRET|OTP|\bPIN$|_PIN$")
_SEED = re.compile(r"(?i)(?:.*[_.-])?SEED")  # of random numbers, or of a wallet
# numbers, booleans, <pad>, [MASK], $VARIABLE, the path of a file
_HARMLESS = re.compile(
    r"(?i)[-+]?[\d.]{0,9}|true|false|yes|no|on|off|none|null|auto|<[^<>]*>|\[\w+\]|\$\{?\w+\}?"
    r"|[~.]{0,2}/[\w./-]+\.\w+|\*+"
)
# of source code: words with one number at most
_CODE_NAME = re.compile(r"[A-Za-z_./:-]+\d{0,3}[A-Za-z_./:-]*", re.ASCII)

# Each pattern hides what it matches, except its group "kept".
_PATTERNS = tuple(
    re.compile(pattern, re.ASCII)
    for pattern in (
        # private keys; in a patch up to the end of the hunk if there is no end
        (
            r"-----BEGIN[ A-Z]*PRIVATE KEY[ A-Z]*-----"
            r"(?s:.)*?(?:-----END[ A-Z]*PRIVATE KEY[ A-Z]*-----|\Z)"
        ),
        # tokens with a well-known start: GitHub, Hugging Face, npm, Groq, Replicate, Stripe, …
        (
            r"\b(?:gh[pousr]|github_pat|hf|npm|gsk|r8|[sr]k_(?:live|test)|glsa|do[por]_v1"
            r"|shp(?:at|ca|pa|ss)|lin_api|wandb_v\d)_[A-Za-z0-9]{16}\w*"
        ),
        # OpenAI, Anthropic, GitLab, Slack, PyPI, NVIDIA, Docker, …
        (
            r"\b(?:sk-|gl(?:pat|dt|ft|rt|ptt|cbt|soat)-|xox[a-z]-|xapp-|pypi-AgE|nvapi-|xai-|pplx-"
            r"|GOCSPX-|dckr_pat_|tskey-|whsec_)(?=[\w-]{0,200}\d)[\w+/=-]{16,}"
        ),
        # AWS, Google, SendGrid, Vault, Databricks, Telegram, JSON web tokens
        (
            r"\b(?:(?:AKIA|ASIA)[A-Z0-9]{16}\b|AIza[\w-]{30,}|ya29\.[\w-]{20,}|hvs\.[\w-]{20,}"
            r"|SG\.[\w-]{16,}\.[\w-]{16,}|dapi[0-9a-f]{32}\b|\d{8,10}:AA[\w-]{30,}"
            r"|eyJ[\w-]{8,}\.eyJ[\w-]{4,}\.[\w-]*)"
        ),
        # addresses that are a credential
        r"(?P<kept>hooks\.slack\.com/|/api/webhooks/)[\w/-]+",
        # passwords in URLs; in HTTP, a token may take the place of the user
        r"(?P<kept>\b[A-Za-z][A-Za-z0-9+.-]{0,30}://)[^\s/?#@:]*:[^\s/?#]+(?=@[^\s/?#])",
        r"(?P<kept>\b[Hh][Tt][Tt][Pp][Ss]?://)[^\s/?#]+(?=@[^\s/?#])",
        (
            r"(?i)(?P<kept>[?&;][\w.-]{0,40}(?:token|passw(?:or)?d|pwd|secret|sig|signature|credential"
            r"|key|auth)=)[^&\s#;'\"]+"
        ),
        # passwords of commands whose options are known
        (
            r"(?P<kept>\b(?:sshpass|(?:docker|podman|az|oc) login)\b[^\n;|&]{0,200}? -p ?)"
            r"[^\s;|&]+"
        ),
        r"(?P<kept>\b(?:mysql\w*|mariadb)\b[^\n;|&]{0,200}? -p)[^\s;|&]+",
        r"(?P<kept>\bcurl\b[^\n;|&]{0,200}? (?:-u|--user) ?['\"]?[^\s:;|&]+:)[^\s;|&'\"]+",
        # headers of HTTP
        r"(?P<kept>\b[Bb]earer )(?=\S{0,200}\d)[\w.~+/=-]{16,}",
        r"(?i)(?P<kept>\bauthorization[\"']?: *[\"']?(?:bearer |basic |token )?)[\w.~+/=-]{8,}",
        r"(?i)(?P<kept>\bcookie: *)\w+=[^\"'\n]+",
    )
)
# "name": "value", name = 'value', name=value, --name value
_NAMED = re.compile(
    r"""(?P<start>(?P<option>--)?(?<![\w.])(?P<name>[A-Za-z_][\w.-]{0,80}+)
    (?:\\{0,3}["'])?\]?(?:[ \t]{0,4}(?:=>|:=|=|:)[ \t]{0,4}|(?(option)[ ]|(?!)))
    (?:[frbuFRBU]?(?=\\{0,3}["']))?)
    (?: (?P<quote>\\{0,3}["'])(?P<quoted>(?:(?!(?P=quote)).){1,4000})(?P=quote)
    | (?P<bare>[^\s"',;&(){}\[\]<>$]{6,}+)(?![(\[]) )""",
    re.VERBOSE | re.ASCII,
)
_LOGIN = re.compile(r"\b(?:sshpass|login)\b")  # -p X is a port or a path elsewhere
_CREDENTIAL_FILES = re.compile(
    r"(?i)\.env(\..*)?|.*\.(pem|p12|pfx|key|keystore|kdbx)|id_(rsa|dsa|ecdsa|ed25519)|[._]netrc"
    r"|\.(pypirc|npmrc|pgpass|htpasswd|git-credentials)|credentials?(\.(json|ya?ml|toml|ini))?"
    r"|.*service[-_]account.*\.json|secrets?\.(json|ya?ml|toml|ini|txt|env)"
)


def is_secret_name(name: str, value: str) -> bool:
    """Return whether a variable or an option holds a credential, by its name.

    >>> is_secret_name("HF_TOKEN", "hf_123"), is_secret_name("MAX_TOKENS", "4096")
    (True, False)
    """
    if not value or _SECRET_NAME.fullmatch(_CAMEL_CASE.sub("_", name)) is None:
        return False
    if _SEED.fullmatch(name) and (len(value) < 16 or not re.search("[A-Za-z]", value)):
        return False
    is_number = value.isdigit() and _HIDES_NUMBERS.search(name) is not None
    return is_number or _HARMLESS.fullmatch(value) is None


def is_credential_file(name: str) -> bool:
    """Return whether people keep credentials in a file of this name.

    >>> is_credential_file(".env"), is_credential_file("train.py")
    (True, False)
    """
    is_template = name.lower().endswith((".example", ".sample", ".template", ".dist"))
    return _CREDENTIAL_FILES.fullmatch(name) is not None and not is_template


class Redactor:
    """The rules above for one environment.

    >>> Redactor().variables({"HF_TOKEN": "hf_123", "LANG": "C"})
    {'HF_TOKEN': '***', 'LANG': 'C'}
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        rule = environ.get("TENSORTAP_SECRETS", "")
        self._rule = _compile(rule) if rule else None
        lines = {k: v for k, v in environ.items() if len(v) >= 8 and "\n" not in v}
        hidden = {v for k, v in lines.items() if self._hides(k, v)}
        self._repeated = sorted(hidden, key=len, reverse=True)  # a value may contain another

    def _hides(self, name: str, value: str) -> bool:
        by_rule = self._rule is not None and self._rule.search(name) is not None
        return by_rule or is_secret_name(name, value)

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
        option = ""  # its value may be the next argument
        is_login = _LOGIN.search(" ".join(arguments)) is not None
        for argument in arguments:
            name, equals, value = argument.partition("=")
            follows = option and not argument.startswith("-")
            if follows and (self._hides(option, argument) or (option == "p" and is_login)):
                stored.append(HIDDEN)
            elif equals and self._hides(name.lstrip("-+~"), value):
                stored.append(f"{name}={HIDDEN}")
            else:
                stored.append(self.text(argument))
            is_option = not equals and re.fullmatch(r"--?[\w.-]+", argument)
            is_flag = argument.startswith(("--use", "--no"))  # --use-auth-token has no value
            option = argument.lstrip("-") if is_option and not is_flag else ""
        return stored

    def text(self, text: str) -> str:
        """Return a text with everything hidden in it that looks like a credential.

        Its lines stay lines.

        >>> Redactor(environ={}).text("https://me:pass@example.org/repo.git")
        'https://***@example.org/repo.git'
        """
        for value in self._repeated:
            text = text.replace(value, HIDDEN)
        if self._rule is not None:
            text = self._rule.sub(_hidden, text)
        for pattern in _PATTERNS:
            text = pattern.sub(_hidden, text)
        return _NAMED.sub(self._without_value, text)

    def _without_value(self, match: re.Match[str]) -> str:
        value, quote = match["quoted"] or match["bare"], match["quote"] or ""
        name = match["name"]
        if match["quoted"] and not self._hides(name, value):
            inner = _NAMED.sub(self._without_value, value)  # JSON in a string
            return f"{match['start']}{quote}{inner}{quote}"
        if HIDDEN in value or value[0] in "<{$%[|" or not self._hides(name, value):
            return match.group()
        # in code, other things follow such a name as well: names of variables, text, templates
        is_mixed = re.search(r"\d", value) and re.search(r"[A-Za-z]", value)
        if _HIDES_NUMBERS.search(name):
            is_secret = is_mixed or match["quoted"]
        else:
            is_word = len(value) >= 8 and " " not in value
            is_secret = is_mixed and is_word and not _CODE_NAME.fullmatch(value)
        if not is_secret:
            return match.group()
        return f"{match['start']}{quote}{HIDDEN}{quote}"


def _hidden(match: re.Match[str]) -> str:
    """Return ``***`` for each line of a match, after the "+" or "-" of a patch."""
    kept = match.groupdict().get("kept") or ""
    rest = re.sub(r"(?<=\n)([-+ ]?)(?!\\ )[^\n]+", rf"\1{HIDDEN}", match.group())
    return kept + HIDDEN + rest[rest.find("\n") :] if "\n" in rest else kept + HIDDEN


@functools.lru_cache(maxsize=8)
def _compile(rule: str) -> re.Pattern[str]:
    try:
        return re.compile(rule, re.IGNORECASE)
    except re.error as error:
        log.warning("TENSORTAP_SECRETS is not a regular expression: %r (%s)", rule, error)
        return re.compile(re.escape(rule), re.IGNORECASE)  # never less careful than asked
