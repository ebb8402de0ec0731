"""Redaction: whatever looks like a credential is stored as ``***``.

The rules, in the order in which they apply to an environment variable or an argument:

* ``TENSORTAP_SECRETS``, a regular expression of the user (case is ignored): if it matches the
  name, the whole value is hidden, else the part of the value that it matches.
* A name with PASSWORD, SECRET, TOKEN, CREDENTIAL, COOKIE, WEBHOOK, JWT, DSN, AUTHORIZATION or the
  word KEY, or that ends in PWD, PW, PASS, PAT, AUTH or CREDS: the whole value is hidden, unless
  - the last word of the name describes the credential (FILE, PATH, TYPE, SIZE, URL, ...),
  - the value is a number or a boolean (``MAX_TOKEN=512``; not for PASSWORD and SECRET),
  - the value is a path (for CREDENTIALS, NETRC, AUTH and PASS).
* Anywhere: ``user:password@`` and ``?token=`` in URLs, and the known formats of tokens and keys
  (``ghp_...``, ``sk-...``, ``hf_...``, ``AKIA...``, JWTs, private keys, Slack webhooks, ...).
* Anywhere: the value of such a name, as in ``"password": "x"``, ``api_key=x`` and ``--token x``.
* Anywhere: a repetition of the value of a variable that was hidden because of its name.
* In untracked files: words of 20 to 200 characters that look random.

In arguments, JSON and source code the word KEY is also used for other things (``--text-key
content``): there it hides a value only after API, ACCESS, SECRET, PRIVATE and the like, or if the
value is long and random. Not recognized: passwords under an ordinary name, hexadecimal keys under
an ordinary name, and whatever is in binary files.
"""

from __future__ import annotations

import base64
import bisect
import collections
import contextlib
import functools
import itertools
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence

log = logging.getLogger("tensortap")

HIDDEN = "***"

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# the first hide any value, the second let numbers and booleans pass
_ALWAYS = re.compile(r"\w*PASS(WORD|WD|PHRASE|CODE)S?|\w*SECRETS?|SSHPASS|PGPASS")
_UNLESS_PLAIN = re.compile(
    r"\w*TOKEN|(API|ACCESS|AUTH|REFRESH|BOT|BEARER|SESSION)TOKENS?|\w*CREDENTIALS?|COOKIES?"
    r"|WEBHOOKS?|JWT|DSN|AUTHORIZATION|(API|ACCESS|PRIVATE|ENCRYPTION|SIGNING|AUTH|LICENSE)KEYS?"
)
_LAST = ("PWD", "PW", "PASS", "PAT", "AUTH", "CREDS", "CRED", "CONNSTR", "UNSEAL")
_AFTER_AUTH = ("HEADER", "HEADERS", "CONFIG", "STRING", "DATA", "BASIC")
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
_MAY_BE_A_PATH = re.compile(r"\w*CREDENTIALS?|CREDS?|NETRC|AUTH|PASS|PGPASS")
_PATH = re.compile(
    r"(~|\.{0,2}/|[A-Za-z]:\\)[^\s:@]*|[\w.-]+(/[\w.-]+)+|[\w-]+\.(json|ya?ml|toml|ini|cfg|txt)"
)
_PLAIN = re.compile(r"[-+]?\d{0,9}(\.\d*)?|true|false|yes|no|on|off|none|null|auto", re.IGNORECASE)
_ATTACHED = re.compile(r"-p(?=.*\d)(?=.*[A-Za-z])[^\s=/]{6,}")  # mysql -pPASSWORD; not -p8080
_OPAQUE = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w+/=.~-]{20,}")
_NOT_A_VALUE = re.compile(r"(use|no|with|without|require|need|has)[-_]", re.IGNORECASE)

_LETTERS = re.compile(r"[A-Za-z]{2}")
_WORDLIKE = re.compile(r"[\w.+/=~:-]{12,}", re.ASCII)  # may contain a token
_QUOTED = re.compile(r"(?<=[\"'])[\w.+/=~:-]{20,}(?=[\"'])", re.ASCII)
_SHAPES = re.compile(
    r"""(?<![A-Za-z0-9])(?:
      gh[pousr]_[A-Za-z0-9]{16,} | github_pat_\w{20,} | gl(?:pat|dt|ft|soat|rt|cbt|ptt)-[\w-]{16,}
    | sk-(?=[\w-]*\d)[\w-]{16,} | [sr]k_(?:live|test)_\w{10,} | whsec_[\w+/=]{16,}
    | hf_[A-Za-z0-9]{16,} | (?:AKIA|ASIA|AROA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Za-z0-9])
    | xox[a-z]-[\w-]{10,} | xapp-[\w-]{10,} | AIza[\w-]{30,} | ya29\.[\w-]{20,} | GOCSPX-[\w-]{20,}
    | npm_[A-Za-z0-9]{30,} | pypi-[\w-]{40,} | dckr_pat_[\w-]{20,} | shp(?:at|ca|pa|ss)_[\da-f]{32}
    | eyJ[\w-]{8,}\.eyJ[\w-]{4,}\.[\w-]* | SG\.[\w-]{16,}\.[\w-]{16,} | do[por]_v1_[0-9a-f]{20,}
    | gsk_[A-Za-z0-9]{20,} | r8_[A-Za-z0-9]{20,} | nvapi-[\w-]{20,} | dapi[0-9a-f]{32}(?!\w)
    | xai-[\w-]{20,} | pplx-[\w-]{20,} | hvs\.[\w-]{20,} | glsa_[\w-]{20,} | lin_api_\w{20,}
    | sq0(?:csp|atp)-[\w-]{20,} | key-[0-9a-f]{32} | (?:AC|SK)[0-9a-f]{32}(?!\w)
    | [0-9a-f]{32}-us\d{1,2}(?!\w) | \d{8,10}:AA[\w-]{30,} | AGE-SECRET-KEY-1[A-Z0-9]{20,}
    | [MNO][A-Za-z\d_-]{23,25}\.[\w-]{6}\.[\w-]{27,} | AKC[A-Za-z0-9]{30,} | ATATT3x[\w=-]{20,}
    | sntry[su]_[\w+/=-]{20,} | tskey-\w+-[\w-]{10,} | wandb_v\d_\w{20,} | PMAK-[\w-]{20,}
    ) | (?P<kept>hooks\.slack\.com/|/api/webhooks/|/webhookb2/)[\w/@-]+
    | (?P<field>AccountKey=|SharedAccessKey=|SharedAccessSignature=)[^;\s]+
    """,
    re.VERBOSE | re.ASCII,
)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN[ A-Z]*PRIVATE KEY[ A-Z]*-----.*?(?:-----END[ A-Z]*PRIVATE KEY[ A-Z]*-----|\Z)",
    re.DOTALL,
)
# every name that is_secret_name accepts, and the schemes, contain one of these
_HINT = re.compile(
    r"[Pp]ass|PASS|[Pp]wd?\b|PWD?\b|[Ss]ecret|SECRET|[Tt]oken|TOKEN|[Kk]ey|KEY|[Aa]uth|AUTH|[Cc]red"
    r"|CRED|[Cc]ookie|COOKIE|[Ww]ebhook|WEBHOOK|[Jj]wt|JWT|[Dd]sn|DSN|[Pp]at\b|PAT\b|[Cc]onn|CONN"
    r"|[Nn]etrc|NETRC|Bearer|Basic"
)
# Searching for words is fast: only lines that contain one of these are looked at more closely. The
# first are searched without regard to case, the second are the starts of the shapes above.
_WORDS_OF_SECRETS = tuple(
    b"pass pw secret token key auth cred cookie webhook jwt dsn pat conn netrc bearer basic ://".split()
)
_STARTS_OF_SHAPES = tuple(
    b"""ghp_ gho_ ghu_ ghs_ ghr_ github_pat_ glpat- gldt- glft- glsoat- glrt- glcbt- glptt- sk- xox
    k_live_ k_test_ whsec_ hf_ AKIA ASIA AROA ABIA ACCA xapp- AIza ya29. GOCSPX- npm_ pypi- shpat_
    dckr_pat_ shpca_ shppa_ shpss_ eyJ SG. _v1_ gsk_ r8_ nvapi- dapi xai- pplx- hvs. glsa_ lin_api_
    sq0csp- sq0atp- key- AC SK -us :AA AGE-SECRET-KEY-1 AKC ATATT3x sntrys_ sntryu_ tskey- wandb_v
    PMAK- hooks.slack.com/ /api/webhooks/ /webhookb2/ AccountKey= SharedAccess""".split()
)
_WITHOUT_START = 55  # characters: other shapes are at least as long
_MIXED = re.compile(rb"(?=.*[A-Z]).*\d\D+\d", re.DOTALL)
_SCHEME = re.compile(r"\b(Bearer|Basic|Token) ([\w.~+/=-]{8,})")
_USERINFO = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*)://([^\s/?#@]*(?:@[^\s/?#@]*)*)@(?=[^\s/?#])")
_QUERY = re.compile(
    r"(?i)(?<=[?&;])((?:[\w.-]*(?:token|password|passwd|pwd|secret|signature|sig|credential|api_?key"
    r"|access_?key|auth|key)))=([^&\s#;'\"]+)"
)
# "name": "value", name = 'value', name=value, --name value
_ASSIGNED = re.compile(
    r"""(?P<start>(?P<option>--)?\b(?P<name>[A-Za-z_][\w.-]{0,80}+)
    (?:\\{0,3}["'])?\]?(?:\s{0,4}(?:=>|:=|=|:)\s{0,4}|(?(option)[ ]|(?!)))
    (?:[frbuFRBU]?(?=\\{0,3}["']))?)
    (?: (?P<quote>\\{0,3}["'])(?P<quoted>(?:(?!(?P=quote)).){1,4000})(?P=quote)
    | (?P<bare>[^\s"',;&(){}\[\]<>$]{3,}) )""",
    re.VERBOSE | re.ASCII,
)
_TO_END_OF_LINE = re.compile(r"(?i)((?:proxy-)?authorization|(?:set-)?cookie)(: *)([^\"'\n]{4,})")


@functools.lru_cache(maxsize=4096)
def _words(name: str) -> list[str]:
    return [word.upper() for word in _WORDS.findall(name)]


def is_secret_name(name: str, value: str | None = None, *, argument: bool = False) -> bool:
    """Return whether a name says that its value is a credential.

    >>> is_secret_name("HF_TOKEN"), is_secret_name("TOKENIZERS_PARALLELISM")
    (True, False)
    """
    words = _words(name)
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
    if word == "AUTH" and rest[1:2] and rest[1] in _AFTER_AUTH:
        return True
    if len(rest) == 1 and (word in _LAST or (word.endswith("PWD") and word != "PWD")):
        if not argument or word not in {"PAT", "AUTH"} or before:
            return True
        return value is not None and _kinds(value) >= 3
    if word == "TOKENS":
        return before in _OF_TOKENS
    if word in {"KEY", "KEYS"}:
        if not argument or before in _OF_KEYS:
            return True
        return value is not None and bool(_OPAQUE.fullmatch(value))
    if word == "TOKEN" and before in _OF_LANGUAGE:
        return False
    return _UNLESS_PLAIN.fullmatch(word) is not None


def _kinds(text: str) -> int:
    """Count the kinds of characters: lower case, upper case, digits, others."""
    return sum(re.search(kind, text) is not None for kind in ("[a-z]", "[A-Z]", r"\d", r"[^\w]"))


def looks_random(word: str) -> bool:
    """Return whether a word looks like a key: long, mixed, and unlike a name.

    >>> looks_random("k3Vb9QzLx0Tn2RfYw7Pd"), looks_random("TransformerEncoderLayer2")
    (True, False)
    """
    if "://" in word or re.match(r"sha\d+[-:=]", word):
        return False
    return any(map(_is_random, re.findall(r"[\w+-]{20,200}", word, re.ASCII)))


def _is_random(word: str) -> bool:
    # the name of a class or a model has few digits, in few places, and words in lower case
    if len(re.findall(r"\d+", word)) < 2 or not re.search(r"[A-Z]", word):
        return False
    in_words = sum(map(len, re.findall(r"[a-z]{3,}", word))) / len(word)
    if in_words > (0.34 if len(word) < 28 else 0.48):
        return False
    kinds = ["a" if c.islower() else "A" if c.isupper() else c.isdigit() for c in word]
    changes = sum(a != b for a, b in itertools.pairwise(kinds)) / len(word)
    shares = [count / len(word) for count in collections.Counter(word).values()]
    entropy = -sum(share * math.log2(share) for share in shares)
    return "a" in kinds and changes >= 0.33 and entropy >= min(4.2, math.log2(len(word)) - 0.6)


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
            if flag and not argument.startswith("-"):
                hidden = self._argument_value(flag, argument)
                stored.append(self.text(argument) if hidden is None else hidden)
                flag = ""
                continue
            flag = ""
            if _ATTACHED.fullmatch(argument):
                stored.append(f"-p{HIDDEN}")
                continue
            name, equals, value = argument.partition("=")
            if equals and re.fullmatch(r"[-+~]{0,2}[\w.@/-]+", name):
                hidden = self._argument_value(name, value)
                stored.append(f"{name}={self.text(value) if hidden is None else hidden}")
                continue
            if not equals and re.fullmatch(r"--?[\w.-]+", argument):
                flag = argument
            stored.append(self.text(argument))
        return stored

    def _argument_value(self, name: str, value: str) -> str | None:
        """Return what to store instead of the value of an option; None to look at its text."""
        if name in ("-u", "--user", "--proxy-user", "--userpwd"):
            user, colon, password = value.partition(":")
            is_secret = bool(password) and "/" not in user and not _PLAIN.fullmatch(password)
            return f"{user}{colon}{HIDDEN}" if is_secret else None
        if name == "-p":  # also used for ports and paths
            return None if _PLAIN.fullmatch(value) or _PATH.fullmatch(value) else HIDDEN
        bare = name.lstrip("-+~")
        if not _NOT_A_VALUE.match(bare) and self._hides(bare, value, argument=True):
            return HIDDEN
        return None

    def text(self, text: str, *, literals_only: bool = False, entropy: bool = False) -> str:
        """Return a text with everything hidden in it that looks like a credential.

        With `literals_only`, a value after a name must be in quotes, as in source code; with
        `entropy`, words that look random are hidden as well.

        >>> Redactor(environ={}).text("https://me:pass@example.org/repo.git")
        'https://***@example.org/repo.git'
        """
        for value in self._repeated:
            if value in text:
                text = text.replace(value, HIDDEN)
        if self._rule is not None:
            text = self._rule.sub(HIDDEN, text)
        if not _LETTERS.search(text):  # rows of numbers
            return text
        if "://" in text:
            text = _USERINFO.sub(_without_userinfo, text)
            text = _QUERY.sub(rf"\1={HIDDEN}", text)
        if "PRIVATE KEY" in text:
            text = _PRIVATE_KEY.sub(HIDDEN, text)
        text = _WORDLIKE.sub(_without_shapes, text)
        if entropy:
            text = (_QUOTED if literals_only else _WORDLIKE).sub(_without_random, text)
        if self._rule is not None or _HINT.search(text):
            text = _SCHEME.sub(_without_scheme, text)
            text = _TO_END_OF_LINE.sub(_without_header, text)
            text = _ASSIGNED.sub(functools.partial(self._without_value, literals_only), text)
        return text

    def suspects(self, lines: Sequence[bytes], *, entropy: bool = False) -> Iterable[int]:
        """Return the indices of the lines that `text` may change, in order."""
        if self._rule is not None:
            return range(len(lines))
        block = b"".join(lines)
        starts = list(itertools.accumulate(map(len, lines), initial=0))
        repeated = [value.encode("utf-8", "surrogateescape") for value in self._repeated]
        found: set[int] = set()
        for searched, words in (
            (block.lower(), _WORDS_OF_SECRETS),
            (block, (*_STARTS_OF_SHAPES, *repeated)),
        ):
            for word in words:
                at = searched.find(word)
                while at >= 0:
                    following = bisect.bisect_right(starts, at)
                    found.add(following - 1)
                    at = searched.find(word, starts[following])
        least = 20 if entropy else _WITHOUT_START
        if max(map(len, block.split()), default=0) >= least:
            for index, line in enumerate(lines):
                long = [word for word in line.split() if len(word) >= least]
                if any(len(word) >= _WITHOUT_START or _MIXED.match(word) for word in long):
                    found.add(index)
        return sorted(found)

    def _without_value(self, literals_only: bool, match: re.Match[str]) -> str:
        value = match["quoted"] or match["bare"]
        if match["bare"] and (literals_only or not value.strip("*./:-")):
            return match.group()
        name = match["name"]
        if HIDDEN in value or _NOT_A_VALUE.match(name):
            return match.group()
        # tokens of language models, templates, identifiers
        is_word = value[0] in "<|{[" or not (re.search(r"\d", value) or _kinds(value) >= 3)
        if literals_only and is_word and not any(map(_ALWAYS.fullmatch, _words(name))):
            return match.group()
        if not self._hides(name, value, argument=True):
            return match.group()
        quote = match["quote"] or ""
        return f"{match['start']}{quote}{HIDDEN}{quote}"


def _without_shapes(match: re.Match[str]) -> str:
    return _SHAPES.sub(
        lambda found: (found["kept"] or found["field"] or "") + HIDDEN, match.group()
    )


def _without_random(match: re.Match[str]) -> str:
    return HIDDEN if looks_random(match.group()) else match.group()


def _without_scheme(match: re.Match[str]) -> str:
    scheme, value = match.groups()
    if scheme == "Basic":  # user:password in base64; a sentence may say "Basic TransformerBlock"
        with contextlib.suppress(ValueError):
            if ":" in base64.b64decode(f"{value.rstrip('=')}==").decode("utf-8"):
                return f"{scheme} {HIDDEN}"
        return match.group()
    is_token = len(value) >= 16 and re.search(r"\d", value) and re.search(r"[A-Za-z]", value)
    return f"{scheme} {HIDDEN}" if is_token else match.group()


def _without_header(match: re.Match[str]) -> str:
    name, colon, value = match.groups()
    return f"{name}{colon}{HIDDEN}" if _kinds(value) >= 3 else match.group()


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
